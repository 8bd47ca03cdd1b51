"""A callback for tests: writes down, to the bit, what every micro-batch of a run was."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from dflash.batch import Batch


class Recorder(Callback):
    """One JSON line a micro-batch: sample ids, anchors, loss and learning rate, floats as hexadecimal."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.learning_rate: float | None = None  # of the step that a micro-batch completes

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.learning_rate = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        line = {
            "step": trainer.global_step,
            "samples": batch.sample_ids.tolist(),
            "anchors": batch.anchors.tolist(),
            "loss": float(outputs["loss"]).hex(),
            "lr": None if self.learning_rate is None else float(self.learning_rate).hex(),
        }
        self.learning_rate = None
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
