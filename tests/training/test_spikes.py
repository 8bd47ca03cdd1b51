"""What is a spike: against the definition written out, and properties that no threshold may break."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.training.spikes import SpikeDetector, SpikeOptions

OPTIONS = SpikeOptions(num_deviations=5.0, window_steps=12, min_steps=4, new_level_steps=3)


def by_definition(level: list[float], values: list[float], options: SpikeOptions) -> list[bool]:
    """Each value judged from the whole past, without state. `level`: values known before, which are not judged."""
    verdicts: list[bool] = []
    for i, value in enumerate(values):
        past = level + [v for v, spike in zip(values[:i], verdicts, strict=True) if not spike]
        past = past[-options.window_steps :]
        threshold = math.inf
        if len(past) >= options.min_steps:
            middle = float(np.median(past))
            mad = float(np.median([abs(v - middle) for v in past]))
            threshold = middle + options.num_deviations * max(1.4826 * mad, 0.02 * abs(middle))
        verdicts.append(not math.isfinite(value) or value > threshold)
        tail = [j for j in range(i + 1) if math.isfinite(values[j])][-options.new_level_steps :]
        if len(tail) == options.new_level_steps and all(verdicts[j] for j in tail):
            return verdicts + by_definition([values[j] for j in tail], values[i + 1 :], options)
    return verdicts


finite_or_not = st.one_of(st.floats(0, 100), st.sampled_from([1e4, math.inf, math.nan]))


@given(st.lists(finite_or_not, max_size=60))
def test_verdicts_are_those_of_the_definition(values: list[float]) -> None:
    detector = SpikeDetector(OPTIONS)
    assert [detector.judge(v).is_spike for v in values] == by_definition([], values, OPTIONS)


@given(st.lists(st.floats(0, 1e6), max_size=80))
def test_a_loss_that_merely_falls_has_no_spike(values: list[float]) -> None:
    detector = SpikeDetector(OPTIONS)
    assert not any(detector.judge(v).is_spike for v in sorted(values, reverse=True))


@given(st.integers(0, 2**32 - 1), st.integers(25, 200))
def test_a_hundredfold_value_and_a_nan_are_spikes_and_ordinary_noise_is_none(seed: int, where: int) -> None:
    random = np.random.default_rng(seed)
    detector = SpikeDetector(SpikeOptions())
    for step in range(220):
        ordinary = float(random.uniform(3.5, 4.5))
        assert not detector.judge(ordinary).is_spike
        if step == where:
            assert detector.judge(100 * ordinary).is_spike
            assert detector.judge(math.nan).is_spike


def test_spikes_stay_out_of_the_baseline() -> None:
    plain, disturbed = SpikeDetector(OPTIONS), SpikeDetector(OPTIONS)
    for step in range(30):
        plain.judge(1 + 0.1 * (step % 3))
        disturbed.judge(1 + 0.1 * (step % 3))
        if step > 5:
            disturbed.judge(50.0)
    assert disturbed.threshold == plain.threshold


@given(st.lists(finite_or_not, min_size=1, max_size=60), st.integers(0, 60))
def test_a_detector_goes_on_from_its_state(values: list[float], cut: int) -> None:
    whole, first, second = (SpikeDetector(OPTIONS) for _ in range(3))
    expected = [whole.judge(v).is_spike for v in values]
    found = [first.judge(v).is_spike for v in values[:cut]]
    second.load_state_dict(first.state_dict())
    assert found + [second.judge(v).is_spike for v in values[cut:]] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_deviations": 0}, r"spikes\.num_deviations=0"),
        ({"window_steps": 1}, r"spikes\.window_steps=1: expected a whole number of 2 or more"),
        ({"min_steps": 30, "window_steps": 20}, r"spikes\.min_steps=30 is more than spikes\.window_steps=20"),
        ({"skip": "some"}, r"spikes\.skip='some' is unknown: choose one of non_finite, all, none"),
        ({"new_level_steps": 2.5}, r"spikes\.new_level_steps=2\.5"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpikeOptions(**options)  # type: ignore[arg-type]
