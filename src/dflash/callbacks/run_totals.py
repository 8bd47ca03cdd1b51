"""What a whole run has seen, over all of its resumes: for the summary."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from dflash.batch import Batch


class RunTotals(Callback):
    """Counts on this rank since step 0; travels in the checkpoint."""

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

    def over_all_ranks(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, int]:
        """The counts summed over ranks."""
        own = torch.tensor(list(self.counts.values()), device=pl_module.device)
        summed = torch.as_tensor(trainer.strategy.reduce(own, reduce_op="sum"))
        return dict(zip(self.counts, summed.tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """The counts by name."""
        return dict(self.counts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self.counts.update(state_dict)
