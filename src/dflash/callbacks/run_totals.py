"""What a whole run has seen, over all of its resumes: for the summary."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from dflash.batch import Batch
from dflash.callbacks.interval import sum_over_ranks


class RunTotals(Callback):
    """Counts on this rank; those before a resume come from the checkpoint."""

    def __init__(self) -> None:
        self.counts = {
            "samples": 0,
            "truncated_samples": 0,
            "real_tokens": 0,
            "padded_tokens": 0,
            "anchors": 0,
            "batches_without_anchor": 0,
        }

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Count one micro-batch."""
        self.counts["samples"] += len(batch.lengths)
        self.counts["truncated_samples"] += batch.num_truncated
        self.counts["real_tokens"] += batch.num_real_tokens
        self.counts["padded_tokens"] += batch.num_padded_tokens
        self.counts["anchors"] += len(batch.anchors)
        self.counts["batches_without_anchor"] += len(batch.anchors) == 0

    def over_all_ranks(self, trainer: Trainer) -> dict[str, int]:
        """The counts summed over ranks. All ranks must call it."""
        summed = sum_over_ranks(trainer, torch.tensor(list(self.counts.values())))
        return dict(zip(self.counts, summed.tolist(), strict=True))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the counts of all ranks: only rank 0 writes."""
        checkpoint["run_totals"] = self.over_all_ranks(trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on counting, from the earlier counts on rank 0 alone."""
        if trainer.is_global_zero:
            self.counts.update(checkpoint["run_totals"])
