"""What travels from collate to the training step: one batch of samples with their anchors."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass  # not frozen: Lightning refuses to move frozen dataclasses between devices
class Batch:
    """D samples with N anchors among them: padded on the right, a row each, or packed behind each other in one row.

    Padded: B = D rows of S positions. Targets are causal, so padding on the right changes no real position and needs no
    attention mask. Packed: B = 1 row of sum(lengths) positions and a little padding at its end, S in all; `cu_seqlens`
    says where samples begin, and no sample may see another.
    """

    input_ids: Tensor  # [B, S] int64
    loss_mask: Tensor  # [B, S] bool, true where the token is to be predicted; false on padding
    lengths: Tensor  # [D] int64, real tokens of each sample
    sample_ids: Tensor  # [D] int64, row in the token dataset
    anchors: Tensor  # [N] int64, position of each anchor in its sample, sorted within a sample
    anchor_doc: Tensor  # [N] int64, sample in 0..D-1 of each anchor, ascending
    cu_seqlens: Tensor | None = None  # [D + 1] int32, packed only: where samples begin, and where the last one ends
    epoch: int = 0
    num_truncated: int = 0  # samples cut to the token budget (batch.too_long=truncate)
    hidden: Tensor | None = None  # [B, S, L * H], the target's captured states; set by the placement

    @property
    def starts(self) -> Tensor:
        """[D] int64: where each sample begins among the B * S positions, row after row."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens[:-1].long()
        return torch.arange(len(self.lengths), device=self.lengths.device) * self.input_ids.shape[1]

    @property
    def position_ids(self) -> Tensor:
        """[1, S] int64: each token's position in its own sample, the same in every row."""
        if self.cu_seqlens is not None:
            return packed_position_ids(self.cu_seqlens, self.input_ids.shape[1])
        return torch.arange(self.input_ids.shape[1], device=self.input_ids.device)[None]

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


def packed_position_ids(cu_seqlens: Tensor, row_length: int) -> Tensor:
    """Each token's position in its own sample; padding behind the last sample counts on, nobody sees it.

    Args:
        cu_seqlens: [D + 1] int32, where samples begin in the row, and where the last one ends.
        row_length: S.

    Returns:
        [1, S] int64.
    """
    places = torch.arange(row_length, device=cu_seqlens.device)
    begins = cu_seqlens[:-1].long()
    sample = torch.searchsorted(begins, places, right=True) - 1
    return (places - begins[sample])[None]
