"""From a row of samples to batches: cut it, split batches, take batches in another order.

Batches are flat everywhere: a row of samples, and `offsets` where batches begin in it.
"""

import heapq

import numpy as np

from dflash.samplers.limits import BatchLimits, IntArray


def greedy_cut(lengths: IntArray, anchors: IntArray, limits: BatchLimits) -> IntArray:
    """Cut a row of samples into batches, each as long as `limits` allow.

    Args:
        lengths: tokens in the order of the row, [N] int64, none over `limits.max_length`.
        anchors: anchors in the order of the row, [N] int64, none over `limits.anchors_per_sample`.
        limits: what a batch may hold.

    Returns:
        Where batches begin, and N: [num_batches + 1] int64.
    """
    num_samples = len(lengths)
    if num_samples == 0:
        return np.zeros(1, dtype=np.int64)
    # How many samples a batch may hold that holds this one; a batch's capacity is the smallest of its samples'.
    capacities = limits.token_budget // limits.padded_lengths(lengths)
    if limits.max_samples is not None:
        capacities = np.minimum(capacities, limits.max_samples)
    running_anchors = np.cumsum(anchors).tolist()
    anchor_budget = running_anchors[-1] if limits.anchor_budget is None else limits.anchor_budget

    # One pass over plain ints: with a handful of samples to a batch (the random order), numpy calls for each batch
    # would cost several times as much.
    begins = [0]
    smallest = num_samples + 1
    full_at = num_samples  # no sample from this position on fits into the batch
    anchors_full_at = anchor_budget  # nor any that brings running_anchors above this
    for position, (capacity, anchors_so_far) in enumerate(zip(capacities.tolist(), running_anchors, strict=True)):
        if capacity < smallest:
            smallest = capacity
            full_at = begins[-1] + capacity
        if position >= full_at or anchors_so_far > anchors_full_at:
            begins.append(position)
            smallest = capacity
            full_at = position + capacity
            anchors_full_at = running_anchors[position - 1] + anchor_budget
    return np.array([*begins, num_samples], dtype=np.int64)


def split_batches(offsets: IntArray, multiple: int) -> IntArray:
    """Halve batches, those with most samples first, until their number divides by `multiple`.

    Unchanged where there are too few samples for that. Halves stay neighbours, and keep the padding of their batch.
    """
    num_splits = -(len(offsets) - 1) % multiple
    if len(offsets) - 1 + num_splits > offsets[-1]:
        return offsets
    sizes = np.diff(offsets)
    # No more than num_splits batches can ever be split: the largest, ties in the order of the row.
    largest = np.argsort(-sizes, kind="stable")[:num_splits]
    heap = [(-int(sizes[b]), int(offsets[b])) for b in largest]
    heapq.heapify(heap)
    cuts = []
    for _ in range(num_splits):
        size, begin = heapq.heappop(heap)
        half = -size // 2
        cuts.append(begin + half)
        heapq.heappush(heap, (-half, begin))
        heapq.heappush(heap, (size + half, begin + half))
    return np.sort(np.concatenate([offsets, np.array(cuts, dtype=np.int64)]))


def take_batches(indices: IntArray, offsets: IntArray, batches: IntArray) -> tuple[IntArray, IntArray]:
    """The flat form of the chosen batches in their new order."""
    sizes = np.diff(offsets)[batches]
    new_offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
    shift = np.repeat(offsets[:-1][batches] - new_offsets[:-1], sizes)
    return indices[np.arange(new_offsets[-1]) + shift], new_offsets
