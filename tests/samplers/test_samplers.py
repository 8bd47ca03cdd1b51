"""What sets each sampler apart, the sizes at the edge, and what `plan` refuses."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.samplers.base import LengthBatchSampler, Plan
from dflash.samplers.bucketed import BucketedSampler
from dflash.samplers.full_shuffle import FullShuffleSampler
from dflash.samplers.length_sorted import LengthSortedSampler
from dflash.samplers.limits import BatchLimits
from dflash.samplers.packed import PackedSampler
from dflash.samplers.windowed import WindowedSampler

SAMPLERS = {
    "sorted": LengthSortedSampler(),
    "random": FullShuffleSampler(),
    "bucketed": BucketedSampler(),
    "optimal": BucketedSampler(boundaries="optimal", num_buckets=3),
    "windowed": WindowedSampler(4),
    "packed": PackedSampler(),
}
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
LIMITS = BatchLimits(token_budget=480, pad_multiple=8, anchors_per_sample=6, anchor_budget=40)
quick = settings(max_examples=100, deadline=None)  # no deadline: the machine may be busy
sample_rows = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 9)), min_size=1, max_size=60)


def plan_of(sampler: LengthBatchSampler, lengths: Any, limits: BatchLimits = LIMITS, **changes: Any) -> Plan:
    lengths = np.asarray(lengths, dtype=np.int64)
    arguments = {"seed": 0, "epoch": 1, "world_size": 1, "accumulate": 1, **changes}
    return sampler.plan(lengths, arguments.pop("num_anchorable", lengths), limits, **arguments)


def batches_of(plan: Plan) -> list[list[int]]:
    return [part.tolist() for part in np.split(plan.indices, plan.offsets[1:-1])]


def within(samples: list[tuple[int, int]]) -> bool:
    """Whether (length, num_anchorable) samples fit into one batch of LIMITS."""
    longest = max(length for length, _ in samples)
    tokens = (longest + 7) // 8 * 8 * len(samples)
    return tokens <= 480 and sum(min(anchors, 6) for _, anchors in samples) <= 40


def buckets_of(lengths: list[int], width: float) -> dict[int, int]:
    """Bucket number of each length: a new one begins where a length exceeds width times the bucket's shortest."""
    bucket_of: dict[int, int] = {}
    shortest, number = 0, -1
    for length in sorted(set(lengths)):
        if number < 0 or length > width * shortest:
            shortest, number = length, number + 1
        bucket_of[length] = number
    return bucket_of


@quick
@given(row=sample_rows, epoch=st.integers(0, 5))
def test_sorted_groups_neighbours_in_length_greedily(row: list[tuple[int, int]], epoch: int) -> None:
    expected: list[list[int]] = []
    for _, index in sorted((length, index) for index, (length, _) in enumerate(row)):
        if expected and within([row[i] for i in [*expected[-1], index]]):
            expected[-1].append(index)
        else:
            expected.append([index])
    lengths, anchors = np.array(row).T
    plan = plan_of(LengthSortedSampler(), lengths, num_anchorable=anchors, epoch=epoch)
    assert sorted(batches_of(plan)) == sorted(expected)


@quick
@given(row=sample_rows, seed=st.integers(0, 1000))
def test_random_cuts_its_order_only_where_the_next_sample_does_not_fit(row: list[tuple[int, int]], seed: int) -> None:
    lengths, anchors = np.array(row).T
    order, offsets = FullShuffleSampler().compose(
        lengths, LIMITS.planned_anchors(anchors), LIMITS, np.random.default_rng(seed)
    )
    assert sorted(order.tolist()) == list(range(len(row)))
    batches = np.split(order, offsets[1:-1])
    assert all(not within([row[i] for i in [*batch, following[0]]]) for batch, following in itertools.pairwise(batches))


@quick
@given(row=sample_rows, seed=st.integers(0, 1000), width=st.sampled_from([1.01, 1.25, 2, 7.5, 1000]))
def test_bucketed_cuts_only_between_buckets_or_where_the_next_sample_does_not_fit(
    row: list[tuple[int, int]], seed: int, width: float
) -> None:
    lengths, anchors = np.array(row).T
    order, offsets = BucketedSampler(width).compose(
        lengths, LIMITS.planned_anchors(anchors), LIMITS, np.random.default_rng(seed)
    )
    assert sorted(order.tolist()) == list(range(len(row)))
    bucket_of = buckets_of(lengths.tolist(), width)
    batches = [batch.tolist() for batch in np.split(order, offsets[1:-1])]
    for batch, following in itertools.pairwise(batches):
        here, there = bucket_of[row[batch[0]][0]], bucket_of[row[following[0]][0]]
        assert here < there or not within([row[i] for i in [*batch, following[0]]])
    assert all(len({bucket_of[row[i][0]] for i in batch}) == 1 for batch in batches)


