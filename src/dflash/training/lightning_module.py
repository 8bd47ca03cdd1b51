"""The Lightning module: one drafter, trained against a frozen target's ends."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from transformers import get_cosine_schedule_with_warmup

from dflash import metric_names
from dflash.batch import Batch
from dflash.drafter.network import DFlashDrafter
from dflash.target.ends import TargetEnds
from dflash.training.by_length import NUM_LENGTH_BUCKETS, bucket_of_samples, loss_by_length
from dflash.training.objective import BlockOutcome, CrossEntropyObjective, block_labels, block_token_ids
from dflash.training.spikes import Judgement, SpikeDetector, SpikeOptions
from dflash.training.walk import walk_batch


@dataclass(frozen=True)
class StepFigures:
    """What one optimizer step came to, over all of its micro-batches and ranks."""

    loss: Judgement  # sum(w * CE) / sum(w)
    gradient: Judgement  # norm, before clipping
    is_skipped: bool  # the gradient was a spike that may not move the weights


class DFlashModule(LightningModule):
    """Trains a drafter. Its state dict and its optimizer hold the drafter and nothing else.

    Args:
        drafter: float32 parameters; autocast does the rest.
        ends: the target's embedding and LM head, on the drafter's device.
        objective: sums the loss of a batch's blocks.
        optimizer: makes the optimizer from parameter groups.
        warmup_fraction: share of `max_steps` over which the learning rate rises from 0; a cosine to 0 follows.
        max_steps: horizon of the schedule, optimizer steps.
        spikes: when loss and gradient norm stick out, and what is done then.
        walk_blocks_per_doc: how many blocks of a sample validation drafts at a time; bounds its memory.

    Attributes:
        step: loss and gradient norm (before clipping) of the latest optimizer step; None if it had no supervised slot.
        num_empty_steps: optimizer steps so far that had no supervised slot at all and changed nothing.
        decoding_seconds: spent so far by the decoding callback, which is no training.
        latest_metrics: the latest value of everything that callbacks have logged.
        validation_totals: [4, buckets] of the latest validation, rows loss sum, weight sum, tokens, rounds.
    """

    def __init__(
        self,
        drafter: DFlashDrafter,
        ends: TargetEnds,
        objective: CrossEntropyObjective,
        optimizer: Callable[[Iterable[dict[str, Any]]], Optimizer],
        *,
        warmup_fraction: float,
        max_steps: int,
        spikes: SpikeOptions | None = None,
        walk_blocks_per_doc: int = 32,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.ends = ends
        self.objective = objective
        self.make_optimizer = optimizer
        self.warmup_fraction = warmup_fraction
        self.max_steps = max_steps
        self.walk_blocks_per_doc = walk_blocks_per_doc
        self.spike_options = spikes = spikes or SpikeOptions()
        self.gradient_detector, self.loss_detector = SpikeDetector(spikes), SpikeDetector(spikes)
        self.step: StepFigures | None = None
        self.num_empty_steps = 0
        self.decoding_seconds = 0.0
        self.latest_metrics: dict[str, float] = {}
        self.validation_totals = torch.zeros(4, NUM_LENGTH_BUCKETS, dtype=torch.float64)
        self._step_sums = torch.zeros(2, dtype=torch.float64)

    def draft(self, batch: Batch) -> BlockOutcome:
        """Draft the batch's blocks and sum their loss. N must be 1 or more."""
        assert batch.hidden is not None, "the placement adds hidden states"
        drafter, where = self.drafter, (batch.anchors, batch.anchor_doc)
        token_ids = block_token_ids(batch, *where, drafter.block_size, drafter.mask_token_id)
        labels, supervised = block_labels(batch, *where, drafter.block_size)
        states = drafter(
            batch.hidden, self.ends.embed(token_ids), batch.anchors, batch.starts[batch.anchor_doc], batch.position_ids
        )
        return self.objective(states, labels, supervised, self.ends)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """The raw weighted loss sum of one micro-batch: it is normalised once a step, over all of them."""
        if len(batch.anchors) == 0:
            return {"loss": self._zero_loss(), "outcome": None}
        outcome = self.draft(batch)
        step_sums = torch.stack([outcome.loss_sum.detach(), outcome.weights.sum()])
        self._step_sums = self._step_sums.to(self.device) + step_sums
        return {"loss": outcome.loss_sum, "outcome": outcome}

    def _zero_loss(self) -> Tensor:
        # Touches every parameter, so that a rank without anchors takes part in DDP's reduction and nobody waits for it.
        return sum(((p * 0.0).sum() for p in self.drafter.parameters()), start=torch.zeros((), device=self.device))

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Turn summed gradients into those of sum(w * CE) / sum(w) over the whole step, measure and judge their norm.

        Lightning has divided the loss by the accumulated batches, DDP the gradients by the ranks; both is undone.
        """
        sums = self.trainer.strategy.reduce(self._step_sums.to(self.device), reduce_op="sum")
        loss_sum, weight_sum = torch.as_tensor(sums).tolist()
        self._step_sums = torch.zeros_like(self._step_sums)
        parameters = [p for p in self.drafter.parameters() if p.grad is not None]
        if weight_sum == 0:
            # Nothing was supervised on any rank.
            self.step = None
            self.num_empty_steps += 1
            self._drop_gradients()
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_mul_(gradients, self.trainer.accumulate_grad_batches * self.trainer.world_size / weight_sum)
        gradient = self.gradient_detector.judge(float(torch.nn.utils.get_total_norm(gradients)))
        loss = self.loss_detector.judge(loss_sum / weight_sum)
        skip = self.spike_options.skip
        is_skipped = gradient.is_spike and (
            skip == "all" or (skip == "non_finite" and not math.isfinite(gradient.value))
        )
        self.step = StepFigures(loss, gradient, is_skipped)
        if is_skipped:
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        # Without gradients AdamW leaves parameters and moments alone.
        for parameter in self.drafter.parameters():
            parameter.grad = None

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the norm that has been measured already."""
        gradients = [p.grad for p in self.drafter.parameters() if p.grad is not None]
        if gradient_clip_val and gradients and self.step and self.step.gradient.value > gradient_clip_val:
            torch._foreach_mul_(gradients, gradient_clip_val / self.step.gradient.value)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW or what the config names, weight decay on matrices only; warm-up, then cosine."""
        parameters = list(self.drafter.parameters())
        optimizer = self.make_optimizer(
            [
                {"params": [p for p in parameters if p.ndim >= 2]},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ]
        )
        warmup_steps = round(self.warmup_fraction * self.max_steps)
        scheduler = get_cosine_schedule_with_warmup(optimizer, warmup_steps, self.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_validation_epoch_start(self) -> None:
        """Start the sums anew."""
        self.validation_totals.zero_()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Loss of the drawn anchors, and the walk over every response, by length of the sample."""
        assert batch.hidden is not None, "the placement adds hidden states"
        if len(batch.anchors):
            self.validation_totals[:2] += loss_by_length(batch, self.draft(batch))
        tokens, rounds = walk_batch(self.drafter, self.ends, batch, self.walk_blocks_per_doc)
        buckets = bucket_of_samples(batch)
        self.validation_totals[2].index_add_(0, buckets, tokens.double())
        self.validation_totals[3].index_add_(0, buckets, rounds.double())

    def on_validation_epoch_end(self) -> None:
        """Log the ratios of sums over all ranks."""
        totals = self.trainer.strategy.reduce(self.validation_totals.to(self.device), reduce_op="sum")
        self.validation_totals = torch.as_tensor(totals).cpu()
        loss_sum, weight_sum, tokens, rounds = self.validation_totals.sum(dim=1).tolist()
        metrics = {}
        if weight_sum:
            metrics[metric_names.VAL_LOSS] = loss_sum / weight_sum
        if rounds:
            metrics[metric_names.VAL_ACCEPTANCE_LENGTH] = tokens / rounds
        self.latest_metrics.update(metrics)
        # self.log is for ModelCheckpoint alone: to loggers it would send another step than the optimizer's.
        self.log_dict(metrics, logger=False)
        for logger in self.loggers:
            logger.log_metrics(metrics, step=self.trainer.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the drafter's config.json, from which the drafter can be built again, and the schedule's horizon."""
        checkpoint["drafter_config"] = self.drafter.config.to_dict()
        checkpoint["max_steps"] = self.max_steps
        checkpoint["num_empty_steps"] = self.num_empty_steps
        checkpoint["gradient_detector"] = self.gradient_detector.state_dict()
        checkpoint["loss_detector"] = self.loss_detector.state_dict()
        checkpoint["latest_metrics"] = dict(self.latest_metrics)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over what is counted and what was last measured."""
        self.num_empty_steps = checkpoint["num_empty_steps"]
        self.gradient_detector.load_state_dict(checkpoint["gradient_detector"])
        self.loss_detector.load_state_dict(checkpoint["loss_detector"])
        self.latest_metrics = dict(checkpoint["latest_metrics"])
