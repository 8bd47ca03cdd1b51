"""Target states of samples that have been seen, so that later epochs need no pass through the target.

The target is frozen and causal: a sample's states are the same in every epoch and in any company, up to rounding.
"""

from torch import Tensor

from dflash.batch import Batch


class StateCache:
    """States by sample, in main memory, as many as fit.

    Args:
        budget_bytes: no more than this is kept; samples beyond it go through the target in every epoch.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.states: dict[int, Tensor] = {}  # sample id -> [length, L * H]

    def find(self, batch: Batch) -> Tensor | None:
        """The batch's states, [B, S, L * H], zero on padding; None unless every sample of the batch is kept."""
        rows = [self.states.get(sample_id) for sample_id in batch.sample_ids.tolist()]
        lengths = batch.lengths.tolist()
        if any(row is None or len(row) != length for row, length in zip(rows, lengths, strict=True)):
            return None
        found = [row for row in rows if row is not None]
        hidden = found[0].new_zeros(*batch.input_ids.shape, found[0].shape[1])
        for row, states in enumerate(found):
            hidden[row, : len(states)] = states
        return hidden.to(batch.input_ids.device)

    def keep(self, batch: Batch) -> None:
        """Keep the states of the batch's samples while there is room."""
        assert batch.hidden is not None
        ids, lengths = batch.sample_ids.tolist(), batch.lengths.tolist()
        for row, (sample_id, length) in enumerate(zip(ids, lengths, strict=True)):
            size = length * batch.hidden.shape[2] * batch.hidden.element_size()
            if sample_id not in self.states and self.used_bytes + size <= self.budget_bytes:
                # A copy: a view would hold on to the whole padded batch.
                self.states[sample_id] = batch.hidden[row, :length].to("cpu", copy=True)
                self.used_bytes += size