@quick
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=200),
    width=st.floats(1.001, 10),
    world_size=st.integers(1, 4),
)
def test_in_a_bucketed_batch_the_longest_is_at_most_width_times_the_shortest(
    lengths: list[int], width: float, world_size: int
) -> None:
    lengths = lengths * world_size
    for batch in batches_of(plan_of(BucketedSampler(width), lengths, world_size=world_size)):
        of_batch = [lengths[i] for i in batch]
        assert max(of_batch) <= width * min(of_batch)


def test_a_length_on_a_bucket_boundary_belongs_to_the_lower_bucket() -> None:
    limits = BatchLimits(token_budget=10_000, pad_multiple=1, anchors_per_sample=1)
    plan = plan_of(BucketedSampler(1.25), [100, 125, 126, 157, 158], limits)
    assert sorted(sorted(batch) for batch in batches_of(plan)) == [[0, 1], [2, 3], [4]]


def mates(plan: Plan) -> set[tuple[int, int]]:
    return {pair for batch in batches_of(plan) for pair in itertools.combinations(sorted(batch), 2)}


@pytest.mark.parametrize("sampler", [FullShuffleSampler(), BucketedSampler()], ids=["random", "bucketed"])
@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_batch_mates_meet_again_in_the_next_epoch_no_more_often_than_by_chance(
    sampler: LengthBatchSampler, epoch: int
) -> None:
    # One bucket of 1,000 samples, 20 to a batch: 9,500 pairs, each of which meets again with probability 19/999.
    lengths = np.random.default_rng(5).integers(100, 126, 1000)
    limits = BatchLimits(token_budget=128 * 20, pad_multiple=128, anchors_per_sample=1)
    now, then = (mates(plan_of(sampler, lengths, limits, epoch=e)) for e in (epoch, epoch + 1))
    assert len(now) == 50 * 190
    expected = len(now) * 19 / 999
    assert abs(len(now & then) - expected) < 6 * expected**0.5


@pytest.mark.parametrize("sampler", [s for name, s in SAMPLERS.items() if name != "sorted"])
@quick
@given(seed=st.integers(0, 2**32), epoch=st.integers(0, 100))
def test_a_new_epoch_or_seed_changes_who_meets_whom(sampler: LengthBatchSampler, seed: int, epoch: int) -> None:
    # 60 samples of one length in 15 batches of 4: the same partition twice by chance has a probability below 1e-50.
    lengths = np.full(60, 100)
    limits = BatchLimits(token_budget=400, pad_multiple=1, anchors_per_sample=1)
    first = mates(plan_of(sampler, lengths, limits, seed=seed, epoch=epoch))
    assert mates(plan_of(sampler, lengths, limits, seed=seed, epoch=epoch + 1)) != first
    assert mates(plan_of(sampler, lengths, limits, seed=seed + 1, epoch=epoch)) != first


def test_sorted_keeps_its_batches_and_changes_their_order() -> None:
    lengths = np.random.default_rng(2).integers(1, 400, 300)
    plans = [plan_of(LengthSortedSampler(), lengths, epoch=epoch, world_size=3, accumulate=4) for epoch in (1, 2)]
    first, second = (batches_of(plan) for plan in plans)
    assert sorted(first) == sorted(second)
    assert first != second


@every_sampler
def test_long_and_short_batches_are_mixed_over_the_epoch(sampler: LengthBatchSampler) -> None:
    lengths = np.random.default_rng(2).integers(1, 400, 3000)
    longest = [max(lengths[batch]) for batch in batches_of(plan_of(sampler, lengths))]
    half = len(longest) // 2
    # Were the order by length, the halves would differ by about 200 tokens.
    assert abs(np.mean(longest[:half]) - np.mean(longest[half:])) < 40


@every_sampler
def test_one_sample_is_an_epoch_of_one_batch(sampler: LengthBatchSampler) -> None:
    plan = plan_of(sampler, [37])
    assert batches_of(plan) == [[0]]
    assert plan.num_steps == 1


@every_sampler
@pytest.mark.parametrize(("count", "world_size", "accumulate"), [(0, 1, 1), (1, 2, 1), (7, 8, 1), (7, 2, 4)])
def test_fewer_samples_than_one_step_has_batches_are_refused_with_both_numbers(
    sampler: LengthBatchSampler, count: int, world_size: int, accumulate: int
) -> None:
    with pytest.raises(ValueError, match=rf"An epoch of {count} samples is too short .* = {world_size * accumulate} b"):
        plan_of(sampler, [5] * count, world_size=world_size, accumulate=accumulate)


@every_sampler
def test_exactly_one_sample_for_each_batch_of_a_step_is_enough(sampler: LengthBatchSampler) -> None:
    plan = plan_of(sampler, [5] * 8, world_size=4, accumulate=2)
    assert sorted(batches_of(plan)) == [[i] for i in range(8)]


@every_sampler
def test_a_sample_of_exactly_the_budget_fits(sampler: LengthBatchSampler) -> None:
    assert sorted(batches_of(plan_of(sampler, [480, 10, 480]))) == [[0], [1], [2]]


ONE_TOO_LONG = [481, 100, 110, 120, 105]


