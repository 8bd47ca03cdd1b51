"""How well a plan mixes: do lengths meet in an optimizer step, do the same samples meet again, how long is the wait.

An optimizer step is accumulate * world_size batches. Where a step's lengths are all alike, its gradient is that of one
length, and the next step's that of another.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

NUM_DECILES = 10


@dataclass
class StepLengths:
    """Sums over optimizer steps from which their `eta2_ratio` follows; sums of several parts add up.

    Attributes:
        steps: number of them.
        samples: in all of them.
        log_sum: of ln(length) over the samples.
        log_squares: of ln(length)**2 over the samples.
        between: over the steps, (the step's sum of ln(length))**2 / (its samples).
    """

    steps: float = 0.0
    samples: float = 0.0
    log_sum: float = 0.0
    log_squares: float = 0.0
    between: float = 0.0

    def add_step(self, samples: float, log_sum: float, log_squares: float) -> None:
        """Add one step with its own sums."""
        if samples:
            self.steps += 1
            self.samples += samples
            self.log_sum += log_sum
            self.log_squares += log_squares
            self.between += log_sum**2 / samples

    @property
    def eta2_ratio(self) -> float | None:
        """Share of the variance of ln(length) that lies between steps, over what chance would give.

        A random partition of N samples into S steps gives (S - 1) / (N - 1) on average, so 1 is as mixed as chance.
        None where nothing varies, or where there is one step only.
        """
        if self.steps < 2 or self.samples <= self.steps:
            return None
        mean_part = self.log_sum**2 / self.samples
        total = self.log_squares - mean_part
        if total <= 1e-12 * self.log_squares:  # rounding of equal lengths
            return None
        share = (self.between - mean_part) / total
        return max(share, 0.0) / ((self.steps - 1) / (self.samples - 1))


def eta2_ratio(lengths: IntArray, step_offsets: IntArray) -> float | None:
    """`StepLengths.eta2_ratio` of a whole plan.

    Args:
        lengths: tokens of the samples in the plan's order, [N] int64.
        step_offsets: where steps begin in it, and N: [steps + 1] int64, strictly increasing.
    """
    if not len(lengths):
        return None
    logs = np.log(lengths)
    counts = np.diff(step_offsets)
    sums = np.add.reduceat(logs, step_offsets[:-1])
    return StepLengths(
        steps=len(counts),
        samples=len(logs),
        log_sum=float(logs.sum()),
        log_squares=float((logs**2).sum()),
        between=float((sums**2 / counts).sum()),
    ).eta2_ratio


def reuse(
    indices: IntArray, offsets: IntArray, next_indices: IntArray, next_offsets: IntArray, num_samples: int
) -> float | None:
    """Chance that two samples of one batch are in one batch again in the next epoch; None where nobody has company.

    Args:
        indices: dataset rows in the plan's order, each at most once.
        offsets: where batches begin in it.
        next_indices: of the next epoch's plan.
        next_offsets: likewise.
        num_samples: rows of the dataset.
    """
    next_batch = np.full(num_samples, -1, dtype=np.int64)
    next_batch[next_indices] = np.repeat(np.arange(len(next_offsets) - 1), np.diff(next_offsets))
    sizes = np.diff(offsets)
    pairs = int((sizes * (sizes - 1) // 2).sum())
    if not pairs:
        return None
    meets_in = next_batch[indices]
    cell = np.repeat(np.arange(len(sizes)), sizes) * len(next_offsets) + meets_in
    _, together = np.unique(cell[meets_in >= 0], return_counts=True)
    return int((together * (together - 1) // 2).sum()) / pairs


def longest_gap_steps(lengths: IntArray, step_offsets: IntArray) -> int:
    """The longest wait, in steps, between two visits to a tenth of the samples of similar length.

    1: every step visits every tenth. The sequence is taken as a circle, as if the epoch came again, so that a wait that
    spans its end counts as well.

    Args:
        lengths: tokens of the samples in the plan's order, [N] int64.
        step_offsets: where steps begin in it, and N: [steps + 1] int64, strictly increasing.
    """
    num_steps = len(step_offsets) - 1
    if num_steps < 1:
        return 0
    # Equal lengths are in one tenth, that of their middle one, or a tenth would begin somewhere in time among them.
    _, which, counts = np.unique(lengths, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - counts + (counts - 1) // 2
    decile = (middle * NUM_DECILES // len(lengths))[which]
    step = np.repeat(np.arange(num_steps), np.diff(step_offsets))
    visited = np.zeros((NUM_DECILES, num_steps), dtype=np.bool_)
    visited[decile, step] = True
    longest = 0
    for row in visited:
        visits = np.flatnonzero(row)
        if len(visits):
            longest = max(longest, int(np.diff(visits, append=visits[0] + num_steps).max()))
    return longest
