"""Fit the cost model to this machine from a short run."""

from collections.abc import Callable
from statistics import median

import numpy as np
from tqdm import tqdm

from dflash.benchmarks.steps import TrainingSteps, Work
from dflash.cost import CostModel
from dflash.samplers.limits import BatchLimits, IntArray

NUM_LENGTHS = 6  # batches of so many different lengths ...
SHARES = (1.0, 0.4)  # ... each filling such shares of the token budget
REPEATS = 3


def show_fitted_cost(steps: TrainingSteps) -> CostModel:
    """`fit_cost` with a progress bar, and its result on the screen."""
    with tqdm(total=NUM_LENGTHS * len(SHARES) * REPEATS, desc="fitting the cost model", unit="step") as bar:
        cost, explained = fit_cost(steps, bar.update)
    print(
        f"fitted to this machine, in seconds (explains {explained:.1%} of what the steps took):\n  {cost}", flush=True
    )
    return cost


def fit_cost(steps: TrainingSteps, on_step: Callable[[], object] = lambda: None) -> tuple[CostModel, float]:
    """Run steps of batches of equal length, short to long, full and not, and explain their seconds by least squares.

    Args:
        steps: what is run.
        on_step: called after each of NUM_LENGTHS * len(SHARES) * REPEATS steps.

    Returns:
        The model, in seconds, and the share of the steps' variance of seconds that it explains.
    """
    limits = steps.limits
    lengths = limits.planned_lengths(steps.dataset.lengths)
    by_length = np.argsort(lengths, kind="stable")
    by_length = by_length[lengths[by_length] <= limits.max_length]
    batches = [
        _similar_samples(lengths, by_length, quantile, share, limits)
        for quantile in np.linspace(0.05, 0.98, NUM_LENGTHS)
        for share in SHARES
    ]
    taken: list[list[tuple[float, float]]] = [[] for _ in batches]
    # One after the other, as in training: a batch of the shape of the one before finds its memory laid out for it.
    for _ in range(REPEATS):
        for number, batch in enumerate(batches):
            work = {part: Work() for part in ("target", "drafter", "step")}
            steps.measure(batch, work)
            collating = work["step"].seconds - work["target"].seconds - work["drafter"].seconds
            taken[number].append((work["target"].seconds, work["drafter"].seconds + max(collating, 0.0)))
            on_step()
    seconds = [(median(t for t, _ in runs), median(d for _, d in runs)) for runs in taken]
    padded = np.array([float(limits.padded_lengths(lengths[batch]).max()) for batch in batches])
    sizes = np.array([len(batch) for batch in batches])
    tokens, squares = padded * sizes, padded**2 * sizes
    anchors_of = np.array(
        [float(limits.planned_anchors(steps.dataset.num_anchorable[batch]).sum()) for batch in batches]
    )
    target, drafter = np.array(seconds).T
    ones = np.ones_like(tokens)
    per_token, per_square, fixed = non_negative_least_squares(np.stack([tokens, squares, ones], axis=1), target)
    per_anchor, fixed_drafter = non_negative_least_squares(np.stack([anchors_of, ones], axis=1), drafter)
    model = CostModel(
        target_per_token=max(per_token, 1e-12),
        target_per_token_squared=per_square,
        drafter_per_anchor=per_anchor,
        per_batch=fixed,
        drafter_per_batch=fixed_drafter,
    )
    whole = target + drafter
    error = whole - model.batch(tokens, squares, anchors_of)
    return model, 1.0 - float(error.var() / whole.var())


def _similar_samples(
    lengths: IntArray, by_length: IntArray, quantile: float, share: float, limits: BatchLimits
) -> IntArray:
    """As many samples around a quantile of the lengths as fill such a share of what a batch may hold, at least one."""
    middle = int(quantile * (len(by_length) - 1))
    bounds = [share * limits.max_length / lengths[by_length[middle]]]
    if limits.anchor_budget is not None:
        bounds.append(limits.anchor_budget / limits.anchors_per_sample)
    if limits.max_samples is not None:
        bounds.append(limits.max_samples)
    count = max(int(min(bounds)), 1)
    # Downwards: none may be longer than the one that the count was made for.
    return by_length[max(middle + 1 - count, 0) : middle + 1]


def non_negative_least_squares(factors: np.ndarray, values: np.ndarray) -> list[float]:
    """Coefficients >= 0 with the least relative error, for a handful of factors: tries every set that may be above 0.

    Args:
        factors: [n, k].
        values: [n], positive. Each row weighs as the inverse of its value.

    Returns:
        k coefficients.
    """
    weighted, ones = factors / values[:, None], np.ones(len(values))
    num_factors = factors.shape[1]
    best, least = [0.0] * num_factors, float("inf")
    for subset in range(1, 1 << num_factors):
        used = [k for k in range(num_factors) if subset >> k & 1]
        found, *_ = np.linalg.lstsq(weighted[:, used], ones, rcond=None)
        error = float(((weighted[:, used] @ found - 1) ** 2).sum())
        if found.min() >= 0 and error < least:
            least = error
            best = [0.0] * num_factors
            for k, value in zip(used, found.tolist(), strict=True):
                best[k] = value
    return best
