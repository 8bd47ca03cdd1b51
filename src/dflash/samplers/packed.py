"""Rows without padding, in random order (`sampler=packed`): samples of all lengths meet in every step.

The samples of a step are taken in the epoch's random order and dealt to its rows, longest processing time first, so
that no row and no rank has much more to do than the others. What does not fit opens a later step.

Step after step, a million samples would take seconds in Python. So many steps are composed at a time, each from a
window of the order that it has to itself: numpy deals one sample of every step at once. What these steps leave goes to
the next ones, in the end to a single step that has all of the rest for its window. So a sample that is passed over may
wait for many steps; it stays in its epoch.
"""

import numpy as np
from numpy.typing import NDArray

from dflash.cost import CostModel
from dflash.samplers.base import ComposedSteps, LengthBatchSampler
from dflash.samplers.limits import BatchLimits, IntArray

MAX_SKIPPED = 16  # samples that a step passes over because they do not fit into what is left of it

# What becomes of a candidate that gets no row.
PASSED_OVER = -1
NOT_SEEN = -2

NOBODY = -1  # a candidate that is none: fills up a window, has no size
_LOOK_AHEAD = 64  # samples behind the prefix that a step looks at: bounds the search where most of them are too large
_COST_UNITS = 1 << 20  # of an average sample: costs are dealt as whole numbers
_NO_ROW = np.iinfo(np.int64).max  # more than any load


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
        """Steps from one random order; a sample over the budget (`too_long=alone`) gets a row of its own."""
        order = rng.permutation(len(lengths))
        dealer = Dealer(lengths[order], anchors[order], limits, self.cost, batches_per_step)
        window = dealer.samples_of_a_step * 5 // 4 + 2 * MAX_SKIPPED  # what a step looks at, as a rule
        unseen = np.arange(len(order))  # places in the order that no step has looked at
        waiting, waiting_for = unseen[:0], unseen[:0]  # places passed over, and by which of the steps before
        dealt: list[IntArray] = []  # places, row after row
        sizes: list[IntArray] = []  # and how many each row has
        while len(unseen) + len(waiting):
            num_steps = max(len(unseen) // window, 1)
            in_windows = num_steps * window if num_steps > 1 else len(unseen)
            candidates = _put_before(waiting, waiting_for % num_steps, unseen[:in_windows].reshape(num_steps, -1))
            rows = dealer.deal(candidates, is_all=num_steps == 1)
            is_dealt, is_waiting = rows >= 0, rows == PASSED_OVER
            if not is_dealt.any():
                window *= 2
                continue
            steps = np.broadcast_to(np.arange(num_steps)[:, None], rows.shape)
            row_of = (steps * batches_per_step + rows)[is_dealt]
            dealt.append(candidates[is_dealt][np.argsort(row_of, kind="stable")])
            of_steps = np.bincount(row_of, minlength=num_steps * batches_per_step).reshape(num_steps, -1)
            sizes.append(of_steps[of_steps.any(axis=1)].ravel())
            waiting, waiting_for = candidates[is_waiting], steps[is_waiting]
            not_seen = candidates[(rows == NOT_SEEN) & (candidates != NOBODY)]
            unseen = np.concatenate([not_seen, unseen[in_windows:]])
        places, sizes_of_rows, left_out = _fill_last_step(
            np.concatenate(dealt), np.concatenate(sizes), batches_per_step
        )
        return ComposedSteps(order[places], np.concatenate([[0], sizes_of_rows]).cumsum(), left_out)


class Dealer:
    """Takes samples of many steps from their windows, and deals them to the steps' rows.

    What is bounded in a row is counted in up to three ways: tokens, and where `limits` bound them anchors and samples.

    Args:
        lengths: tokens in the epoch's order, [N] int64.
        anchors: anchors in the epoch's order, [N] int64.
        limits: what a row may hold.
        cost: what rows are balanced by.
        num_rows: R, of a step.
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
        nothing = np.zeros(1, np.int64)  # the size of NOBODY: the last one
        self.sizes = [np.concatenate([sizes, nothing]) for sizes, _ in counts]  # each [N + 1]
        self.bounds = [bound for _, bound in counts]  # of a row
        costs = cost.sample(lengths.astype(np.float64), anchors.astype(np.float64))
        whole_costs = np.maximum(np.rint(costs * (_COST_UNITS / costs.mean())), 1).astype(np.int64)
        # Loads are kept above the bits of the row's number, so that the least one tells its row.
        self.row_mask = (1 << num_rows.bit_length()) - 1
        self.costs = np.concatenate([whole_costs << num_rows.bit_length(), nothing])

    @property
    def samples_of_a_step(self) -> int:
        """About so many fit into one."""
        return min(
            int(self.num_rows * bound * len(sizes) / max(int(sizes.sum()), 1))
            for sizes, bound in zip(self.sizes, self.bounds, strict=True)
        )

    def deal(self, candidates: IntArray, is_all: bool) -> IntArray:
        """Deal to the rows of every step what `_take` takes, longest processing time first.

        Args:
            candidates: places in the order, [steps, window].
            is_all: the windows hold all that is left. Where they do not, a step that comes to the end of its window is
                not dealt: more might fit.

        Returns:
            The row of each candidate, or PASSED_OVER, or NOT_SEEN, [steps, window] int64.
        """
        is_taken, seen = self._take(candidates)
        is_seen = (np.arange(candidates.shape[1]) < seen[:, None]) & (candidates != NOBODY)
        rows = np.where(is_seen, PASSED_OVER, NOT_SEEN)
        rows[is_taken] = self._rows_of(candidates, is_taken)[is_taken] if self.num_rows > 1 else 0
        if not is_all:
            rows[seen == candidates.shape[1]] = NOT_SEEN
        return rows

    def _rows_of(self, candidates: IntArray, is_taken: NDArray[np.bool_]) -> IntArray:
        """The row of each candidate that is taken, or PASSED_OVER; anything for the others; [steps, window] int64."""
        taken = np.where(is_taken, candidates, NOBODY)
        by_cost = (-self.costs[taken]).argsort(axis=1, kind="stable")[:, : is_taken.sum(axis=1).max()]
        turns = np.take_along_axis(taken, by_cost, axis=1).T.copy()  # in each, a sample of every step, or nobody
        dealt = np.empty_like(turns)
        rows = _Rows(self.num_rows, len(candidates), self.bounds, self.row_mask)
        for turn, places in enumerate(turns):
            dealt[turn] = rows.place([of_all[places] for of_all in self.sizes], self.costs[places])
        row_of = np.empty_like(candidates)
        np.put_along_axis(row_of, by_cost, dealt.T, axis=1)
        return row_of

    def _take(self, candidates: IntArray) -> tuple[NDArray[np.bool_], IntArray]:
        """Of every window the longest prefix that a step has room for, and of the samples behind it those that fit.

        Returns:
            Which candidates are taken, [steps, window]; and how many of a window were looked at, [steps].
        """
        num_steps, width = candidates.shape
        used = [of_all[candidates].cumsum(axis=1) for of_all in self.sizes]
        rooms = [self.num_rows * bound for bound in self.bounds]
        seen = np.min([(sums <= room).sum(axis=1) for sums, room in zip(used, rooms, strict=True)], axis=0)
        is_taken = np.arange(width) < seen[:, None]
        steps = np.arange(num_steps)
        left = [room - np.where(seen > 0, sums[steps, seen - 1], 0) for sums, room in zip(used, rooms, strict=True)]
        num_passed_over = np.zeros(num_steps, np.int64)
        for _ in range(_LOOK_AHEAD):
            is_looking = (seen < width) & (num_passed_over < MAX_SKIPPED) & np.all([room > 0 for room in left], axis=0)
            if not is_looking.any():
                break
            steps = np.flatnonzero(is_looking)
            columns = seen[steps]
            sizes = [of_all[candidates[steps, columns]] for of_all in self.sizes]
            fits = np.all([size <= room[steps] for size, room in zip(sizes, left, strict=True)], axis=0)
            is_taken[steps, columns] = fits
            for size, room in zip(sizes, left, strict=True):
                room[steps] -= np.where(fits, size, 0)
            num_passed_over[steps] += ~fits
            seen[steps] += 1
        return is_taken & (candidates != NOBODY), seen


class _Rows:
    """The rows of several steps while they fill: what each has to do, and the room that is left in it.

    Args:
        num_rows: R.
        num_steps: how many are filled at once.
        bounds: of a row, by kind.
        row_mask: the bits of a row's number, below those of its load.
    """

    def __init__(self, num_rows: int, num_steps: int, bounds: list[int], row_mask: int) -> None:
        self.loads = np.repeat(np.arange(num_rows)[:, None], num_steps, axis=1)
        self.room = [np.full(self.loads.shape, bound) for bound in bounds]
        self.steps = np.arange(num_steps)
        self.row_mask = row_mask

    def place(self, sizes: list[IntArray], costs: IntArray) -> IntArray:
        """Give one sample of each step to the row that has least to do among those with room for it.

        Args:
            sizes: by kind, each [steps].
            costs: [steps], above the bits of a row's number.

        Returns:
            The row of each, or PASSED_OVER, [steps] int64.
        """
        fits = self.room[0] >= sizes[0]
        for of_rows, size in zip(self.room[1:], sizes[1:], strict=True):
            fits &= of_rows >= size
        least = np.where(fits, self.loads, _NO_ROW).min(axis=0)
        is_placed = least != _NO_ROW
        rows = np.where(is_placed, least & self.row_mask, PASSED_OVER)
        placed = rows[is_placed], self.steps[is_placed]
        self.loads[placed] += costs[is_placed]
        for of_rows, size in zip(self.room, sizes, strict=True):
            of_rows[placed] -= size[is_placed]
        return rows


def _fill_last_step(places: IntArray, sizes: IntArray, num_rows: int) -> tuple[IntArray, IntArray, int]:
    """Where the last step has fewer samples than rows, complete it with samples of the rows that have most.

    Args:
        places: of all steps, row after row, [n].
        sizes: of all rows, [steps * num_rows].
        num_rows: of a step.

    Returns:
        places and sizes, changed so; and how many samples had to be left out instead, fewer than the rows of a step,
        since no row had two to give one of.
    """
    before, in_last = sizes[:-num_rows].copy(), int(sizes[-num_rows:].sum())
    begins = np.cumsum(before) - before
    given: list[int] = []
    while in_last + len(given) < num_rows:
        row = int(before.argmax()) if len(before) else -1
        if row < 0 or before[row] < 2:
            return places[:-in_last], sizes[:-num_rows], in_last
        before[row] -= 1
        given.append(int(begins[row] + before[row]))
    if not given:
        return places, sizes, 0
    return (
        np.concatenate([np.delete(places, given), places[given]]),
        np.concatenate([before, np.ones(num_rows, np.int64)]),
        0,
    )


def _put_before(places: IntArray, step_of: IntArray, windows: IntArray) -> IntArray:
    """The windows, opened by the places that wait for them.

    Args:
        places: [n].
        step_of: which window each opens, [n].
        windows: [steps, window].

    Returns:
        [steps, most places of a window + window], `NOBODY` in front of those with fewer.
    """
    by_step = np.argsort(step_of, kind="stable")
    counts = np.bincount(step_of, minlength=len(windows))
    opening = np.full((len(windows), counts.max()), NOBODY)
    opening[np.arange(counts.max()) >= counts.max() - counts[:, None]] = places[by_step]
    return np.concatenate([opening, windows], axis=1)
