"""Which replica reads a batch, or which parts of it: one rule for `placement=pool` and for its simulation."""

from collections.abc import Sequence

import numpy as np

from dflash.cost import CostModel
from dflash.placement.queues import Part
from dflash.placement.split_by_length import IntArray, length_groups

ROUTINGS = ("least_loaded", "split_by_length")


def route_batch(
    lengths: IntArray,
    loads: Sequence[float],
    *,
    packed: bool,
    routing: str,
    cost: CostModel,
    max_groups: int,
    pad_multiple: int,
) -> list[Part]:
    """The whole batch for the replica with least before it, or length groups for several; packed ones are never cut.

    Args:
        lengths: [D] tokens of the samples.
        loads: predicted cost of what each replica has before it.
        packed: samples behind each other in a row, or a row each.
        routing: of ROUTINGS.
        cost: what a pass costs.
        max_groups: of a batch, at most.
        pad_multiple: rows are padded to multiples of it.
    """
    if routing == "split_by_length" and not packed:
        return length_groups(lengths, cost, loads, max_groups=max_groups, pad_multiple=pad_multiple)
    replica = min(range(len(loads)), key=lambda r: loads[r])
    return [Part(replica, None, pass_cost(lengths, packed, cost, pad_multiple))]


def padded_tokens(lengths: IntArray, packed: bool, pad_multiple: int) -> int:
    """Tokens that a target computes for samples in a row each, or behind each other in one."""
    width = int(lengths.sum() if packed else lengths.max())
    return -(-width // pad_multiple) * pad_multiple * (1 if packed else len(lengths))


def pass_cost(lengths: IntArray, packed: bool, cost: CostModel, pad_multiple: int) -> float:
    """Predicted cost of a target's pass over a whole batch; packed rows attend within their samples."""
    tokens = padded_tokens(lengths, packed, pad_multiple)
    squares = float((lengths.astype(np.float64) ** 2).sum()) if packed else tokens**2 / len(lengths)
    return float(cost.target(float(tokens), squares)) + cost.per_batch
