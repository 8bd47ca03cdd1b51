"""Where length buckets end: geometric, by quantiles, or at the least cost.

Bounds are the longest length of each bucket, ascending; the last one is the longest sample's.
"""

import numpy as np

from dflash.cost import CostModel
from dflash.samplers.limits import BatchLimits, IntArray


def geometric_bounds(lengths: IntArray, width: float) -> IntArray:
    """Buckets whose longest sample is at most `width` times their shortest; none is empty.

    The first bucket begins at the shortest sample, each next one at the shortest that the one before could not hold.

    Args:
        lengths: of the samples, [N] int64.
        width: > 1.

    Returns:
        [num_buckets] int64.
    """
    distinct = np.unique(lengths)
    bounds = []
    begin = 0
    while begin < len(distinct):
        begin = int(np.searchsorted(distinct, distinct[begin] * width, side="right"))
        bounds.append(distinct[begin - 1])
    return np.array(bounds, dtype=np.int64)


def quantile_bounds(lengths: IntArray, num_buckets: int) -> IntArray:
    """At most `num_buckets` buckets of about as many samples each.

    Returns:
        [up to num_buckets] int64: fewer where many samples have one length.
    """
    if not len(lengths):
        return np.empty(0, dtype=np.int64)
    # The sample with which each share of k / num_buckets is complete.
    last = -(-np.arange(1, num_buckets + 1) * len(lengths) // num_buckets) - 1
    return np.unique(np.partition(lengths, np.unique(last))[last])


def sample_costs(lengths: IntArray, limits: BatchLimits, cost: CostModel) -> np.ndarray:
    """Cost of one sample in a full batch of samples padded to each of `lengths`; it never falls with the length.

    u + b * u**2 + a / floor(B / u) for a padded length u and a token budget B, times the cost of a token.

    Returns:
        Shape of `lengths`, float64.
    """
    padded = limits.padded_lengths(lengths)
    per_batch = np.maximum(limits.token_budget // padded, 1)
    fixed = cost.per_batch + cost.drafter_per_batch
    return cost.target(padded.astype(np.float64), padded.astype(np.float64) ** 2) + fixed / per_batch


def optimal_bounds(lengths: IntArray, costs: np.ndarray, num_buckets: int) -> IntArray:
    """The bounds of at most `num_buckets` buckets that cost least, every sample at the cost of its bucket's bound.

    A dynamic programme over the distinct lengths u_1 < ... < u_n with running sample counts C:
    D[k][j] = min over i <= j of D[k-1][i] + F(u_j) * (C_j - C_i). Since F never falls, the best i never falls with j
    (the weights are Monge), so each k takes O(n log n) by divide and conquer: the middle j first, then both halves
    between the best i of their ends. Here all middles of one depth are done in one go.

    Args:
        lengths: distinct ones, ascending, with their number of samples: [2, n] int64.
        costs: F of each distinct length, [n], non-decreasing.
        num_buckets: K >= 1.

    Returns:
        [up to num_buckets] int64.
    """
    distinct, counts = lengths
    num_lengths = len(distinct)
    if num_lengths == 0:
        return np.empty(0, dtype=np.int64)
    running = np.concatenate([[0.0], np.cumsum(counts, dtype=np.float64)])
    price = np.concatenate([[0.0], costs])
    best = price * running  # one bucket
    choices = []
    for _ in range(min(num_buckets, num_lengths) - 1):
        best, chosen = _one_more_bucket(best, price, running)
        choices.append(chosen)
    bounds = [num_lengths]
    for chosen in reversed(choices):
        if (before := int(chosen[bounds[-1]])) > 0:
            bounds.append(before)
    return distinct[np.unique(np.array(bounds)) - 1]


def _one_more_bucket(best: np.ndarray, price: np.ndarray, running: np.ndarray) -> tuple[np.ndarray, IntArray]:
    """D[k] and its argmin i from D[k-1], each [n + 1], index 0 for no length at all."""
    size = len(best)
    result = np.zeros(size)
    stride = 1 << (size - 1).bit_length()
    # Best i of every j that is done; beyond the last j any i is allowed.
    chosen = np.full(stride + 1, size - 1, dtype=np.int64)
    chosen[0] = 0
    while stride > 1:
        half = stride // 2
        middles = np.arange(half, size, stride)
        first = chosen[middles - half]
        last = np.minimum(chosen[middles + half], middles)
        widths = last - first + 1
        starts = np.cumsum(widths) - widths
        candidates = np.arange(starts[-1] + widths[-1]) - np.repeat(starts - first, widths)
        values = best[candidates] - np.repeat(price[middles], widths) * running[candidates]
        least = np.minimum.reduceat(values, starts)
        result[middles] = least + price[middles] * running[middles]
        # The first candidate that reaches the least value: written last, in reverse.
        reached = np.flatnonzero(values == np.repeat(least, widths))[::-1]
        chosen[np.repeat(middles, widths)[reached]] = candidates[reached]
        stride = half
    return result, chosen[:size]
