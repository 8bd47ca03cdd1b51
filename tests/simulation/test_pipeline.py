"""The simulation against times that can be told by hand."""

from collections.abc import Generator

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.cost import CostModel
from dflash.lengths import lognormal_lengths
from dflash.samplers.full_shuffle import FullShuffleSampler
from dflash.samplers.length_sorted import LengthSortedSampler
from dflash.samplers.limits import BatchLimits
from dflash.simulation.pipeline import Machine, SimulatedBatch, simulate
from dflash.simulation.shared_device import SharedDevice
from dflash.simulation.topologies import Measured, Scenario, Topology, calibrate, compare

TOKENS = 100  # of every batch by hand: with targets that take 0.02 s a token, 2 s


def batches(count: int, anchors: int = 1) -> list[SimulatedBatch]:
    return [SimulatedBatch(np.array([50, 50]), anchors) for _ in range(count)]


def machine(*targets: int, target: float = 2.0, drafter: float = 1.0, **changes: object) -> Machine:
    cost = CostModel(target / TOKENS, 0.0, drafter_per_anchor=drafter)
    return Machine(targets, cost, token_budget=TOKENS, pad_multiple=1, **changes)  # type: ignore[arg-type]


def test_one_device_does_one_thing_after_the_other() -> None:
    outcome = simulate([batches(10)], machine(0))
    assert outcome.duration == pytest.approx(10 * (2 + 1))
    assert outcome.drafter_idle == pytest.approx(0)
    assert outcome.target_idle is None
    assert outcome.real_tokens_per_s == pytest.approx(10 * TOKENS / 30)


def test_a_slow_target_is_never_idle_and_the_drafter_waits() -> None:
    outcome = simulate([batches(10)], machine(1))
    assert outcome.duration == pytest.approx(10 * 2 + 1)
    assert outcome.drafter_idle == pytest.approx(1 - 10 / 21)
    assert outcome.target_idle == pytest.approx(1 - 20 / 21)


def test_a_slow_drafter_holds_the_target_up_by_the_full_queue() -> None:
    outcome = simulate([batches(10)], machine(1, drafter=3.0, queued_batches=1))
    # One state waits, none is computed beside it: the drafter takes it and trains 3 s, while the next takes 2 s.
    assert outcome.duration == pytest.approx(2 + 10 * 3)
    assert max(states for _, _, states in outcome.trace) == pytest.approx(1.0)


def test_two_targets_take_half_the_time_of_one() -> None:
    assert simulate([batches(10)], machine(2, drafter=0.5)).duration == pytest.approx(5 * 2 + 2 * 0.5)


def test_ranks_wait_for_each_other_after_every_step() -> None:
    slow_now_and_then = [batches(1, anchors=n)[0] for n in (5, 1, 5, 1)]
    slow_else = [batches(1, anchors=n)[0] for n in (1, 5, 1, 5)]
    ranks = [slow_now_and_then, slow_else]
    assert simulate(ranks, machine(0, 0, target=1e-9)).duration == pytest.approx(4 * 5)
    assert simulate(ranks, machine(0, 0, target=1e-9, accumulate=2)).duration == pytest.approx(2 * 6)


def test_what_shares_a_device_slows_each_other_down() -> None:
    assert simulate([batches(10)], machine(2, device_share=1.0)).duration == pytest.approx(10 * (2 + 1))
    # Half of it is enough for one target and one drafter at once: as if they had one each.
    assert simulate([batches(10)], machine(1, device_share=0.5)).duration == pytest.approx(10 * 2 + 1)


def test_a_shared_device_by_hand() -> None:
    env = simpy.Environment()
    device, ended = SharedDevice(env, 0.8), {}

    def worker(name: str, begin: float, duration: float) -> Generator[simpy.Event, None, None]:
        yield env.timeout(begin)
        yield device.work(duration)
        ended[name] = env.now

    env.process(worker("a", 0.0, 4.0))
    env.process(worker("b", 1.0, 2.5))
    env.run()
    # From 1 on each runs at 1 / 1.6 = 0.625: b's 2.5 take 4 until 5; a has done 1 + 2.5 then, and is alone for its 0.5.
    assert ended == {"b": pytest.approx(5.0), "a": pytest.approx(5.5)}


