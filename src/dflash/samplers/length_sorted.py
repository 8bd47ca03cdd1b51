"""Sort by length once, cut once: almost no padding, and the same samples meet in every epoch (`sampler=sorted`).

The original way, here to be compared with.
"""

import numpy as np

from dflash.samplers.base import LengthBatchSampler
from dflash.samplers.cut import greedy_cut
from dflash.samplers.limits import BatchLimits, IntArray


class LengthSortedSampler(LengthBatchSampler):
    """Batches of neighbours in length; only their order changes from epoch to epoch."""

    def compose(
        self, lengths: IntArray, anchors: IntArray, limits: BatchLimits, rng: np.random.Generator
    ) -> tuple[IntArray, IntArray]:
        """Shortest first, equal lengths in the dataset's order; no chance involved."""
        order = np.argsort(lengths, kind="stable")
        return order, greedy_cut(lengths[order], anchors[order], limits)
