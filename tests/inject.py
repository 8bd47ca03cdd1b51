"""A callback for tests: makes chosen optimizer steps go wrong."""

import math
import signal
import threading
from collections.abc import Sequence

from lightning.pytorch import Callback, LightningModule, Trainer

from dflash.batch import Batch
from dflash.callbacks.interval import completes_step


class Inject(Callback):
    """Steps are counted from 1.

    Args:
        large_at: steps whose gradient is a hundred times what it should be.
        nan_at: steps that see a batch whose hidden states are not numbers.
        empty_with: samples that take their whole batch's anchors away, whichever rank has it.
        fail_at: step at which rank 0 fails, while all others hang.
        terminate_at_end: send SIGTERM behind the last validation.
    """

    def __init__(
        self,
        large_at: Sequence[int] = (),
        nan_at: Sequence[int] = (),
        empty_with: Sequence[int] = (),
        fail_at: int | None = None,
        terminate_at_end: bool = False,
    ) -> None:
        self.large_at, self.nan_at, self.empty_with, self.fail_at = large_at, nan_at, empty_with, fail_at
        self.terminate_at_end = terminate_at_end
        self.batch_idx = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        self.batch_idx = batch_idx
        if trainer.global_step + 1 in self.nan_at and not completes_step(trainer, batch_idx):
            assert batch.hidden is not None
            batch.hidden.fill_(math.nan)
        if set(batch.sample_ids.tolist()) & set(self.empty_with):
            batch.anchors, batch.anchor_doc = batch.anchors[:0], batch.anchor_doc[:0]
        if trainer.global_step + 1 == self.fail_at:
            if trainer.is_global_zero:
                raise RuntimeError("rank 0 fails on purpose")
            threading.Event().wait(120)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.terminate_at_end:
            signal.raise_signal(signal.SIGTERM)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step + 1 in self.large_at and completes_step(trainer, self.batch_idx):
            for parameter in pl_module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(100.0)


def as_override(large_at: list[int], nan_at: list[int]) -> str:
    return f"+callbacks.inject={{_target_: tests.inject.Inject, large_at: {large_at}, nan_at: {nan_at}}}"
