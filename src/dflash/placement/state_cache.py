"""Target states of samples that have been seen, so that later epochs need no pass through the target.

The target is frozen and causal: a sample's states are the same in every epoch and in any company, up to rounding.
"""

import torch
from torch import Tensor

from dflash.batch import Batch

_BLOCK_BYTES = 2**26


class StateCache:
    """States by sample, in main memory, as many as fit.

    Args:
        budget_bytes: no more than this is kept; samples beyond it go through the target in every epoch.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.states: dict[int, Tensor] = {}  # sample id -> [length, L * H]
        # States are kept in large blocks: allocated one by one among a step's temporary tensors, they would keep the
        # memory around them from being used again.
        self._block = torch.empty(0)
        self._rows_used = 0

    def find(self, batch: Batch) -> Tensor | None:
        """The batch's states, [B, S, L * H], zero on padding; None unless every sample of the batch is kept."""
        rows = [self.states.get(sample_id) for sample_id in batch.sample_ids.tolist()]
        lengths = batch.lengths.tolist()
        if any(row is None or len(row) != length for row, length in zip(rows, lengths, strict=True)):
            return None
        found = [row for row in rows if row is not None]
        hidden = found[0].new_zeros(batch.input_ids.numel(), found[0].shape[1])
        for start, states in zip(batch.starts.tolist(), found, strict=True):
            hidden[start : start + len(states)] = states
        return hidden.view(*batch.input_ids.shape, -1).to(batch.input_ids.device)

    def keep(self, batch: Batch) -> None:
        """Keep the states of the batch's samples while there is room."""
        assert batch.hidden is not None
        hidden = batch.hidden.flatten(0, 1)
        ids, lengths, starts = batch.sample_ids.tolist(), batch.lengths.tolist(), batch.starts.tolist()
        for sample_id, length, start in zip(ids, lengths, starts, strict=True):
            size = length * hidden.shape[1] * hidden.element_size()
            if sample_id not in self.states and self.used_bytes + size <= self.budget_bytes:
                kept = self._room(length, hidden)
                kept.copy_(hidden[start : start + length])
                self.states[sample_id] = kept
                self.used_bytes += size

    def _room(self, length: int, like: Tensor) -> Tensor:
        """[length, L * H] of the current block, or of a new one."""
        if self._rows_used + length > len(self._block):
            rows = max(_BLOCK_BYTES // (like.shape[1] * like.element_size()), length)
            self._block = torch.empty(rows, like.shape[1], dtype=like.dtype)
            self._rows_used = 0
        self._rows_used += length
        return self._block[self._rows_used - length : self._rows_used]
