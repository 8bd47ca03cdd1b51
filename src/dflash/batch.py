"""What travels from collate to the training step: one batch of samples with their anchors."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass  # not frozen: Lightning refuses to move frozen dataclasses between devices
class Batch:
    """B samples padded on the right to S positions, with N anchors among them.

    Targets are causal, so padding on the right changes no real position and needs no attention mask.
    """

    input_ids: Tensor  # [B, S] int64
    loss_mask: Tensor  # [B, S] bool, true where the token is to be predicted; false on padding
    lengths: Tensor  # [B] int64, real tokens of each sample
    sample_ids: Tensor  # [B] int64, row in the token dataset
    anchors: Tensor  # [N] int64, position of each anchor in its sample, sorted within a sample
    anchor_doc: Tensor  # [N] int64, row in 0..B-1 of each anchor's sample, ascending
    epoch: int = 0
    num_truncated: int = 0  # samples cut to the token budget (batch.too_long=truncate)
    hidden: Tensor | None = None  # [B, S, L * H] the target's captured states; set by the placement

    @property
    def num_real_tokens(self) -> int:
        """Tokens of the samples themselves."""
        return int(self.lengths.sum())

    @property
    def num_padded_tokens(self) -> int:
        """Tokens that are computed: B * S."""
        return self.input_ids.numel()

    def to(self, device: torch.device) -> "Batch":
        """The batch with every tensor on `device`."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in moved.items():
            if isinstance(value, Tensor):
                moved[name] = value.to(device, non_blocking=True)
        return Batch(**moved)

    def pin_memory(self) -> "Batch":
        """The batch in page-locked memory; torch's DataLoader calls this where `pin_memory=True`."""
        pinned = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in pinned.items():
            if isinstance(value, Tensor):
                pinned[name] = value.pin_memory()
        return Batch(**pinned)
