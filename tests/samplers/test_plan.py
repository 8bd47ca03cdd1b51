"""What holds for the plan of every sampler: properties over random data sets, limits, world sizes and epochs."""

import hashlib
import struct
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dflash.cost import CostModel
from dflash.samplers.base import LengthBatchSampler, Plan
from dflash.samplers.bucketed import BucketedSampler
from dflash.samplers.full_shuffle import FullShuffleSampler
from dflash.samplers.length_sorted import LengthSortedSampler
from dflash.samplers.limits import TOO_LONG, BatchLimits
from dflash.samplers.packed import PackedSampler
from dflash.samplers.windowed import WindowedSampler

COST = CostModel(target_per_token_squared=1e-2, drafter_per_anchor=3.0, per_batch=50.0)
SAMPLERS = {
    "sorted": LengthSortedSampler(),
    "random": FullShuffleSampler(),
    "bucketed": BucketedSampler(1.25),
    "bucketed-3": BucketedSampler(3),
    "quantile": BucketedSampler(boundaries="quantile", num_buckets=3),
    "optimal": BucketedSampler(boundaries="optimal", num_buckets=4, cost=COST),
    "windowed": WindowedSampler(16),
    "packed": PackedSampler(COST),
}
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
quick = settings(max_examples=50, deadline=None)  # no deadline: the machine may be busy


