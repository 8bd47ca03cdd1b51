"""What every measuring callback shares: sums over a logging interval, turned into metrics at its end."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from dflash.batch import Batch
from dflash.training.lightning_module import DFlashModule
from dflash.training.objective import BlockOutcome


def completes_step(trainer: Trainer, batch_idx: int) -> bool:
    """Whether micro-batch `batch_idx` was the last of its optimizer step."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def sum_over_ranks(trainer: Trainer, values: Tensor) -> Tensor:
    """The sum of every rank's tensor, on the CPU. All ranks must call it."""
    # root_device and not the module's: after fit Lightning has moved the module to the CPU, where NCCL can not reduce.
    summed = trainer.strategy.reduce(values.to(trainer.strategy.root_device), reduce_op="sum")
    return torch.as_tensor(summed).cpu()


def completes_interval(trainer: Trainer) -> bool:
    """Whether the optimizer step that has just been completed ends a logging interval."""
    return trainer.global_step % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]  # set by a connector


def log_metrics(trainer: Trainer, module: LightningModule, metrics: dict[str, float]) -> None:
    """Send metrics to every logger at the current optimizer step, and keep them for the status line and the summary."""
    assert isinstance(module, DFlashModule)
    module.latest_metrics.update(metrics)
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.global_step)


class IntervalCallback(Callback, ABC):
    """Sums counts over all micro-batches and ranks of an interval of `trainer.log_every_n_steps` optimizer steps.

    A metric is a sum over a count of that interval alone: what is absent from it logs nothing, never a stale value. The
    sums of an unfinished interval travel in the checkpoint, so that a resumed run logs what an undisturbed one does.
    """

    num_sums: int

    def __init__(self) -> None:
        self.sums = torch.zeros(self.num_sums, dtype=torch.float64)

    @abstractmethod
    def measure(self, trainer: Trainer, batch: Batch, outcome: BlockOutcome | None) -> Tensor:
        """What one micro-batch adds to the sums, [num_sums]; `outcome` is None where it had no anchor."""

    @abstractmethod
    def metrics(self, trainer: Trainer, sums: list[float]) -> dict[str, float]:
        """Metrics of the finished interval, from the sums over all ranks."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Add the micro-batch; at the interval's end log and start anew."""
        self.sums += self.measure(trainer, batch, outputs["outcome"]).to(self.sums)
        if completes_step(trainer, batch_idx) and completes_interval(trainer):
            log_metrics(trainer, pl_module, self.metrics(trainer, sum_over_ranks(trainer, self.sums).tolist()))
            self.sums.zero_()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the unfinished interval, over all ranks: only rank 0 writes."""
        checkpoint[f"sums of {type(self).__name__}"] = sum_over_ranks(trainer, self.sums).tolist()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Continue the unfinished interval, its sums on rank 0 alone."""
        sums = checkpoint.get(f"sums of {type(self).__name__}")
        if sums is not None and trainer.is_global_zero:
            self.sums = torch.tensor(sums, dtype=torch.float64)
