"""Who was in the batch when the gradient or the loss jumped: `spikes.jsonl`, and what lengths have to do with it."""

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from dflash import metric_names
from dflash.batch import Batch
from dflash.callbacks.interval import IntervalCallback, completes_step, sum_over_ranks
from dflash.training.by_length import NUM_LENGTH_BUCKETS, loss_by_length
from dflash.training.lightning_module import DFlashModule, StepFigures
from dflash.training.objective import BlockOutcome

SPIKES_NAME = "spikes.jsonl"


class Spikes(IntervalCallback):
    """`grad/spikes`, `grad/spike_threshold`, `loss/spikes`, and a line of `spikes.jsonl` for every spike.

    The module judges each optimizer step (config group `spikes`); this notes the samples that were in it.

    Attributes:
        counts: spikes of the gradient, of the loss, and skipped optimizer steps, over the whole run.
        lengths: how much of the step loss's ups and downs the lengths in the step explain.
    """

    num_sums = 2

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"gradient": 0, "loss": 0, "skipped_steps": 0}
        self.lengths = ExplainedByLength()
        self._step_samples: list[tuple[int, int]] = []  # (sample id, length) of this rank's micro-batches
        self._step_loss = torch.zeros(2, NUM_LENGTH_BUCKETS, dtype=torch.float64)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the lines of steps that a resumed run is about to repeat."""
        path = Path(trainer.default_root_dir) / SPIKES_NAME
        if trainer.is_global_zero and path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if json.loads(line)["step"] <= trainer.global_step]
            partial = path.with_suffix(".partial")
            partial.write_text("".join(kept), encoding="utf-8")
            os.replace(partial, path)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Note the micro-batch; at the step's end, record it if it was a spike."""
        assert isinstance(pl_module, DFlashModule)
        self._step_samples += zip(batch.sample_ids.tolist(), batch.lengths.tolist(), strict=True)
        if outputs["outcome"] is not None:
            self._step_loss += loss_by_length(batch, outputs["outcome"])
        if completes_step(trainer, batch_idx):
            if pl_module.step is not None:
                self._end_step(trainer, pl_module.step)
            self._step_samples = []
            self._step_loss.zero_()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _end_step(self, trainer: Trainer, step: StepFigures) -> None:
        loss_by_bucket = sum_over_ranks(trainer, self._step_loss)
        self.lengths.add(step.loss.value, loss_by_bucket[1])
        if not step.gradient.is_spike and not step.loss.is_spike:
            return
        self.counts["gradient"] += step.gradient.is_spike
        self.counts["loss"] += step.loss.is_spike
        self.counts["skipped_steps"] += step.is_skipped
        if trainer.is_global_zero:  # ranks judge alike, and their counts are summed at the interval's end
            self.sums += torch.tensor([step.gradient.is_spike, step.loss.is_spike], dtype=torch.float64)
        samples = _of_all_ranks(trainer, self._step_samples)
        if trainer.is_global_zero:
            line = spike_line(trainer.global_step, step, samples, loss_by_bucket)
            with (Path(trainer.default_root_dir) / SPIKES_NAME).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def measure(self, trainer: Trainer, batch: Batch, outcome: BlockOutcome | None) -> Tensor:
        """Nothing to add for a micro-batch: a spike belongs to a step."""
        return torch.zeros(self.num_sums)

    def metrics(self, trainer: Trainer, sums: list[float]) -> dict[str, float]:
        """Spikes of the interval, and the gradient norm that the next one has to exceed."""
        module: Any = trainer.lightning_module
        assert isinstance(module, DFlashModule)
        metrics = {metric_names.GRAD_SPIKES: sums[0], metric_names.LOSS_SPIKES: sums[1]}
        threshold = module.gradient_detector.threshold
        if math.isfinite(threshold):
            metrics[metric_names.GRAD_SPIKE_THRESHOLD] = threshold
        return metrics

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the counts and the unfinished interval."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        checkpoint["spikes"] = {"counts": dict(self.counts), "lengths": list(self.lengths.sums)}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on from them."""
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        if state := checkpoint.get("spikes"):
            self.counts = dict(state["counts"])
            self.lengths.sums = list(state["lengths"])


class ExplainedByLength:
    """The share of the step loss's variance that the mean length in the step explains: the mark of sorted training.

    The squared correlation of the changes from step to step, of the loss and of the mean log2 length (weighted as the
    loss is): differences are free of the trend, and a loss that falls explains nothing.
    """

    def __init__(self) -> None:
        # Last loss, last length (nan: none yet), then over the differences: n, sums of x, y, xx, yy, xy.
        self.sums = [math.nan, math.nan, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]

    def add(self, loss: float, weight_by_bucket: Tensor) -> None:
        """Add a step.

        Args:
            loss: of the step; one that is not finite is left out.
            weight_by_bucket: weights of its blocks by length bucket, [NUM_LENGTH_BUCKETS].
        """
        if not math.isfinite(loss):
            return
        buckets = torch.arange(len(weight_by_bucket), dtype=torch.float64)
        length = float((buckets * weight_by_bucket).sum() / weight_by_bucket.sum())
        x, y = length - self.sums[1], loss - self.sums[0]
        if math.isfinite(x):
            parts = (1.0, x, y, x * x, y * y, x * y)
            self.sums[2:] = [total + part for total, part in zip(self.sums[2:], parts, strict=True)]
        self.sums[:2] = [loss, length]

    @property
    def share(self) -> float | None:
        """In 0..1; None where nothing varies."""
        n, x, y, xx, yy, xy = self.sums[2:]
        if n < 2:
            return None
        var_x, var_y, cov = xx / n - (x / n) ** 2, yy / n - (y / n) ** 2, xy / n - x * y / n**2
        return cov**2 / (var_x * var_y) if var_x > 0 and var_y > 0 else None


def spike_line(
    step_number: int, step: StepFigures, samples: list[tuple[int, int]], loss_by_bucket: Tensor
) -> dict[str, Any]:
    """One line of `spikes.jsonl`.

    Args:
        step_number: optimizer step, counted from 1.
        step: what it came to.
        samples: (id, length) of every sample in it.
        loss_by_bucket: [2, NUM_LENGTH_BUCKETS], sums of weighted loss and of weights.
    """
    loss, weight = loss_by_bucket.tolist()
    return {
        "step": step_number,
        "gradient_spike": step.gradient.is_spike,
        "loss_spike": step.loss.is_spike,
        "skipped": step.is_skipped,
        "gradient_norm": _plain(step.gradient.value),
        "gradient_threshold": _plain(step.gradient.threshold),
        "loss": _plain(step.loss.value),
        "loss_threshold": _plain(step.loss.threshold),
        "sample_ids": [sample_id for sample_id, _ in samples],
        "lengths": [length for _, length in samples],
        "loss_by_length": {
            metric_names.length_range(bucket): _plain(loss[bucket] / weight[bucket])
            for bucket in range(NUM_LENGTH_BUCKETS)
            if weight[bucket]
        },
    }


def _plain(value: float) -> float | str:
    """JSON has no nan and no infinity: those become words."""
    return value if math.isfinite(value) else str(value)


def _of_all_ranks(trainer: Trainer, samples: list[tuple[int, int]]) -> list[tuple[int, int]]:
    if trainer.world_size == 1:
        return samples
    gathered: list[list[tuple[int, int]]] = [[] for _ in range(trainer.world_size)]
    torch.distributed.all_gather_object(gathered, samples)
    return [sample for of_rank in gathered for sample in of_rank]
