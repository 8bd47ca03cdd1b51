"""Optimal boundaries against every partition there is; quantiles against their definition."""

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.cost import CostModel
from dflash.samplers.boundaries import geometric_bounds, optimal_bounds, quantile_bounds, sample_costs
from dflash.samplers.limits import BatchLimits, IntArray

quick = settings(max_examples=150, deadline=None)
histograms = st.dictionaries(st.integers(1, 60), st.integers(1, 50), min_size=1, max_size=9)


def price(length: int, limits: BatchLimits, cost: CostModel) -> float:
    """Of one sample padded to `length` in a full batch, in words: tokens, attention, its share of the batch's cost."""
    padded = math.ceil(length / limits.pad_multiple) * limits.pad_multiple
    samples = max(limits.token_budget // padded, 1)
    return cost.target_per_token * padded + cost.target_per_token_squared * padded**2 + cost.per_batch / samples


def total(bounds: list[int], histogram: dict[int, int], limits: BatchLimits, cost: CostModel) -> float:
    return sum(
        count * price(min(b for b in bounds if b >= length), limits, cost) for length, count in histogram.items()
    )


def optimal(histogram: dict[int, int], num_buckets: int, limits: BatchLimits, cost: CostModel) -> list[int]:
    distinct = np.array(sorted(histogram))
    counts = np.array([histogram[int(length)] for length in distinct])
    bounds = optimal_bounds(np.stack([distinct, counts]), sample_costs(distinct, limits, cost), num_buckets)
    return bounds.tolist()


@quick
@given(
    histogram=histograms,
    num_buckets=st.integers(1, 6),
    pad_multiple=st.integers(1, 9),
    token_budget=st.integers(64, 300),
    squared=st.sampled_from([0.0, 1e-3, 0.1]),
    per_batch=st.sampled_from([0.0, 10.0, 500.0]),
)
def test_no_partition_costs_less(
    histogram: dict[int, int], num_buckets: int, pad_multiple: int, token_budget: int, squared: float, per_batch: float
) -> None:
    limits = BatchLimits(token_budget=token_budget, pad_multiple=pad_multiple, anchors_per_sample=1)
    cost = CostModel(target_per_token_squared=squared, per_batch=per_batch)
    bounds = optimal(histogram, num_buckets, limits, cost)
    *others, longest = sorted(histogram)
    best = min(
        total([*chosen, longest], histogram, limits, cost)
        for size in range(min(num_buckets, len(histogram)))
        for chosen in itertools.combinations(others, size)
    )
    assert len(bounds) <= num_buckets
    assert bounds == sorted(set(bounds))
    assert bounds[-1] == longest
    assert math.isclose(total(bounds, histogram, limits, cost), best, rel_tol=1e-12)


@quick
@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=300), num_buckets=st.integers(1, 12))
def test_optimal_is_never_worse_than_geometric_or_quantile_with_as_many(lengths: list[int], num_buckets: int) -> None:
    limits = BatchLimits(token_budget=2000, pad_multiple=8, anchors_per_sample=1)
    cost = CostModel(target_per_token_squared=1e-3, per_batch=30.0)
    histogram = {length: lengths.count(length) for length in set(lengths)}
    array = np.array(lengths)
    rivals: list[IntArray] = [quantile_bounds(array, num_buckets)]
    rivals += [geometric_bounds(array, width) for width in (1.1, 1.25, 2.0)]
    for rival in rivals:
        ours = total(optimal(histogram, len(rival), limits, cost), histogram, limits, cost)
        assert ours <= total(rival.tolist(), histogram, limits, cost) * (1 + 1e-12)


@quick
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=200), num_buckets=st.integers(1, 12))
def test_a_quantile_bound_is_the_least_length_that_holds_its_share(lengths: list[int], num_buckets: int) -> None:
    expected = {
        next(n for n in range(1, 51) if sum(m <= n for m in lengths) * num_buckets >= k * len(lengths))
        for k in range(1, num_buckets + 1)
    }
    assert quantile_bounds(np.array(lengths), num_buckets).tolist() == sorted(expected)


def test_no_sample_has_no_bound() -> None:
    none = np.empty(0, dtype=np.int64)
    assert len(geometric_bounds(none, 1.25)) == len(quantile_bounds(none, 3)) == 0
    assert len(optimal_bounds(np.empty((2, 0), dtype=np.int64), none.astype(float), 3)) == 0
