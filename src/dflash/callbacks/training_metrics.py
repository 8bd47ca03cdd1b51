"""Loss, accuracy, acceptance length and learning rate of training, and where in the data it stands."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from dflash import metric_names
from dflash.batch import Batch
from dflash.callbacks.interval import IntervalCallback
from dflash.data.datamodule import DFlashDataModule
from dflash.training.objective import BlockOutcome


class TrainingMetrics(IntervalCallback):
    """`train/*` and `data/epoch`.

    `train/acceptance_length` is a mean over drawn anchors: cheap, and biased upwards against decoding (see `walk`).
    """

    num_sums = 6

    def __init__(self) -> None:
        super().__init__()
        self.learning_rate = 0.0

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note the rate that this step uses: afterwards the scheduler has moved on."""
        self.learning_rate = optimizer.param_groups[0]["lr"]

    def measure(self, trainer: Trainer, batch: Batch, outcome: BlockOutcome | None) -> Tensor:
        """Loss, weight, right slots, slots, matched tokens, blocks."""
        if outcome is None:
            return torch.zeros(self.num_sums)
        parts = (
            outcome.loss_sum,
            outcome.weights.sum(),
            outcome.correct.sum(),
            outcome.supervised.sum(),
            outcome.matched().sum(),
            torch.tensor(len(outcome.correct), device=outcome.correct.device),
        )
        return torch.stack([part.double() for part in parts]).cpu()

    def metrics(self, trainer: Trainer, sums: list[float]) -> dict[str, float]:
        """Ratios of the sums; without a block in the interval, only rate and epoch."""
        loss, weight, correct, slots, matched, blocks = sums
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(datamodule, DFlashDataModule)
        metrics = {
            metric_names.TRAIN_LR: self.learning_rate,
            metric_names.DATA_EPOCH: datamodule.schedule.fractional_epoch(trainer.global_step),
        }
        if blocks:
            metrics[metric_names.TRAIN_LOSS] = loss / weight
            metrics[metric_names.TRAIN_ACCURACY] = correct / slots
            metrics[metric_names.TRAIN_ACCEPTANCE_LENGTH] = 1 + matched / blocks
        return metrics
