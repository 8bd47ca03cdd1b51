"""What a plan is worth: how much of the computing goes to padding, how ranks wait for each other, how lengths mix.

Figures are fractions of 1 where nothing else is said. The time of an optimizer step is that of its slowest rank, and a
rank's time is the cost of its batches (`dflash.cost`):

    time = target's cost of the real tokens + drafter's cost and fixed cost of the batches
         + padding tokens + attention among padding + waiting for the slowest rank
"""

from dataclasses import dataclass

import numpy as np

from dflash.cost import CostModel
from dflash.mixing import eta2_ratio, longest_gap_steps, reuse
from dflash.samplers.base import LengthBatchSampler, Plan
from dflash.samplers.limits import BatchLimits, IntArray


@dataclass(frozen=True)
class PlanFigures:
    """Of one epoch's plan.

    Attributes:
        real_over_padded: tokens of samples over tokens that are computed.
        fill: computed tokens over the token budget, mean over the batches.
        steps: optimizer steps.
        lost_padding: share of the time in which the target's matrices read padding.
        lost_attention: share of the time in which the target attends to padding.
        lost_stragglers: share of the time in which a rank waits for the slowest one, mean over the ranks.
        lost_anchors: share of the token budget that stays empty in batches whose anchors are nearer to their budget
            than their tokens.
        rank_imbalance: cost of the costliest rank over the mean of the ranks, mean over the steps; the emptiest one,
            the epoch's remainder, left out where there are more.
        eta2_ratio: variance of length between steps over what chance gives; 1 is as mixed as chance.
        reuse: chance that two batch-mates meet again in the next epoch.
        longest_gap_steps: longest wait between two visits to a tenth of the samples by length.
        tokens_per_cost: real tokens over time, in the cost model's unit.
    """

    real_over_padded: float
    fill: float
    steps: int
    lost_padding: float
    lost_attention: float
    lost_stragglers: float
    lost_anchors: float
    rank_imbalance: float
    eta2_ratio: float | None
    reuse: float | None
    longest_gap_steps: int
    tokens_per_cost: float


def plan_figures(
    sampler: LengthBatchSampler,
    plan: Plan,
    next_plan: Plan,
    lengths: IntArray,
    num_anchorable: IntArray,
    limits: BatchLimits,
    cost: CostModel,
) -> PlanFigures:
    """Judge a plan.

    Args:
        sampler: that made it.
        plan: of an epoch.
        next_plan: of the epoch after it.
        lengths: tokens of the dataset's samples, [N] int64.
        num_anchorable: valid anchors of the dataset's samples, [N] int64.
        limits: that it was made under.
        cost: of batches.
    """
    begins = plan.offsets[:-1]
    sizes = np.diff(plan.offsets)
    real_lengths = limits.planned_lengths(lengths)[plan.indices]
    squares = real_lengths.astype(np.float64) ** 2
    real = np.add.reduceat(real_lengths, begins).astype(np.float64)
    real_squares = np.add.reduceat(squares, begins)
    anchors = np.add.reduceat(limits.planned_anchors(num_anchorable)[plan.indices], begins).astype(np.float64)
    computed = sampler.computed_tokens(real_lengths, plan.offsets, limits).astype(np.float64)
    computed_squares = computed**2 / sizes if sampler.pads else real_squares

    by_rank = _by_rank(cost.batch(computed, computed_squares, anchors), plan)  # [steps, ranks]
    slowest = by_rank.max(axis=1)
    time = float(slowest.sum()) * plan.world_size  # of all ranks together
    tokens_of_step = computed.reshape(plan.num_steps, -1).sum(axis=1)
    full = np.argsort(tokens_of_step, kind="stable")[min(1, plan.num_steps - 1) :]
    step_offsets = plan.offsets[:: plan.world_size * plan.accumulate]
    closed_by_anchors = np.zeros(len(sizes), dtype=np.bool_)
    if limits.anchor_budget is not None:
        closed_by_anchors = anchors / limits.anchor_budget > computed / limits.token_budget
    return PlanFigures(
        real_over_padded=float(real.sum() / computed.sum()),
        fill=float(computed.mean() / limits.token_budget),
        steps=plan.num_steps,
        lost_padding=cost.target_per_token * float((computed - real).sum()) / time,
        lost_attention=cost.target_per_token_squared * float((computed_squares - real_squares).sum()) / time,
        lost_stragglers=float((slowest * plan.world_size - by_rank.sum(axis=1)).sum()) / time,
        lost_anchors=float((1 - computed / limits.token_budget)[closed_by_anchors].sum() / len(sizes)),
        rank_imbalance=float((slowest / by_rank.mean(axis=1))[full].mean()),
        eta2_ratio=eta2_ratio(real_lengths, step_offsets),
        reuse=reuse(plan.indices, plan.offsets, next_plan.indices, next_plan.offsets, plan.num_samples),
        longest_gap_steps=longest_gap_steps(real_lengths, step_offsets),
        tokens_per_cost=float(real.sum()) / time * plan.world_size,
    )


def _by_rank(batch_costs: np.ndarray, plan: Plan) -> np.ndarray:
    """Cost of each rank's batches in each step, [steps, ranks], dealt as `Plan.batch` deals them."""
    slots = batch_costs.reshape(plan.num_steps * plan.accumulate, plan.world_size)
    micro_steps = np.arange(len(slots))[:, None]
    dealt = slots[micro_steps, (np.arange(plan.world_size) + micro_steps) % plan.world_size]
    return dealt.reshape(plan.num_steps, plan.accumulate, plan.world_size).sum(axis=1)
