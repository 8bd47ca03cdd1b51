"""Rows without padding, in random order (`sampler=packed`): samples of all lengths meet in every step.

The samples of a step are taken in the epoch's random order and dealt to its rows, longest processing time first, so
that no row and no rank has much more to do than the others. What does not fit opens the next step.
"""

from heapq import heapreplace

import numpy as np

from dflash.cost import CostModel
from dflash.samplers.base import ComposedSteps, LengthBatchSampler
from dflash.samplers.limits import BatchLimits, IntArray

NO_ROOM = -1
MAX_SKIPPED = 16  # samples that a step passes over because they do not fit into what is left of it

_LOOK_AHEAD = 64  # samples behind the prefix that a step looks at
_COST_UNITS = 1 << 20  # of an average sample: costs are dealt as whole numbers
_SURE_SHARE = 0.98  # of a step's room: rows are filled so evenly that up to here nobody need ask whether a sample fits


class PackedSampler(LengthBatchSampler):
    """Rows of samples behind each other, `token_budget` tokens at most, as full as they get.

    Args:
        cost: what a sample costs, by which rows are balanced.
    """

    pads = False

    def __init__(self, cost: CostModel | None = None) -> None:
        self.cost = cost or CostModel()

    def compose_steps(
        self,
        lengths: IntArray,
        anchors: IntArray,
        limits: BatchLimits,
        rng: np.random.Generator,
        batches_per_step: int,
    ) -> ComposedSteps:
        """Step after step from one random order; a sample over the budget (`too_long=alone`) gets a row of its own."""
        order = rng.permutation(len(lengths))
        step = _Step(lengths[order], anchors[order], limits, self.cost, batches_per_step)
        dealt: list[IntArray] = []  # of every step, its samples row after row, as places in the order
        sizes: list[IntArray] = []  # and how many each row has
        opening: list[int] = []
        begin = 0
        while opening or begin < len(order):
            places, opening, begin = step.take(opening, begin)
            rows = step.deal(places)
            opening = places[rows == NO_ROOM].tolist() + opening
            by_row = np.argsort(rows, kind="stable")
            dealt.append(places[by_row[np.count_nonzero(rows == NO_ROOM) :]])
            sizes.append(np.bincount(rows[rows != NO_ROOM], minlength=batches_per_step))
        left_out = _fill_last_step(dealt, sizes)
        offsets = np.concatenate([[0], *sizes]).cumsum()
        return ComposedSteps(order[np.concatenate(dealt or [order])], offsets, left_out)


