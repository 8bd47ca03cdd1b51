"""`checkpoints/best.ckpt`: the drafter with the longest held-out acceptance length so far."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from dflash import metric_names
from dflash.config import BEST_CHECKPOINT
from dflash.training.lightning_module import DFlashModule


class BestCheckpoint(Checkpoint):
    """Writes the checkpoint after each validation of training that beats all before it.

    What it has to beat is read from the file itself: the checkpoint that a run resumes from is older than the
    validation that followed it, and would let a worse drafter take the place of a better one.

    Args:
        run_folder: `checkpoints/best.ckpt` is written there.
    """

    def __init__(self, run_folder: str | Path) -> None:
        self.path = Path(run_folder) / BEST_CHECKPOINT
        self.acceptance_length = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read what an earlier part of the run has reached."""
        if self.path.is_file():
            states = torch.load(self.path, map_location="cpu", weights_only=True)["callbacks"]
            self.acceptance_length = states[self.state_key]["acceptance_length"]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if this validation is the best."""
        assert isinstance(pl_module, DFlashModule)
        reached = pl_module.latest_metrics.get(metric_names.VAL_ACCEPTANCE_LENGTH, 0.0)
        if trainer.state.fn == "fit" and reached > self.acceptance_length:
            self.acceptance_length = reached
            trainer.save_checkpoint(self.path, weights_only=False)

    def state_dict(self) -> dict[str, Any]:
        """What the checkpoint's drafter has reached."""
        return {"acceptance_length": self.acceptance_length}
