"""How well a plan mixes, against the definitions spelled out, and against chance."""

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.mixing import StepLengths, eta2_ratio, longest_gap_steps, reuse

quick = settings(max_examples=100, deadline=None)
steps_of_lengths = st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=8), min_size=1, max_size=12)


def flat(steps: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([n for step in steps for n in step]), np.cumsum([0, *map(len, steps)])


@quick
@given(steps=steps_of_lengths)
def test_eta2_ratio_is_the_between_step_share_of_the_variance_over_that_of_chance(steps: list[list[int]]) -> None:
    logs = [[math.log(n) for n in step] for step in steps]
    everything = [x for step in logs for x in step]
    mean = statistics.fmean(everything)
    total = sum((x - mean) ** 2 for x in everything)
    ratio = eta2_ratio(*flat(steps))
    if len(steps) < 2 or len(everything) == len(steps) or total < 1e-9:
        assert ratio is None
        return
    between = sum(len(step) * (statistics.fmean(step) - mean) ** 2 for step in logs)
    chance = (len(steps) - 1) / (len(everything) - 1)
    assert ratio == pytest.approx(between / total / chance, rel=1e-6, abs=1e-6)


def test_a_random_partition_has_a_ratio_of_one_and_a_sorted_one_has_not() -> None:
    rng = np.random.default_rng(0)
    lengths, offsets = rng.lognormal(6, 1, 4000).astype(int) + 1, np.arange(0, 4001, 40)
    ratios = [eta2_ratio(rng.permutation(lengths), offsets) for _ in range(20)]
    assert statistics.fmean(r for r in ratios if r is not None) == pytest.approx(1.0, abs=0.1)
    by_length = eta2_ratio(np.sort(lengths), offsets)
    assert by_length is not None
    assert by_length > 30


@quick
@given(steps=steps_of_lengths, cut=st.integers(0, 12))
def test_sums_over_parts_of_a_run_give_the_ratio_of_the_whole(steps: list[list[int]], cut: int) -> None:
    run = StepLengths()
    for part in (steps[:cut], steps[cut:]):
        for step in part:
            logs = [math.log(n) for n in step]
            run.add_step(len(logs), sum(logs), sum(x * x for x in logs))
    whole = eta2_ratio(*flat(steps))
    assert run.eta2_ratio == (None if whole is None else pytest.approx(whole, rel=1e-6, abs=1e-6))


def test_a_shuffle_of_few_distinct_lengths_waits_for_none_of_them() -> None:
    rng = np.random.default_rng(0)
    for values in ([500], [100, 200], [10, 20, 3000]):
        assert longest_gap_steps(rng.choice(values, 2000), np.arange(0, 2001, 40)) == 1


def test_nothing_varies_where_all_lengths_are_equal() -> None:
    assert eta2_ratio(np.full(100, 37), np.arange(0, 101, 10)) is None


@quick
@given(st.integers(1, 40), st.integers(0, 1000), st.integers(1, 12), st.integers(1, 12))
def test_reuse_is_the_share_of_pairs_that_meet_again(n: int, seed: int, first: int, second: int) -> None:
    rng = np.random.default_rng(seed)

    def batches(size: int) -> list[list[int]]:
        chosen = rng.permutation(n)[: rng.integers(1, n + 1)].tolist()
        return [chosen[i : i + size] for i in range(0, len(chosen), size)]

    now, then = batches(first), batches(second)
    pairs, again = (
        {frozenset(pair) for batch in epoch for pair in itertools.combinations(batch, 2)} for epoch in (now, then)
    )
    got = reuse(*flat(now), *flat(then), n)
    assert got == (None if not pairs else pytest.approx(len(pairs & again) / len(pairs)))


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.lists(st.integers(1, 10**6), min_size=1, max_size=6), min_size=1, max_size=15))
def test_the_longest_gap_is_the_longest_run_of_steps_without_a_tenth_of_the_lengths(steps: list[list[int]]) -> None:
    lengths, offsets = flat(steps)
    in_order = sorted(lengths.tolist())
    decile = []
    for length in lengths.tolist():
        places = [place for place, other in enumerate(in_order) if other == length]
        decile.append(places[(len(places) - 1) // 2] * 10 // len(lengths))
    longest = 0
    for d in set(decile):
        has = [any(decile[i] == d for i in range(a, b)) for a, b in itertools.pairwise(offsets.tolist())]
        around = has + has
        visits = [i for i, h in enumerate(around) if h]
        longest = max(longest, *(b - a for a, b in itertools.pairwise(visits))) if len(visits) > 1 else longest
    assert longest_gap_steps(lengths, offsets) == longest