def test_a_batch_cut_by_length_is_read_by_all_at_once() -> None:
    batch = SimulatedBatch(np.array([10, 10, 80]), 1)
    costs = CostModel(1.0, 0.0, drafter_per_anchor=5.0)
    whole = simulate([[batch]], Machine((2,), costs, 240, 1))
    cut = simulate([[batch]], Machine((2,), costs, 240, 1, routing="split_by_length"))
    assert (whole.duration, whole.target_padded_tokens) == (3 * 80 + 5, 240)
    assert (cut.duration, cut.target_padded_tokens) == (80 + 5, 100)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 100),
    targets=st.integers(1, 4),
    queued=st.integers(1, 3),
    routing=st.sampled_from(["least_loaded", "split_by_length"]),
    packed=st.booleans(),
)
def test_nothing_is_lost_and_no_device_does_two_things_at_once(
    seed: int, targets: int, queued: int, routing: str, packed: bool
) -> None:
    random = np.random.default_rng(seed)
    made = [
        SimulatedBatch(random.integers(1, 60, random.integers(1, 6)), int(random.integers(0, 20)), packed)
        for _ in range(25)
    ]
    costs = CostModel(0.01, 1e-4, drafter_per_anchor=0.05, per_batch=0.1, drafter_per_batch=0.2)
    outcome = simulate([made], Machine((targets,), costs, 200, 8, queued, routing))
    assert len(outcome.trace) == len(made)
    assert outcome.real_tokens == sum(int(batch.lengths.sum()) for batch in made)
    assert outcome.drafter_busy == [pytest.approx(sum(0.2 + 0.05 * batch.anchors for batch in made))]
    assert all(busy <= outcome.duration + 1e-9 for busy in (*outcome.target_busy, *outcome.drafter_busy))
    assert outcome.duration <= sum(outcome.target_busy) + sum(outcome.drafter_busy) + 1e-9  # somebody always works
    assert outcome.target_padded_tokens >= outcome.real_tokens


def scenario() -> Scenario:
    lengths = lognormal_lengths(6000, median_tokens=300, log_sigma=0.9, shortest_tokens=20, longest_tokens=2000, seed=0)
    limits = BatchLimits(token_budget=8192, anchors_per_sample=64, pad_multiple=16)
    samplers = {"random": FullShuffleSampler(), "sorted": LengthSortedSampler()}
    template = Machine((1,), CostModel(), 8192, 16)
    return Scenario(
        samplers, lengths, lengths // 2, limits, template, batches_per_step=4, max_batches=150, seed=0
    )  # fmt: skip


@pytest.mark.parametrize("topology", ["3+1", "inline"])  # inline: the drafter's time is part of random's, too
def test_calibration_meets_both_figures(topology: str) -> None:
    made = scenario()
    cost = calibrate(made, CostModel(), Measured(topology, random=5000.0, sorted=10000.0))
    for name, rate in (("random", 5000.0), ("sorted", 10000.0)):
        outcome = made.run(name, "least_loaded", Topology.parse(topology), cost)
        assert outcome.real_tokens_per_s == pytest.approx(rate, rel=0.01)


def test_figures_that_no_cost_explains_are_refused() -> None:
    made = scenario()
    with pytest.raises(ValueError, match=r"sorted gets [\d,]+ real tokens/s at most, below the measured 90,000"):
        calibrate(made, CostModel(), Measured("3+1", random=5000.0, sorted=90_000.0))
    with pytest.raises(ValueError, match=r"holds random at [\d,]+, where 5,000 were measured"):
        calibrate(made, CostModel(), Measured("3+1", random=5000.0, sorted=2000.0))


def test_every_case_is_compared_once() -> None:
    cases = compare(scenario(), ["2+1", "2+2", "inline"], ["least_loaded", "split_by_length"], CostModel(), print)
    of_sampler = [(case.topology, case.routing) for case in cases if case.sampler == "random"]
    both = ("least_loaded", "split_by_length")
    assert of_sampler == [*(("2+1", r) for r in both), *(("2+2", r) for r in both), ("inline", "-")]
    assert len({id(case.outcome) for case in cases}) == len(cases) == 10


@pytest.mark.parametrize("text", ["6", "6+", "a+1", "1+2", "3+0", "-1+1", ""])
def test_what_is_no_topology_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected targets\+drafters with a target for every drafter"):
        Topology.parse(text)


def test_targets_are_dealt_in_turn() -> None:
    assert Topology.parse("6+1").targets_of_ranks == (6,)
    assert Topology.parse("5+3").targets_of_ranks == (2, 2, 1)
    assert Topology.parse("inline").targets_of_ranks == (0,)