@every_sampler
def test_a_sample_over_the_budget_stops_with_the_count_the_longest_and_what_to_set(sampler: LengthBatchSampler) -> None:
    with pytest.raises(ValueError, match=r"^2 of 6 samples do not fit") as error:
        plan_of(sampler, [*ONE_TOO_LONG, 700])
    for part in ("batch.token_budget=480", "700 tokens (sample 5)", "batch.token_budget to 704 or more", "truncate"):
        assert part in str(error.value)


@every_sampler
@pytest.mark.parametrize(
    ("too_long", "emitted", "dropped", "truncated"),
    [
        ("drop", [1, 2, 3, 4], {"too_long": 1}, 0),
        ("truncate", [0, 1, 2, 3, 4], {}, 1),
        ("alone", [0, 1, 2, 3, 4], {}, 0),
    ],
)
def test_the_ledger_says_what_became_of_a_sample_over_the_budget(
    sampler: LengthBatchSampler, too_long: str, emitted: list[int], dropped: dict[str, int], truncated: int
) -> None:
    limits = BatchLimits(token_budget=480, pad_multiple=8, anchors_per_sample=6, too_long=too_long)
    plan = plan_of(sampler, ONE_TOO_LONG, limits)
    assert sorted(plan.indices.tolist()) == emitted
    assert plan.ledger == {"read": 5, "emitted": len(emitted), "dropped": dropped, "truncated": truncated}


@every_sampler
def test_alone_gives_a_sample_over_the_budget_its_own_batch(sampler: LengthBatchSampler) -> None:
    limits = BatchLimits(token_budget=480, pad_multiple=8, anchors_per_sample=6, too_long="alone")
    assert [0] in batches_of(plan_of(sampler, ONE_TOO_LONG, limits))
    assert sorted(batches_of(plan_of(sampler, [500, 600, 700], limits))) == [[0], [1], [2]]


@every_sampler
def test_where_dropping_leaves_too_few_samples_the_error_says_how_many_went(sampler: LengthBatchSampler) -> None:
    limits = BatchLimits(token_budget=480, pad_multiple=8, anchors_per_sample=6, too_long="drop")
    with pytest.raises(
        ValueError, match=r"An epoch of 1 samples \(batch\.too_long=drop left out 2 more\) is too short"
    ):
        plan_of(sampler, [500, 600, 10], limits, world_size=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -1),
        ("seed", 1.0),
        ("epoch", -1),
        ("epoch", None),
        ("world_size", 0),
        ("accumulate", 0),
        ("accumulate", True),
    ],
)
def test_an_argument_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}={value}: expected a whole number of "):
        plan_of(LengthSortedSampler(), [5, 6], **{name: value})


@pytest.mark.parametrize(
    ("lengths", "anchors", "message"),
    [
        ([5, 0], [1, 1], r"lengths\[1\]=0 must be >= 1"),
        ([5, 5], [-1, 1], r"num_anchorable\[0\]=-1 must be >= 0"),
        ([5, 5], [1], r"lengths has 2 samples, num_anchorable 1"),
        ([5.0, 5.0], [1, 1], r"lengths must be a row of integers, not float64"),
        ([[5, 5]], [1, 1], r"lengths must be a row of integers, not int64 of shape \(1, 2\)"),
    ],
)
def test_lengths_and_anchor_counts_that_make_no_sense_are_refused(lengths: list, anchors: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LengthSortedSampler().plan(
            np.array(lengths), np.array(anchors), LIMITS, seed=0, epoch=0, world_size=1, accumulate=1
        )


@quick
@given(row=sample_rows, seed=st.integers(0, 1000))
def test_windows_of_one_sample_are_the_full_shuffle(row: list[tuple[int, int]], seed: int) -> None:
    lengths, num_anchorable = (np.array(column) for column in zip(*row, strict=True))
    one, random = (
        plan_of(sampler, lengths, seed=seed, num_anchorable=num_anchorable)
        for sampler in (WindowedSampler(1), FullShuffleSampler())
    )
    assert one.fingerprint() == random.fingerprint()


@quick
@given(row=sample_rows, seed=st.integers(0, 1000), window=st.integers(1, 70))
def test_windowed_sorts_the_shuffle_inside_windows_alone(row: list[tuple[int, int]], seed: int, window: int) -> None:
    lengths, num_anchorable = (np.array(column, dtype=np.int64) for column in zip(*row, strict=True))
    shuffled = np.random.default_rng(seed).permutation(len(row)).tolist()
    order, _ = WindowedSampler(window).compose(lengths, num_anchorable, LIMITS, np.random.default_rng(seed))
    for number, begin in enumerate(range(0, len(row), window)):
        expected = sorted(shuffled[begin : begin + window], key=lambda i: row[i][0], reverse=number % 2 == 1)
        got = order[begin : begin + window].tolist()
        assert sorted(got) == sorted(expected)
        assert [row[i][0] for i in got] == [row[i][0] for i in expected]
