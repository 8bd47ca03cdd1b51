"""Packed rows: in random order, full, balanced; nothing is passed over without need."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.cost import CostModel
from dflash.lengths import lognormal_lengths
from dflash.samplers.base import Plan
from dflash.samplers.limits import BatchLimits
from dflash.samplers.packed import MAX_SKIPPED, NOBODY, NOT_SEEN, PASSED_OVER, Dealer, PackedSampler

TOKENS_ONLY = CostModel(target_per_token_squared=0.0)
LIMITS = BatchLimits(token_budget=1000, pad_multiple=1, anchors_per_sample=8, probe_first=False)


def plan_of(lengths: np.ndarray, limits: BatchLimits = LIMITS, cost: CostModel = TOKENS_ONLY, **changes: Any) -> Plan:
    arguments = {"seed": 0, "epoch": 1, "world_size": 4, "accumulate": 1, **changes}
    return PackedSampler(cost).plan(lengths, lengths, limits, **arguments)


def steps_of(plan: Plan) -> list[list[list[int]]]:
    return [
        [plan.batch(step, rank, micro).tolist() for micro in range(plan.accumulate) for rank in range(plan.world_size)]
        for step in range(plan.num_steps)
    ]


def mixed(num_samples: int = 4000, seed: int = 0) -> np.ndarray:
    return lognormal_lengths(
        num_samples, median_tokens=25, log_sigma=0.95, shortest_tokens=2, longest_tokens=170, seed=seed
    )


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), world_size=st.integers(1, 16), accumulate=st.integers(1, 4))
def test_rows_are_full_but_for_the_last_steps(seed: int, world_size: int, accumulate: int) -> None:
    lengths = mixed(seed=seed)
    plan = plan_of(lengths, seed=seed, world_size=world_size, accumulate=accumulate)
    rows = [int(lengths[row].sum()) for step in steps_of(plan)[:-2] for row in step]
    assert max(rows) <= 1000
    assert np.mean(rows) >= 0.985 * 1000  # the shortest samples have some 5 tokens, so 15 left of a row are few


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_rows_of_a_step_cost_alike_where_attention_counts(seed: int) -> None:
    lengths, cost = mixed(seed=seed), CostModel(target_per_token_squared=1e-3)
    for step in steps_of(plan_of(lengths, cost=cost, seed=seed))[:-1]:
        costs = [sum(float(n) + 1e-3 * float(n) ** 2 for n in lengths[row]) for row in step]
        assert max(costs) <= 1.04 * np.mean(costs)


@pytest.mark.parametrize("seed", range(8))
def test_a_step_takes_the_next_samples_of_the_order_but_for_a_few_that_do_not_fit(seed: int) -> None:
    lengths = mixed(320)  # so few that one step is composed after the other
    plan = plan_of(lengths, seed=seed)
    assert plan.num_steps >= 3
    order = np.random.default_rng(np.random.SeedSequence([seed, 1])).permutation(len(lengths))
    place_of = np.empty(len(order), dtype=np.int64)
    place_of[order] = np.arange(len(order))
    seen = 0  # places before this are in a step or were passed over
    passed_over: set[int] = set()
    for step in steps_of(plan)[:-1]:
        places = {int(place_of[i]) for row in step for i in row}
        reached = max([*places, seen - 1]) + 1
        waiting = passed_over | set(range(seen, reached))
        passed_over = waiting - places
        # Those of the prefix, and a handful that no single row had room for.
        assert len(passed_over) <= MAX_SKIPPED + 8
        seen = reached


def one_step(
    window: list[int], sizes: list[list[int]], bounds: list[int], costs: list[int], num_rows: int
) -> dict[int, int]:
    """Which row each place gets, or PASSED_OVER, as the design page says it; those never looked at are missing."""
    kinds = range(len(bounds))
    left = [num_rows * bound for bound in bounds]
    taken: list[int] = []
    passed_over: list[int] = []
    behind_prefix = 0
    for place in window:
        fits = all(sizes[k][place] <= left[k] for k in kinds)
        if not fits or behind_prefix:
            if behind_prefix == 64 or len(passed_over) == MAX_SKIPPED or min(left) <= 0:
                break
            behind_prefix += 1
        (taken if fits else passed_over).append(place)
        if fits:
            left = [left[k] - sizes[k][place] for k in kinds]
    rows = dict.fromkeys(passed_over, PASSED_OVER)
    loads, room = [0] * num_rows, [list(bounds) for _ in range(num_rows)]
    for place in sorted(taken, key=lambda place: -costs[place]):
        having_room = [r for r in range(num_rows) if all(sizes[k][place] <= room[r][k] for k in kinds)]
        rows[place] = min(having_room, key=lambda r: (loads[r], r), default=PASSED_OVER)
        if having_room:
            loads[rows[place]] += costs[place]
            room[rows[place]] = [room[rows[place]][k] - sizes[k][place] for k in kinds]
    return rows


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_rows=st.integers(1, 9),
    num_steps=st.integers(1, 5),
    width=st.integers(1, 90),
    anchor_budget=st.sampled_from([None, 8, 30]),
    max_samples=st.sampled_from([None, 1, 4]),
    longest=st.sampled_from([5, 60, 100]),
)
def test_steps_composed_at_once_are_those_composed_one_by_one(
    seed: int,
    num_rows: int,
    num_steps: int,
    width: int,
    anchor_budget: int | None,
    max_samples: int | None,
    longest: int,
) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, num_steps * width)
    limits = BatchLimits(
        token_budget=100, pad_multiple=1, anchors_per_sample=8, anchor_budget=anchor_budget, max_samples=max_samples
    )
    anchors = np.minimum(lengths // 3, 8)
    dealer = Dealer(lengths, anchors, limits, CostModel(target_per_token_squared=1e-2), num_rows)
    windows = rng.permutation(num_steps * width).reshape(num_steps, width)
    opened = np.concatenate([np.full((num_steps, 2), NOBODY), windows], axis=1)  # windows may begin with nobody
    sizes = [lengths.tolist(), anchors.tolist(), [1] * len(lengths)]
    bounds = [100, anchor_budget or 10**9, max_samples or 10**9]
    costs = (dealer.costs // (dealer.row_mask + 1)).tolist()  # rounded: others would break ties differently
    for is_all in (True, False):
        rows = dealer.deal(opened, is_all=is_all)
        assert (rows[:, :2] == NOT_SEEN).all()
        for window, of_window in zip(windows.tolist(), rows[:, 2:].tolist(), strict=True):
            expected = one_step(window, sizes, bounds, costs, num_rows)
            if not is_all and len(expected) == width:  # more might fit behind the window
                expected = {}
            assert of_window == [expected.get(place, NOT_SEEN) for place in window]


def test_a_step_is_made_of_neighbours_in_the_order() -> None:
    lengths = mixed(20_000)
    plan = plan_of(lengths)
    order = np.random.default_rng(np.random.SeedSequence([0, 1])).permutation(len(lengths))
    place_of = np.argsort(order)
    for step in steps_of(plan)[:-3]:
        places = np.sort([place_of[i] for row in step for i in row])
        # What a step finds in its window are neighbours, but for those that steps before it have passed over.
        neighbours = int((np.diff(places) <= 2 * MAX_SKIPPED).sum())
        assert neighbours >= 0.6 * len(places)


def test_every_step_meets_all_lengths() -> None:
    lengths = mixed(20_000)
    fifths = np.quantile(lengths, np.arange(1, 5) / 5)
    for step in steps_of(plan_of(lengths))[:-1]:
        in_step = np.concatenate([lengths[row] for row in step])
        assert len(set(np.searchsorted(fifths, in_step))) == 5


@pytest.mark.parametrize("long", [[700, 650, 600], [1000, 990, 1000], [501, 501, 501, 499]])
def test_samples_so_long_that_rows_cannot_be_even_still_keep_to_the_budget(long: list[int]) -> None:
    lengths = np.array([*long, *[10] * 5])
    plan = plan_of(lengths, world_size=2)
    assert all(int(lengths[row].sum()) <= 1000 for step in steps_of(plan) for row in step)
    assert plan.ledger["emitted"] == len(lengths)


def test_a_rows_fixed_cost_does_not_count_for_every_sample_in_it() -> None:
    lengths = mixed()
    plain, fixed = (plan_of(lengths, cost=CostModel(per_batch=cost)) for cost in (0.0, 2000.0))
    assert plain.fingerprint() == fixed.fingerprint()


@pytest.mark.parametrize("bound", [{"anchor_budget": 40}, {"max_samples": 6}])
def test_other_bounds_fill_rows_as_well(bound: dict[str, int]) -> None:
    lengths = mixed()
    limits = BatchLimits(**{**vars(LIMITS), **bound})
    for step in steps_of(plan_of(lengths, limits))[:-2]:
        for row in step:
            anchors = int(np.minimum(lengths[row], 8).sum())
            used = {"anchor_budget": anchors, "max_samples": len(row)}
            for key, most in bound.items():
                assert used[key] <= most
                assert used[key] >= 0.75 * most
