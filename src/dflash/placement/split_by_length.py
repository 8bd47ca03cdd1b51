"""A batch of random company cut into groups of similar length, for several replicas of the target.

The target reads every sample by itself, so a batch may be read in parts: each part is padded to its own longest sample
only, and the drafter gets the whole batch again.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dflash.cost import CostModel
from dflash.placement.queues import Part

IntArray = NDArray[np.int64]

# A pass more costs what no fit of `cost.per_batch` catches whole (a launch, a copy, a join): it must be worth it.
HARDLY_MORE = 1.01


def length_groups(
    lengths: IntArray, cost: CostModel, loads: Sequence[float], *, max_groups: int, pad_multiple: int
) -> list[Part]:
    """Groups of samples, and which replica reads each.

    Where every one of several replicas is idle, the drafter waits: the samples are cut into as many groups as there
    are replicas, so that the slowest of them is done as early as can be. Otherwise what counts is the targets' whole
    work: it is made least over all cuts into up to `max_groups` groups, however many replicas there are (a group more
    pads less, but costs `cost.per_batch`); fewer groups are taken where they cost hardly more. Groups go, dearest
    first, to the replica with least before it.

    Args:
        lengths: [D] tokens of the samples.
        cost: what a group costs.
        loads: predicted cost of what each replica has before it.
        max_groups: no more than this.
        pad_multiple: groups are padded to multiples of it.

    Returns:
        One group or more; every sample is in one of them.
    """
    by_length = np.argsort(lengths, kind="stable")
    padded = -(-lengths[by_length] // pad_multiple) * pad_multiple
    costs = _group_costs(padded, cost)
    max_groups = min(max_groups, len(lengths))
    if any(loads) or len(loads) == 1:
        cuts = _best_cuts(costs, max_groups, np.add)
        work = [sum(costs[i, j] for i, j in pairwise(bounds)) for bounds in cuts]
        enough = HARDLY_MORE * min(work)
        bounds = next(cut for cut, of_cut in zip(cuts, work, strict=True) if of_cut <= enough)
    else:
        bounds = _best_cuts(costs, min(max_groups, len(loads)), np.maximum)[-1]
    before = list(loads)
    groups = []
    for begin, end in sorted(pairwise(bounds), key=lambda group: -costs[group]):
        replica = min(range(len(before)), key=lambda r: before[r])
        before[replica] += costs[begin, end]
        groups.append(Part(replica, np.sort(by_length[begin:end]), float(costs[begin, end]), int(padded[end - 1])))
    return groups


def _group_costs(padded: IntArray, cost: CostModel) -> NDArray[np.float64]:
    """Of a group that holds the samples i..j-1 of ascending padded length, [D + 1, D + 1]; infinite where i >= j."""
    count = np.arange(len(padded) + 1)
    samples = (count - count[:, None]).astype(float)
    longest = np.concatenate([[0], padded]).astype(float)
    costs = cost.target(samples * longest, samples * longest**2) + cost.per_batch
    costs[samples <= 0] = np.inf
    return costs


def _best_cuts(costs: NDArray[np.float64], max_groups: int, combine: np.ufunc) -> list[list[int]]:
    """The best cuts into 1, 2, .. `max_groups` groups, as bounds 0..D: those that make the combined cost least."""
    least, came_from = costs[0], []
    cuts = [[0, len(costs) - 1]]
    for _ in range(1, max_groups):
        whole = combine(least[:, None], costs)
        came_from.append(whole.argmin(axis=0))
        least = whole.min(axis=0)
        bounds = [len(costs) - 1]
        for choices in reversed(came_from):
            bounds.append(int(choices[bounds[-1]]))
        cuts.append([0, *reversed(bounds)])
    return cuts