class _Step:
    """Takes the samples of one step from the order, and deals them to its rows.

    What is bounded in a row is counted in up to three ways: tokens, and where `limits` bound them anchors and samples.

    Args:
        lengths: tokens in the epoch's order, [N] int64.
        anchors: anchors in the epoch's order, [N] int64.
        limits: what a row may hold.
        cost: what rows are balanced by.
        num_rows: R.
    """

    def __init__(
        self, lengths: IntArray, anchors: IntArray, limits: BatchLimits, cost: CostModel, num_rows: int
    ) -> None:
        self.num_rows = num_rows
        # A sample over the budget fills a row, no more.
        counts = [(np.minimum(lengths, limits.max_length), limits.max_length)]
        if limits.anchor_budget is not None:
            counts.append((anchors, limits.anchor_budget))
        if limits.max_samples is not None:
            counts.append((np.ones_like(lengths), limits.max_samples))
        self.sizes = [sizes for sizes, _ in counts]  # each [N]
        self.bounds = [bound for _, bound in counts]  # of a row
        self.running = [np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]) for sizes in self.sizes]
        costs = cost.sample(lengths.astype(np.float64), anchors.astype(np.float64))
        unit = costs.mean() / _COST_UNITS if len(costs) else 1.0
        # Above the bits of a row's number, see `deal`.
        self.row_mask = (1 << num_rows.bit_length()) - 1
        self.costs = np.maximum(np.rint(costs / unit), 1).astype(np.int64) << num_rows.bit_length()

    def take(self, opening: list[int], begin: int) -> tuple[IntArray, list[int], int]:
        """Samples of the next step: those of `opening`, the longest prefix that fits behind them, and what fits then.

        Args:
            opening: places in the order that the step before has left.
            begin: first place that no step has looked at.

        Returns:
            places taken [n], the costliest first; places passed over; and the first place that nobody has looked at.
        """
        left = [
            self.num_rows * bound - int(sizes[opening].sum())
            for sizes, bound in zip(self.sizes, self.bounds, strict=True)
        ]
        end = begin + min(
            int(sums.searchsorted(sums[begin] + room, side="right")) - 1 - begin
            for sums, room in zip(self.running, left, strict=True)
        )
        end = max(end, begin)
        left = [room - int(sums[end] - sums[begin]) for sums, room in zip(self.running, left, strict=True)]
        # A look ahead: no further than to as many samples as could be passed over or fill what is left.
        ahead = [sizes[end : end + _LOOK_AHEAD].tolist() for sizes in self.sizes]
        fitting: list[int] = []
        skipped: list[int] = []
        looked = 0
        for size in zip(*ahead, strict=True):
            if len(skipped) == MAX_SKIPPED or min(left) <= 0:
                break
            if all(n <= room for n, room in zip(size, left, strict=True)):
                fitting.append(end + looked)
                left = [room - n for n, room in zip(size, left, strict=True)]
            else:
                skipped.append(end + looked)
            looked += 1
        taken = np.concatenate([np.array([*opening, *fitting], dtype=np.int64), np.arange(begin, end)])
        return taken[np.argsort(-self.costs[taken], kind="stable")], skipped, end + looked

    def deal(self, places: IntArray) -> IntArray:
        """Longest processing time first: each sample goes to the row with the least to do that has room.

        Args:
            places: [n], the costliest first.

        Returns:
            The row of each sample, or NO_ROOM, [n] int64.
        """
        sizes = [of_all[places] for of_all in self.sizes]
        num_sure = min(
            int(np.cumsum(of_places).searchsorted(_SURE_SHARE * self.num_rows * bound))
            for of_places, bound in zip(sizes, self.bounds, strict=True)
        )
        costs = self.costs[places].tolist()
        # A heap of whole numbers, the load above the bits of the row: one int is compared faster than a pair.
        loads = list(range(self.num_rows))
        mask = self.row_mask
        rows = [heapreplace(loads, loads[0] + cost) & mask for cost in costs[:num_sure]]
        room = self._room_after(np.array(rows, dtype=np.int64), sizes)
        if min(map(min, room)) < 0:  # not so even after all, where a few samples are as long as a row
            rows, loads = [], list(range(self.num_rows))
            room = [[bound] * self.num_rows for bound in self.bounds]
        begin = len(rows)
        token_room, *other_room = room
        rest = [of_places[begin:].tolist() for of_places in sizes]
        for cost, tokens, *others in zip(costs[begin:], *rest, strict=True):
            row = loads[0] & mask
            if tokens <= token_room[row] and (not others or _fits(others, other_room, row)):
                heapreplace(loads, loads[0] + cost)
            else:
                row = self._next_row_with_room(loads, cost, [tokens, *others], room)
            rows.append(row)
            if row != NO_ROOM:
                token_room[row] -= tokens
                for n, of_row in zip(others, other_room, strict=True):
                    of_row[row] -= n
        return np.array(rows, dtype=np.int64)

    def _room_after(self, rows: IntArray, sizes: list[IntArray]) -> list[list[int]]:
        """What is left in each row, by kind, once the first samples are in `rows`; `sizes` goes on beyond them."""
        used = [np.bincount(rows, weights=s[: len(rows)], minlength=self.num_rows).astype(np.int64) for s in sizes]
        return [(bound - of_rows).tolist() for bound, of_rows in zip(self.bounds, used, strict=True)]

    def _next_row_with_room(self, loads: list[int], cost: int, size: list[int], room: list[list[int]]) -> int:
        """The row with the least to do among those with room, its load raised by `cost`; or NO_ROOM."""
        if any(n > max(of_row) for n, of_row in zip(size, room, strict=True)):
            return NO_ROOM
        loads.sort()  # a sorted list is a heap
        for place, load in enumerate(loads):
            row = load & self.row_mask
            if _fits(size, room, row):
                loads[place] += cost
                loads.sort()
                return row
        return NO_ROOM


def _fits(size: list[int], room: list[list[int]], row: int) -> bool:
    return all(n <= of_row[row] for n, of_row in zip(size, room, strict=True))


def _fill_last_step(dealt: list[IntArray], sizes: list[IntArray]) -> int:
    """Where the last step has fewer samples than rows, complete it with samples of the rows that have most.

    Args:
        dealt: samples of every step, row after row; updated.
        sizes: samples of every row of every step; updated.

    Returns:
        How many samples had to be left out instead, fewer than the rows of a step: no row has two to give one of.
    """
    if not dealt or len(dealt[-1]) >= len(sizes[-1]):
        return 0
    last, of_last = dealt.pop().tolist(), sizes.pop()
    while len(last) < len(of_last):
        step = max(range(len(sizes)), key=lambda step: sizes[step].max(), default=-1)
        if step < 0 or sizes[step].max() < 2:
            return len(last)
        row = int(sizes[step].argmax())
        end = int(sizes[step][: row + 1].sum())
        last.append(int(dealt[step][end - 1]))
        dealt[step] = np.delete(dealt[step], end - 1)
        sizes[step][row] -= 1
    dealt.append(np.array(last))
    sizes.append(np.ones_like(of_last))
    return 0
