"""Shuffle inside buckets of similar length: little padding, new company each epoch (`sampler=bucketed`).

A batch still holds one bucket, but batches of all buckets are shuffled together. Try other widths with
`sampler.width=1.5`: wider buckets mix better and pad more. `sampler.boundaries=optimal sampler.num_buckets=20` places
so many bounds where they cost least.
"""

import itertools
import math

import numpy as np

from dflash.checks import check_integer
from dflash.cost import CostModel
from dflash.samplers.base import LengthBatchSampler
from dflash.samplers.boundaries import geometric_bounds, optimal_bounds, quantile_bounds, sample_costs
from dflash.samplers.cut import greedy_cut
from dflash.samplers.limits import BatchLimits, IntArray

BOUNDARIES = ("geometric", "quantile", "optimal")


class BucketedSampler(LengthBatchSampler):
    """Batches of samples from one length bucket.

    Args:
        width: geometric: each bucket's longest sample over its shortest, at most; a number > 1.
        boundaries: `geometric` (by `width`), `quantile` or `optimal` (both by `num_buckets`).
        num_buckets: quantile and optimal: how many buckets at most.
        cost: optimal: what padding costs.

    Raises:
        ValueError: one of them is anything else.
    """

    def __init__(
        self,
        width: float = 1.25,
        boundaries: str = "geometric",
        num_buckets: int | None = None,
        cost: CostModel | None = None,
    ) -> None:
        if boundaries not in BOUNDARIES:
            raise ValueError(f"sampler.boundaries={boundaries!r} is unknown: choose one of {', '.join(BOUNDARIES)}.")
        is_number = isinstance(width, int | float) and not isinstance(width, bool)
        if not is_number or not math.isfinite(width) or width <= 1:
            raise ValueError(
                f"sampler.width={width!r} must be a number > 1: each bucket's longest sample over its shortest."
            )
        if boundaries != "geometric":
            check_integer("sampler.num_buckets", num_buckets, 1, f" where sampler.boundaries={boundaries}")
        elif num_buckets is not None:
            raise ValueError(
                f"sampler.num_buckets={num_buckets} is for sampler.boundaries=quantile or optimal; geometric bounds "
                "follow from sampler.width."
            )
        self.boundaries = boundaries
        self.width = width
        self.num_buckets = num_buckets
        self.cost = cost or CostModel()

    def bounds(self, lengths: IntArray, limits: BatchLimits) -> IntArray:
        """Longest length of each bucket, ascending, [num_buckets] int64; the last is the longest sample's."""
        if self.boundaries == "geometric":
            return geometric_bounds(lengths, self.width)
        assert self.num_buckets is not None
        if self.boundaries == "quantile":
            return quantile_bounds(lengths, self.num_buckets)
        distinct, counts = np.unique(lengths, return_counts=True)
        costs = sample_costs(distinct, limits, self.cost)
        return optimal_bounds(np.stack([distinct, counts]), costs, self.num_buckets)

    def compose(
        self, lengths: IntArray, anchors: IntArray, limits: BatchLimits, rng: np.random.Generator
    ) -> tuple[IntArray, IntArray]:
        """Each bucket in a new random order each epoch, cut on its own; a bucket's last batch may be small."""
        bounds = self.bounds(lengths, limits)
        order = rng.permutation(len(lengths))
        # The smallest type that holds a bucket's number: numpy sorts 8 and 16 bits by radix, four times as fast.
        bucket = np.searchsorted(bounds, lengths[order]).astype(np.min_scalar_type(len(bounds)))
        by_bucket = np.argsort(bucket, kind="stable")
        order = order[by_bucket]
        lengths, anchors = lengths[order], anchors[order]
        edges = np.searchsorted(bucket[by_bucket], np.arange(len(bounds) + 1))
        offsets = [np.zeros(1, dtype=np.int64)]
        for begin, end in itertools.pairwise(edges):
            offsets.append(begin + greedy_cut(lengths[begin:end], anchors[begin:end], limits)[1:])
        return order, np.concatenate(offsets)
