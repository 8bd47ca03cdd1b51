"""Who waits for whom between targets and drafter (`placement=pool`): metrics, and a line in words when it changes."""

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from dflash import metric_names
from dflash.batch import Batch
from dflash.callbacks.interval import completes_interval, completes_step, log_metrics, sum_over_ranks
from dflash.placement.pipeline import PoolState
from dflash.training.lightning_module import DFlashModule

NOTICEABLE_WAIT = 0.1  # of the time: a side that waits less is not held up by the other
NEARLY_EMPTY = 0.1  # of q_pre: targets that are held up by anything but the loader find it full


class PipelineMetrics(Callback):
    """`pipeline/*` over every logging interval without decoding, validation left out; means over ranks.

    Args:
        state: of the pool.
        num_replicas: on this rank.
        capacity_tokens: of each of the two queues.
    """

    def __init__(self, state: PoolState, num_replicas: int, capacity_tokens: int) -> None:
        self.state = state
        self.num_replicas = num_replicas
        self.capacity_tokens = capacity_tokens
        self.verdict = ""
        self._decoding_seconds = 0.0
        self._stored_until = 0  # delivered batches, up to which they had been read while nobody took any
        self._start_interval()

    def _start_interval(self) -> None:
        self._begin, self._before = time.perf_counter(), self.state.figures_now()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out what came before."""
        self._start_interval()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start anew: while the drafter validates, the queues fill and nobody waits for it."""
        self._start_interval()
        self._stored_until = self._before.brought

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Log the interval; say which side holds up the other, where that has changed."""
        if not (completes_step(trainer, batch_idx) and completes_interval(trainer)):
            return
        assert isinstance(pl_module, DFlashModule)
        now, before, seconds = self.state.figures_now(), self._before, time.perf_counter() - self._begin
        has_decoded = pl_module.decoding_seconds != self._decoding_seconds  # on rank 0; the others waited for it
        # Queues that filled during a validation or a decoding, or that nothing follows, hide who is slow.
        remaining = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        is_stored = before.delivered < self._stored_until or now.brought - now.delivered >= remaining
        delivered = max(now.delivered - before.delivered, 1)
        shares = torch.tensor(
            [
                (now.waiting_tokens_sum - before.waiting_tokens_sum) / delivered / self.capacity_tokens,
                (now.states_tokens_sum - before.states_tokens_sum) / delivered / self.capacity_tokens,
                (now.target_wait_seconds - before.target_wait_seconds) / seconds / self.num_replicas,
                (now.drafter_wait_seconds - before.drafter_wait_seconds) / seconds,
                (now.transfer_seconds - before.transfer_seconds) / seconds / self.num_replicas,
                has_decoded,
                is_stored,
            ],
            dtype=torch.float64,
        )
        shares = sum_over_ranks(trainer, shares) / trainer.world_size
        q_pre, q_hs, target_wait, drafter_wait, transfer, any_decoded, any_stored = shares.tolist()
        self._start_interval()
        if any_decoded:  # as after a validation
            self._decoding_seconds = pl_module.decoding_seconds
            self._stored_until = self._before.brought
            return
        metrics = {
            metric_names.PIPELINE_Q_PRE: q_pre,
            metric_names.PIPELINE_Q_HS: q_hs,
            metric_names.PIPELINE_TARGET_WAIT: target_wait,
            metric_names.PIPELINE_DRAFTER_WAIT: drafter_wait,
            metric_names.PIPELINE_TRANSFER: transfer,
        }
        log_metrics(trainer, pl_module, metrics)
        if any_stored:
            return
        verdict, advice = judge(target_wait, drafter_wait, q_pre)
        if trainer.is_global_zero and verdict != self.verdict:
            print(
                f"pipeline: {verdict}. The drafter waited {drafter_wait:.0%} of the time, the targets "
                f"{target_wait:.0%}; their queue is {q_pre:.0%} full, the drafter's {q_hs:.0%}.{advice}",
                flush=True,
            )
        self.verdict = verdict


def judge(target_wait: float, drafter_wait: float, q_pre: float) -> tuple[str, str]:
    """Which side holds up the other, and what to change.

    Args:
        target_wait: share of the time that a target waits for room or for batches.
        drafter_wait: share of the time that the drafter waits for states.
        q_pre: how full the queue before the targets is, of 1.
    """
    if max(target_wait, drafter_wait) < NOTICEABLE_WAIT:
        return "targets and drafter keep up with each other", ""
    if min(target_wait, drafter_wait) >= NOTICEABLE_WAIT and q_pre < NEARLY_EMPTY:
        return "the loader is the bottleneck", " Raise num_workers: both sides wait for batches."
    if drafter_wait > target_wait:
        advice = " Name more devices in placement.targets, or take a sampler that pads less (padding/ratio)."
        return "the targets are the bottleneck", advice
    advice = " Fewer targets would do; lower batch.anchors_per_sample or batch.anchor_budget if its time matters."
    return "the drafter is the bottleneck", advice
