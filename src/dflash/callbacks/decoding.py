"""Real decoding of a few held-out prompts while training goes on."""

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from transformers import PreTrainedTokenizerBase

from dflash import metric_names
from dflash.batch import Batch
from dflash.callbacks.interval import completes_step, log_metrics
from dflash.checks import check_integer
from dflash.decoding.block_drafter import BlockDrafter
from dflash.decoding.comparison import Prompt, compare_decoding
from dflash.decoding.transcript import DecodingOptions
from dflash.target.ends import target_ends
from dflash.target.frozen import FrozenTarget
from dflash.target.loading import end_of_turn_ids
from dflash.target.sequence import TargetSequence
from dflash.training.lightning_module import DFlashModule


class Decoding(Callback):
    """`decode/acceptance_length` and `decode/speedup`: greedy, the same prompts with and without the drafter.

    Rank 0 decodes while the others wait at the next reduction of gradients. With `placement=pool` it decodes on the
    first replica's device.

    Args:
        every_n_steps: optimizer steps between two measurements.
        num_prompts: how many held-out prompts; always the first ones.
        max_new_tokens: a text ends here at the latest. Time goes with num_prompts * max_new_tokens.
    """

    def __init__(self, every_n_steps: int = 1000, num_prompts: int = 4, max_new_tokens: int = 64) -> None:
        check_integer("callbacks.decoding.every_n_steps", every_n_steps, 1)
        check_integer("callbacks.decoding.num_prompts", num_prompts, 1)
        check_integer("callbacks.decoding.max_new_tokens", max_new_tokens, 1)
        self.options = DecodingOptions((), max_new_tokens)
        self.every_n_steps = every_n_steps
        self.num_prompts = num_prompts
        self.lend_target: Callable[[], AbstractContextManager[FrozenTarget]] | None = None
        self.prompts: Sequence[Prompt] = ()

    def use(
        self,
        lend_target: Callable[[], AbstractContextManager[FrozenTarget]],
        prompts: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        report: Callable[[str], None] = print,
    ) -> None:
        """Set what exists only once the run has loaded its target and its data.

        Where nothing can be decoded, `report` is told why, and training goes on without.
        """
        try:
            with lend_target() as target:
                self.options = replace(self.options, stop_ids=tuple(end_of_turn_ids(target.model, tokenizer)))
                if not prompts:
                    raise ValueError("no held-out sample has a prompt that can be decoded.")
                TargetSequence(target).prefill(torch.tensor(prompts[0].token_ids[:1], device=target.device))
        except ValueError as error:
            report(f"callbacks.decoding measures nothing in this run: {error}")
            return
        self.lend_target, self.prompts = lend_target, prompts

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Decode when it is time."""
        is_due = completes_step(trainer, batch_idx) and trainer.global_step % self.every_n_steps == 0
        if self.lend_target is None or not is_due or not trainer.is_global_zero:
            return
        assert isinstance(pl_module, DFlashModule)
        start = time.perf_counter()
        with self.lend_target() as target:
            drafter = _drafter_beside(target, pl_module, trainer.precision_plugin.forward_context)
            comparison = compare_decoding(target, drafter, self.prompts, self.options, block_size=drafter.block_size)
        metrics = {
            metric_names.DECODE_ACCEPTANCE_LENGTH: comparison.acceptance_length,
            metric_names.DECODE_SPEEDUP: comparison.speedup,
        }
        log_metrics(trainer, pl_module, {name: value for name, value in metrics.items() if value is not None})
        pl_module.decoding_seconds += time.perf_counter() - start


def _drafter_beside(
    target: FrozenTarget, module: DFlashModule, precision: Callable[[], AbstractContextManager[None]]
) -> BlockDrafter:
    """The module's drafter; a copy of it where the target is on another device: tokens pass to and fro all the time."""
    if target.device == module.device:
        return BlockDrafter(module.drafter, module.ends, precision=precision)
    copied = copy.deepcopy(module.drafter).to(target.device)
    return BlockDrafter(copied, target_ends(target.model), precision=precision)