@dataclass(frozen=True)
class Case:
    """The arguments of `plan`, enough samples for a step among them."""

    lengths: np.ndarray
    num_anchorable: np.ndarray
    limits: BatchLimits
    seed: int
    epoch: int
    world_size: int
    accumulate: int

    @property
    def batches_per_step(self) -> int:
        return self.world_size * self.accumulate

    def plan(self, sampler: LengthBatchSampler) -> Plan:
        return sampler.plan(
            self.lengths,
            self.num_anchorable,
            self.limits,
            seed=self.seed,
            epoch=self.epoch,
            world_size=self.world_size,
            accumulate=self.accumulate,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world_size, accumulate = draw(st.integers(1, 16)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_samples = world_size * accumulate + draw(st.integers(0, 150))
    longest = draw(st.sampled_from([1, 3, 40, 300]))
    lengths = {
        "uniform": lambda: rng.integers(1, longest + 1, num_samples),
        "long tail": lambda: np.clip(rng.lognormal(3, 1, num_samples), 1, longest).astype(np.int64),
        "equal": lambda: np.full(num_samples, longest),
        "two lengths": lambda: rng.choice([1, longest], num_samples),
    }[draw(st.sampled_from(["uniform", "long tail", "equal", "two lengths"]))]()

    pad_multiple = draw(st.integers(1, 33))
    anchors_per_sample = draw(st.integers(1, 64))
    too_long = draw(st.sampled_from(TOO_LONG))
    # `error` needs a budget that holds the longest sample, as exactly as possible; the others one that does not, often.
    padded_longest = padded(int(lengths.max()), pad_multiple)
    smallest_budget = padded_longest if too_long == "error" else pad_multiple
    limits = BatchLimits(
        token_budget=draw(st.just(padded_longest) | st.integers(smallest_budget, smallest_budget + 2000)),
        pad_multiple=pad_multiple,
        anchors_per_sample=anchors_per_sample,
        anchor_budget=draw(st.none() | st.integers(anchors_per_sample, 8 * anchors_per_sample)),
        max_samples=draw(st.none() | st.integers(1, 20)),
        too_long=too_long,
        probe_first=draw(st.booleans()),
    )
    usable = sum(not is_too_long(int(n), limits) for n in lengths) if too_long == "drop" else num_samples
    assume(usable >= world_size * accumulate)
    return Case(
        lengths=lengths,
        num_anchorable=rng.integers(0, 1 + lengths),
        limits=limits,
        seed=draw(st.integers(0, 2**40)),
        epoch=draw(st.integers(0, 3)),
        world_size=world_size,
        accumulate=accumulate,
    )


def padded(length: int, multiple: int) -> int:
    return next(n for n in range(length, length + multiple) if n % multiple == 0)


def computed_tokens(sampler: LengthBatchSampler, lengths: list[int], multiple: int) -> int:
    """Of a batch: each sample padded to the longest, or behind each other in one row."""
    if isinstance(sampler, PackedSampler):
        return padded(sum(lengths), multiple)
    return padded(max(lengths), multiple) * len(lengths)


def is_too_long(length: int, limits: BatchLimits) -> bool:
    return padded(length, limits.pad_multiple) > limits.token_budget


def batches_of(plan: Plan) -> list[list[int]]:
    """All batches of the epoch as they are dealt."""
    return [
        plan.batch(step, rank, micro).tolist()
        for step in range(plan.num_steps)
        for micro in range(plan.accumulate)
        for rank in range(plan.world_size)
    ]


def company(plan: Plan) -> set[frozenset[int]]:
    """Who is with whom, whatever the order."""
    return {frozenset(batch) for batch in batches_of(plan)}


@every_sampler
@quick
@given(case=cases())
def test_each_sample_is_emitted_once_or_counted_as_dropped(sampler: LengthBatchSampler, case: Case) -> None:
    plan = case.plan(sampler)
    times = Counter(index for batch in batches_of(plan) for index in batch)
    assert set(times.values()) == {1}
    assert set(times) <= set(range(len(case.lengths)))
    assert plan.ledger["read"] == len(case.lengths) == len(times) + sum(plan.dropped.values())
    assert plan.ledger["emitted"] == len(times)


@every_sampler
@quick
@given(case=cases())
def test_samples_are_dropped_only_as_too_long_or_where_one_more_step_would_take_more_batches_than_samples(
    sampler: LengthBatchSampler, case: Case
) -> None:
    plan = case.plan(sampler)
    too_long = {i for i, length in enumerate(case.lengths.tolist()) if is_too_long(length, case.limits)}
    dropping = case.limits.too_long == "drop"
    assert plan.dropped.get("too_long", 0) == dropping * len(too_long)
    assert not dropping or not too_long & set(plan.indices.tolist())
    left_out = plan.dropped.get("incomplete_step", 0)
    assert 0 <= left_out < case.batches_per_step
    if left_out:
        usable = len(case.lengths) - dropping * len(too_long)
        assert (plan.num_steps + 1) * case.batches_per_step > usable


@every_sampler
@quick
@given(case=cases())
def test_no_batch_exceeds_a_limit_but_for_a_long_sample_alone(sampler: LengthBatchSampler, case: Case) -> None:
    limits = case.limits
    longest_allowed = limits.token_budget // limits.pad_multiple * limits.pad_multiple
    for batch in batches_of(case.plan(sampler)):
        lengths = case.lengths[batch].tolist()
        if limits.too_long == "truncate":
            lengths = [longest_allowed if is_too_long(length, limits) else length for length in lengths]
        if not (limits.too_long == "alone" and len(batch) == 1):
            assert computed_tokens(sampler, lengths, limits.pad_multiple) <= limits.token_budget
        anchors = sum(min(n, limits.anchors_per_sample) for n in case.num_anchorable[batch].tolist())
        assert limits.anchor_budget is None or anchors <= limits.anchor_budget
        assert limits.max_samples is None or len(batch) <= limits.max_samples


@every_sampler
@quick
@given(case=cases())
def test_truncated_counts_the_emitted_samples_that_are_cut(sampler: LengthBatchSampler, case: Case) -> None:
    plan = case.plan(sampler)
    cut = [i for i in plan.indices.tolist() if is_too_long(int(case.lengths[i]), case.limits)]
    assert plan.truncated == (len(cut) if case.limits.too_long == "truncate" else 0)


@every_sampler
@quick
@given(case=cases())
def test_every_rank_has_the_same_positive_number_of_batches_and_none_is_empty_or_shared(
    sampler: LengthBatchSampler, case: Case
) -> None:
    plan = case.plan(sampler)
    assert plan.num_steps >= 1
    of_rank = [
        [plan.batch(step, rank, micro) for step in range(plan.num_steps) for micro in range(case.accumulate)]
        for rank in range(case.world_size)
    ]
    assert all(len(batch) > 0 for batches in of_rank for batch in batches)
    assert sum(len(batches) for batches in of_rank) == plan.num_batches
    samples = [set(np.concatenate(batches).tolist()) for batches in of_rank]
    assert sum(len(s) for s in samples) == len(set().union(*samples)) == len(plan.indices)


@every_sampler
@quick
@given(case=cases())
def test_the_plan_depends_on_nothing_but_its_arguments(sampler: LengthBatchSampler, case: Case) -> None:
    plan = case.plan(sampler)
    case.plan(sampler)
    np.random.default_rng().random()
    stored = replace(case, lengths=case.lengths.astype(np.int32), num_anchorable=case.num_anchorable.astype(np.int32))
    again = stored.plan(sampler)
    assert again.fingerprint() == plan.fingerprint()
    assert again.ledger == plan.ledger


@every_sampler
@quick
@given(case=cases())
def test_the_most_expensive_batch_is_the_first_of_epoch_0(sampler: LengthBatchSampler, case: Case) -> None:
    case = replace(case, epoch=0, limits=replace(case.limits, probe_first=True))
    limits = case.limits

    def cost(batch: list[int]) -> tuple[int, int]:
        lengths = limits.planned_lengths(case.lengths[batch]).tolist()
        anchors = int(limits.planned_anchors(case.num_anchorable[batch]).sum())
        return computed_tokens(sampler, lengths, limits.pad_multiple), anchors

    plan = case.plan(sampler)
    assert cost(plan.batch(0, 0, 0).tolist()) == max(cost(batch) for batch in batches_of(plan))


@every_sampler
@quick
@given(case=cases())
def test_probing_changes_the_order_of_epoch_0_only(sampler: LengthBatchSampler, case: Case) -> None:
    probing = replace(case, limits=replace(case.limits, probe_first=True)).plan(sampler)
    plain = replace(case, limits=replace(case.limits, probe_first=False)).plan(sampler)
    assert company(probing) == company(plain)
    assert case.epoch == 0 or probing.fingerprint() == plain.fingerprint()


@every_sampler
@quick
@given(world_size=st.integers(2, 16), accumulate=st.integers(1, 8))
def test_over_world_size_micro_steps_each_rank_gets_each_slot_once(
    sampler: LengthBatchSampler, world_size: int, accumulate: int
) -> None:
    ones = np.ones(2 * world_size * world_size * accumulate, dtype=np.int64)
    plan = sampler.plan(ones, ones, BatchLimits(2, 1, 1), seed=0, epoch=1, world_size=world_size, accumulate=accumulate)
    slot_of_sample = {
        int(sample): number % world_size
        for number in range(plan.num_batches)
        for sample in plan.indices[plan.offsets[number] : plan.offsets[number + 1]]
    }
    assert plan.num_steps * accumulate == world_size * accumulate
    for rank in range(world_size):
        slots = [
            slot_of_sample[int(plan.batch(step, rank, micro)[0])]
            for step in range(plan.num_steps)
            for micro in range(accumulate)
        ]
        for first in range(len(slots) - world_size + 1):
            assert sorted(slots[first : first + world_size]) == list(range(world_size))


@pytest.mark.parametrize("sampler", [s for s in SAMPLERS.values() if s.pads])  # packed rows are never split
def test_split_halves_come_as_early_as_late_in_the_epoch(sampler: LengthBatchSampler) -> None:
    # 8 batches of 10, two of which must be split for steps of 5: four batches of 5, at places 0..9.
    lengths = np.full(80, 7)
    limits = BatchLimits(token_budget=70, pad_multiple=1, anchors_per_sample=1)
    places: list[int] = []
    for epoch in range(1, 401):
        plan = sampler.plan(lengths, lengths, limits, seed=3, epoch=epoch, world_size=5, accumulate=1)
        sizes = np.diff(plan.offsets).tolist()
        assert sorted(sizes) == [5] * 4 + [10] * 6
        places += [place for place, size in enumerate(sizes) if size == 5]
    counts = np.bincount(places, minlength=10)  # 160 each if any place is as likely, standard deviation below 13
    assert counts.min() > 160 - 5 * 13
    assert counts.max() < 160 + 5 * 13


def test_with_one_sample_a_batch_the_remainder_of_the_last_step_is_left_out_in_turn() -> None:
    lengths = np.full(10, 5)
    limits = BatchLimits(token_budget=50, pad_multiple=1, anchors_per_sample=1, max_samples=1)
    times = np.zeros(10, dtype=np.int64)
    for epoch in range(100):
        for sampler in SAMPLERS.values():
            plan = sampler.plan(lengths, lengths, limits, seed=0, epoch=epoch, world_size=4, accumulate=2)
            assert plan.ledger == {"read": 10, "emitted": 8, "dropped": {"incomplete_step": 2}, "truncated": 0}
            times[plan.indices] += 1
    assert times.min() > 500  # of 800, 640 expected


@pytest.mark.parametrize("sampler", [LengthSortedSampler(), BucketedSampler()], ids=["sorted", "bucketed"])
def test_the_batches_left_out_of_an_incomplete_step_are_the_smallest(sampler: LengthBatchSampler) -> None:
    # Batches of 2, 2, 1, 1, 1 samples: 7 samples never make 8 batches, so one of the single ones goes.
    lengths = np.array([10, 10, 10, 10, 100, 100, 100])
    limits = BatchLimits(token_budget=100, pad_multiple=1, anchors_per_sample=1, max_samples=2)
    plan = sampler.plan(lengths, lengths, limits, seed=0, epoch=1, world_size=4, accumulate=1)
    assert sorted(np.diff(plan.offsets).tolist()) == [1, 1, 2, 2]
    assert plan.dropped == {"incomplete_step": 1}


def tiny_plan(**changes: object) -> Plan:
    fields = {"indices": np.array([4, 2, 0, 3]), "offsets": np.array([0, 1, 4]), "world_size": 2, "accumulate": 1}
    return Plan(**{**fields, "num_samples": 5, "dropped": {"too_long": 1}, "truncated": 0, **changes})  # type: ignore[arg-type]


def test_the_fingerprint_is_the_sha256_of_the_counts_and_arrays_as_little_endian_int64() -> None:
    numbers = [4, 3, 2, 1, 4, 2, 0, 3, 0, 1, 4]
    assert tiny_plan().fingerprint() == hashlib.sha256(struct.pack("<11q", *numbers)).hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        {"indices": np.array([2, 4, 0, 3])},
        {"offsets": np.array([0, 2, 4])},
        {"world_size": 1, "accumulate": 2},
        {"world_size": 1},
    ],
)
def test_the_fingerprint_tells_plans_apart(change: dict[str, object]) -> None:
    assert tiny_plan(**change).fingerprint() != tiny_plan().fingerprint()


@pytest.mark.parametrize(("name", "at"), [("step", (1, 0, 0)), ("rank", (0, 2, 0)), ("micro", (0, 0, 1))])
def test_a_batch_outside_the_plan_is_an_error_that_says_which_number(name: str, at: tuple[int, int, int]) -> None:
    with pytest.raises(IndexError, match=rf"^{name}={max(at)} .* 0 <= {name} < {max(at)}"):
        tiny_plan().batch(*at)
    with pytest.raises(IndexError, match=rf"^{name}=-1 "):
        tiny_plan().batch(*(-(value > 0) for value in at))
