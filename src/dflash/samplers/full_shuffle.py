"""Shuffle everything each epoch, cut greedily: best mixed, and most of the compute is padding (`sampler=random`)."""

import numpy as np

from dflash.samplers.base import LengthBatchSampler
from dflash.samplers.cut import greedy_cut
from dflash.samplers.limits import BatchLimits, IntArray


class FullShuffleSampler(LengthBatchSampler):
    """Batches of samples in random order, whatever their lengths."""

    def compose(
        self, lengths: IntArray, anchors: IntArray, limits: BatchLimits, rng: np.random.Generator
    ) -> tuple[IntArray, IntArray]:
        """A new random order each epoch."""
        order = rng.permutation(len(lengths))
        return order, greedy_cut(lengths[order], anchors[order], limits)
