"""What a batch may hold: the rules for lengths and anchors, and every refusal."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dflash.samplers.bucketed import BucketedSampler
from dflash.samplers.full_shuffle import FullShuffleSampler
from dflash.samplers.length_sorted import LengthSortedSampler
from dflash.samplers.limits import BatchLimits
from dflash.samplers.packed import PackedSampler
from dflash.samplers.windowed import WindowedSampler

CONF = Path(__file__).parents[2] / "conf"


def limits(**changes: Any) -> BatchLimits:
    return BatchLimits(**{"token_budget": 100, "pad_multiple": 8, "anchors_per_sample": 4, **changes})


@settings(deadline=None)
@given(length=st.integers(1, 300), token_budget=st.integers(1, 200), pad_multiple=st.integers(1, 64))
def test_a_sample_is_truncated_iff_its_padded_length_exceeds_the_budget_and_then_as_little_as_possible(
    length: int, token_budget: int, pad_multiple: int
) -> None:
    if token_budget < pad_multiple:
        return
    cut = limits(token_budget=token_budget, pad_multiple=pad_multiple, too_long="truncate")
    planned = int(cut.planned_lengths(np.array(length)))
    if math.ceil(length / pad_multiple) * pad_multiple <= token_budget:
        assert planned == length
    else:
        assert planned == max(n for n in range(0, token_budget + 1, pad_multiple))


@pytest.mark.parametrize("too_long", ["error", "drop", "alone"])
def test_only_truncate_changes_lengths(too_long: str) -> None:
    lengths = np.array([1, 96, 97, 5000])
    assert limits(too_long=too_long).planned_lengths(lengths).tolist() == [1, 96, 97, 5000]


def test_padded_lengths_are_the_next_multiples() -> None:
    assert limits().padded_lengths(np.array([1, 7, 8, 9, 16, 17])).tolist() == [8, 8, 8, 16, 16, 24]


def test_a_sample_brings_its_anchors_up_to_the_limit() -> None:
    assert limits().planned_anchors(np.array([0, 3, 4, 5, 900])).tolist() == [0, 3, 4, 4, 4]


@pytest.mark.parametrize("key", ["token_budget", "pad_multiple", "anchors_per_sample"])
@pytest.mark.parametrize("value", ["abc", "64", 1e3, None, True, 0, -8, [64]])
def test_a_required_limit_that_is_no_positive_integer_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^batch\.{key}=.*: expected a whole number of 1 or more\.") as error:
        limits(**{key: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("key", ["anchor_budget", "max_samples"])
@pytest.mark.parametrize("value", ["abc", 1e3, False, 0, -1])
def test_an_optional_limit_is_a_positive_integer_or_null(key: str, value: object) -> None:
    assert getattr(limits(**{key: None}), key) is None
    with pytest.raises(ValueError, match=rf"^batch\.{key}=.*: expected .* 1 or more, or null for no bound"):
        limits(**{key: value})


@pytest.mark.parametrize("value", ["ignore", None, True, ""])
def test_an_unknown_policy_is_refused_with_the_known_ones(value: object) -> None:
    with pytest.raises(ValueError, match=r"^batch\.too_long=.*error, drop, truncate, alone"):
        limits(too_long=value)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_probe_first_is_true_or_false(value: object) -> None:
    with pytest.raises(ValueError, match=r"^batch\.probe_first=.* true or false"):
        limits(probe_first=value)


def test_a_token_budget_below_one_padded_sample_is_refused() -> None:
    limits(token_budget=8)
    with pytest.raises(ValueError, match=r"batch\.token_budget=7 .* batch\.pad_multiple=8"):
        limits(token_budget=7)


def test_an_anchor_budget_below_one_samples_anchors_is_refused() -> None:
    limits(anchor_budget=4)
    with pytest.raises(ValueError, match=r"batch\.anchors_per_sample=4 .* batch\.anchor_budget=3"):
        limits(anchor_budget=3)


@pytest.mark.parametrize("width", [1, 1.0, 0.5, -2, "1.25", None, True, float("nan"), float("inf")])
def test_a_bucket_width_that_is_no_number_above_one_is_refused(width: Any) -> None:
    with pytest.raises(ValueError, match=r"^sampler\.width=.* must be a number > 1"):
        BucketedSampler(width=width)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sorted", LengthSortedSampler), ("random", FullShuffleSampler), ("bucketed", BucketedSampler),
        ("windowed", WindowedSampler), ("packed", PackedSampler),
    ],
)  # fmt: skip
def test_each_sampler_is_built_from_its_config(name: str, kind: type) -> None:
    groups = {"cost": CONF / "cost" / "default.yaml", "sampler": CONF / "sampler" / f"{name}.yaml"}
    config = OmegaConf.create({group: OmegaConf.load(path) for group, path in groups.items()})
    assert type(instantiate(config.sampler)) is kind


def test_the_default_batch_config_names_every_limit() -> None:
    config = OmegaConf.load(CONF / "batch" / "default.yaml")
    assert isinstance(instantiate(config), BatchLimits)
    assert set(config) - {"_target_"} == set(BatchLimits.__dataclass_fields__)
