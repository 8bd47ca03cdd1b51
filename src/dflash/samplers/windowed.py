"""Sort inside windows of shuffled samples: from a full shuffle to a full sort with one number (`sampler=windowed`)."""

import numpy as np

from dflash.checks import check_integer
from dflash.samplers.base import LengthBatchSampler
from dflash.samplers.cut import greedy_cut
from dflash.samplers.limits import BatchLimits, IntArray


class WindowedSampler(LengthBatchSampler):
    """A full shuffle, sorted by length inside windows of so many samples.

    Args:
        window_samples: 1 is the full shuffle, as many as there are samples is a sort.

    Raises:
        ValueError: it is no whole number of 1 or more.
    """

    def __init__(self, window_samples: int = 2048) -> None:
        check_integer("sampler.window_samples", window_samples, 1)
        self.window_samples = window_samples

    def compose(
        self, lengths: IntArray, anchors: IntArray, limits: BatchLimits, rng: np.random.Generator
    ) -> tuple[IntArray, IntArray]:
        """Windows rise and fall in turns, so that where two meet, a batch holds the long or the short of both."""
        order = rng.permutation(len(lengths))
        shuffled = lengths[order]
        window = np.arange(len(order)) // self.window_samples
        longest = int(shuffled.max(initial=0))
        # One key for window and length: far faster than sorting by two.
        key = window * (longest + 1) + np.where(window % 2 == 0, shuffled, longest - shuffled)
        order = order[np.argsort(key, kind="stable")]
        return order, greedy_cut(lengths[order], anchors[order], limits)
