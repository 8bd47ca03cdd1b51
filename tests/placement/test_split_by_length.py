"""Batches cut by length: the cuts are the best there are, and the states are those of the whole batch."""

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.batch import Batch
from dflash.cost import CostModel
from dflash.lengths import lognormal_lengths
from dflash.placement.inline import InlinePlacement
from dflash.placement.pool import PoolPlacement
from dflash.placement.split_by_length import HARDLY_MORE, length_groups
from dflash.samplers.full_shuffle import FullShuffleSampler
from dflash.samplers.limits import BatchLimits
from dflash.target.frozen import FrozenTarget
from tests.models import ARCHITECTURES, random_model

CPU = torch.device("cpu")


def padded_cost(lengths: list[int], cost: CostModel, pad_multiple: int) -> float:
    longest = -(-max(lengths) // pad_multiple) * pad_multiple
    return (
        cost.per_batch
        + cost.target_per_token * longest * len(lengths)
        + cost.target_per_token_squared * longest**2 * len(lengths)
    )


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    replicas=st.integers(1, 4),
    max_groups=st.integers(1, 5),
    per_batch=st.sampled_from([0.0, 15.0, 60.0]),
    pad_multiple=st.sampled_from([1, 8]),
    is_busy=st.booleans(),
)
def test_no_other_cut_is_better(
    lengths: list[int], replicas: int, max_groups: int, per_batch: float, pad_multiple: int, is_busy: bool
) -> None:
    cost = CostModel(1.0, 0.01, per_batch=per_batch)
    loads = [float(replica + 1) * is_busy for replica in range(replicas)]
    groups = length_groups(np.array(lengths), cost, loads, max_groups=max_groups, pad_multiple=pad_multiple)
    assert sorted(place for group in groups for place in group.samples) == list(range(len(lengths)))
    for group in groups:
        of_group = [lengths[place] for place in group.samples]
        assert group.cost == pytest.approx(padded_cost(of_group, cost, pad_multiple))

    ascending, most = sorted(lengths), min(max_groups, len(lengths))
    is_busy = is_busy or replicas == 1
    sizes = range(1, most + 1) if is_busy else [min(most, replicas)]
    cuts = [(0, *inner, len(lengths)) for k in sizes for inner in combinations(range(1, len(lengths)), k - 1)]
    judge = sum if is_busy else max  # the targets' whole work, or when the last of them is done
    judged = {cut: judge([padded_cost(ascending[i:j], cost, pad_multiple) for i, j in pairwise(cut)]) for cut in cuts}
    best, got = min(judged.values()), judge([group.cost for group in groups])
    if not is_busy:
        assert got == pytest.approx(best)
        return
    # As few groups as come within 1 % of the least work, and of these cuts the best.
    assert HARDLY_MORE == 1.01
    fewest = min(len(cut) for cut, work in judged.items() if work <= 1.01 * best + 1e-9) - 1
    assert len(groups) == fewest
    assert got == pytest.approx(min(work for cut, work in judged.items() if len(cut) == fewest + 1))


def test_samples_of_equal_length_stay_together_where_a_cut_saves_nothing() -> None:
    (group,) = length_groups(np.full(9, 64), CostModel(), [5.0, 7.0], max_groups=8, pad_multiple=16)
    assert list(group.samples) == list(range(9))


def test_the_dearest_group_goes_where_least_waits() -> None:
    lengths = np.array([10, 50, 20, 21])
    groups = length_groups(lengths, CostModel(1.0, 0.0), [30.0, 5.0, 0.0], max_groups=3, pad_multiple=1)
    assert {tuple(group.samples): group.replica for group in groups} == {(1,): 2, (2, 3): 1, (0,): 0}
    # 50 on replica 2; 42 on replica 1, which has 5 before it; 10 on replica 0: 30 is less than 47 and 50


def test_a_single_replica_reads_several_groups_where_that_is_less_work() -> None:
    groups = length_groups(np.array([10, 50, 10, 50]), CostModel(1.0, 0.0), [7.0], max_groups=8, pad_multiple=1)
    assert sorted(tuple(group.samples) for group in groups) == [(0, 2), (1, 3)]
    assert {group.replica for group in groups} == {0}


def test_six_groups_leave_little_padding_in_the_random_batches_of_the_scenario() -> None:
    lengths = lognormal_lengths(
        20_000, median_tokens=1100, log_sigma=0.95, shortest_tokens=100, longest_tokens=8192, seed=0
    )
    limits = BatchLimits(token_budget=49_152, anchors_per_sample=512, pad_multiple=16)
    plan = FullShuffleSampler().plan(
        lengths, (lengths * 0.6).astype(np.int64), limits, seed=0, epoch=0, world_size=1, accumulate=1
    )
    for loads in ([0.0] * 6, [1e5] * 6):
        real = whole = cut = 0
        for number in range(0, plan.num_batches, 4):
            of_batch = lengths[plan.batch(number, 0, 0)]
            groups = length_groups(of_batch, CostModel(), loads, max_groups=6, pad_multiple=16)
            padded = [of_batch[group.samples] for group in groups]
            real += int(of_batch.sum())
            whole += len(of_batch) * int(of_batch.max())
            cut += sum(len(of_group) * -(-int(of_group.max()) // 16) * 16 for of_group in padded)
        assert real / whole < 0.4
        assert real / cut >= 0.84


def padded_batches(count: int) -> list[Batch]:
    random = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        lengths = torch.randint(1, 40, (int(torch.randint(1, 9, (1,), generator=random)),), generator=random)
        width = -(-int(lengths.max()) // 8) * 8
        ids = torch.randint(3, 97, (len(lengths), width), generator=random)
        nothing = torch.zeros(0, dtype=torch.long)
        made.append(Batch(ids, ids > 0, lengths, torch.arange(len(lengths)), nothing, nothing))
    return made


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("architecture", ["llama", "gpt-neox"])
def test_states_are_those_of_the_whole_batch(architecture: str, replicas: int) -> None:
    target, made = FrozenTarget(random_model(ARCHITECTURES[architecture]), [0, 2]), padded_batches(20)
    inline = InlinePlacement()
    inline.open(target)
    pool = PoolPlacement(
        ["cpu"] * replicas, routing="split_by_length", cost=CostModel(), token_budget=160, pad_multiple=8,
        queued_batches=1, hang_timeout_seconds=30.0,
    )  # fmt: skip
    pool.lay_out(CPU)
    pool.open(target)
    num_cut = 0
    for expected, got in zip(list(inline.feed(made)), pool.feed(made), strict=True):
        num_cut += len(pool.route(expected, [1.0] * replicas)) > 1
        assert got.hidden.shape == expected.hidden.shape
        for row, length in enumerate(expected.lengths.tolist()):
            torch.testing.assert_close(got.hidden[row, :length], expected.hidden[row, :length], rtol=1e-5, atol=1e-5)
    assert num_cut > 10
    assert pool.state.figures.most_states_tokens <= max(160 * replicas, *(batch.num_padded_tokens for batch in made))


def test_packed_batches_are_not_cut() -> None:
    pool = PoolPlacement(["cpu"], routing="split_by_length", cost=CostModel(), token_budget=160)
    with pytest.raises(ValueError, match=r"placement\.routing=split_by_length .* sampler=packed has none"):
        pool.check_plan(packed=True)
    pool.check_plan(packed=False)
    with pytest.raises(ValueError, match=r"placement\.routing='by_length' is unknown\. Allowed: least_loaded, split_"):
        PoolPlacement(["cpu"], routing="by_length", cost=CostModel(), token_budget=160)
