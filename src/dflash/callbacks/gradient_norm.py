"""The norm of the gradient, before clipping."""

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from dflash import metric_names
from dflash.batch import Batch
from dflash.callbacks.interval import IntervalCallback, completes_step
from dflash.training.lightning_module import DFlashModule
from dflash.training.objective import BlockOutcome


class GradientNorm(IntervalCallback):
    """`grad/norm`: mean over the interval's optimizer steps with a finite norm. The module measures, this reads."""

    num_sums = 2

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Read the norm of the step that has just been completed."""
        assert isinstance(pl_module, DFlashModule)
        step = pl_module.step
        if completes_step(trainer, batch_idx) and step is not None and math.isfinite(step.gradient.value):
            self.sums += torch.tensor([step.gradient.value, 1.0], dtype=torch.float64)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def measure(self, trainer: Trainer, batch: Batch, outcome: BlockOutcome | None) -> Tensor:
        """Nothing to add for a micro-batch: a norm belongs to a step."""
        return torch.zeros(self.num_sums)

    def metrics(self, trainer: Trainer, sums: list[float]) -> dict[str, float]:
        """The mean; ranks hold the same norm, so summing over them changes nothing."""
        return {metric_names.GRAD_NORM: sums[0] / sums[1]} if sums[1] else {}
