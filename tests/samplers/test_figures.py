"""What a plan is worth, against the same figures added up batch by batch."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.cost import CostModel
from dflash.lengths import lognormal_lengths
from dflash.samplers.base import LengthBatchSampler
from dflash.samplers.bucketed import BucketedSampler
from dflash.samplers.figures import PlanFigures, plan_figures
from dflash.samplers.full_shuffle import FullShuffleSampler
from dflash.samplers.length_sorted import LengthSortedSampler
from dflash.samplers.limits import BatchLimits
from dflash.samplers.packed import PackedSampler
from dflash.samplers.windowed import WindowedSampler

COST = CostModel(target_per_token=2.0, target_per_token_squared=1e-3, drafter_per_anchor=5.0, per_batch=100.0)


@settings(max_examples=40, deadline=None)
@given(
    sampler=st.sampled_from([FullShuffleSampler(), LengthSortedSampler(), BucketedSampler(), PackedSampler(COST)]),
    seed=st.integers(0, 100),
    world_size=st.integers(1, 5),
    accumulate=st.integers(1, 3),
    anchor_budget=st.sampled_from([None, 60]),
)
def test_every_figure_is_the_sum_over_the_batches_as_they_are_dealt(
    sampler: LengthBatchSampler, seed: int, world_size: int, accumulate: int, anchor_budget: int | None
) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 200, 150)
    num_anchorable = rng.integers(0, lengths + 1)
    limits = BatchLimits(400, 8, 10, anchor_budget=anchor_budget)
    plan, next_plan = (
        sampler.plan(lengths, num_anchorable, limits, seed=seed, epoch=e, world_size=world_size, accumulate=accumulate)
        for e in (1, 2)
    )
    figures = plan_figures(sampler, plan, next_plan, lengths, num_anchorable, limits, COST)

    real = computed = padding_cost = attention_cost = waiting = time = empty = batches = 0.0
    imbalances: list[tuple[float, float]] = []
    for step in range(plan.num_steps):
        ranks, of_step = [], 0
        for rank in range(world_size):
            cost = 0.0
            for micro in range(accumulate):
                batch = plan.batch(step, rank, micro)
                of_batch = lengths[batch].tolist()
                anchors = sum(min(int(a), 10) for a in num_anchorable[batch])
                if isinstance(sampler, PackedSampler):
                    tokens = -(-sum(of_batch) // 8) * 8
                    squares = sum(n * n for n in of_batch)
                else:
                    longest = -(-max(of_batch) // 8) * 8
                    tokens, squares = longest * len(of_batch), longest**2 * len(of_batch)
                cost += 2.0 * tokens + 1e-3 * squares + 5.0 * anchors + 100.0
                padding_cost += 2.0 * (tokens - sum(of_batch))
                attention_cost += 1e-3 * (squares - sum(n * n for n in of_batch))
                of_step += tokens
                real, computed, batches = real + sum(of_batch), computed + tokens, batches + 1
                if anchor_budget and anchors / anchor_budget > tokens / 400:
                    empty += 1 - tokens / 400
            ranks.append(cost)
        time += max(ranks)
        waiting += sum(max(ranks) - cost for cost in ranks) / world_size
        imbalances.append((of_step, max(ranks) / (sum(ranks) / world_size)))
    expected = {
        "real_over_padded": real / computed,
        "fill": computed / batches / 400,
        "steps": plan.num_steps,
        "lost_padding": padding_cost / world_size / time,
        "lost_attention": attention_cost / world_size / time,
        "lost_stragglers": waiting / time,
        "lost_anchors": empty / batches,
        "rank_imbalance": np.mean([ratio for _, ratio in sorted(imbalances, key=lambda pair: pair[0])][1:])
        if len(imbalances) > 1
        else imbalances[0][1],
        "tokens_per_cost": real / time,
    }
    for name, value in expected.items():
        assert getattr(figures, name) == pytest.approx(value, rel=1e-9, abs=1e-12), name


@pytest.fixture(scope="module")
def scenario() -> dict[str, PlanFigures]:
    """The embedded scenario of `dflash.plan`."""
    lengths = lognormal_lengths(
        902_000, median_tokens=1100, log_sigma=0.95, shortest_tokens=100, longest_tokens=8192, seed=0
    )
    num_anchorable = (lengths * 0.6).astype(np.int64)
    limits, cost = BatchLimits(49_152, 16, 512), CostModel()
    samplers: dict[str, Any] = {
        "sorted": LengthSortedSampler(),
        "random": FullShuffleSampler(),
        "geometric": BucketedSampler(1.25),
        "optimal 20": BucketedSampler(boundaries="optimal", num_buckets=20),
        "optimal 40": BucketedSampler(boundaries="optimal", num_buckets=40),
        "windowed": WindowedSampler(2048),
        "packed": PackedSampler(),
    }
    figures = {}
    for name, sampler in samplers.items():
        plans = [
            sampler.plan(lengths, num_anchorable, limits, seed=0, epoch=e, world_size=8, accumulate=1) for e in (0, 1)
        ]
        figures[name] = plan_figures(sampler, *plans, lengths, num_anchorable, limits, cost)
    return figures


def test_the_scenario_shows_the_tax_and_who_pays_it(scenario: dict[str, PlanFigures]) -> None:
    least = {
        "sorted": 0.99,
        "geometric": 0.91,
        "optimal 20": 0.93,
        "optimal 40": 0.96,
        "windowed": 0.96,
        "packed": 0.997,
    }
    for name, share in least.items():
        assert scenario[name].real_over_padded >= share, name
    assert 0.36 <= scenario["random"].real_over_padded <= 0.39
    packed = scenario["packed"]
    assert packed.fill >= 0.997
    assert packed.rank_imbalance <= 1.01
    assert packed.eta2_ratio is not None
    assert packed.eta2_ratio <= 1.2
    assert packed.longest_gap_steps <= 2 * scenario["random"].longest_gap_steps
    for name in ("sorted", "geometric", "optimal 20"):
        ratio = scenario[name].eta2_ratio
        assert ratio is not None
        assert ratio > 10, "a batch holds one length, whatever its buckets"
