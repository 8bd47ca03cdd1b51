"""Two ranks over gloo, started as a person would, are one process with the same batches in every step."""

import json
from pathlib import Path

import pytest

from tests.commands import SMALL, run_module, scalars, train_here

STEPS = 6
COMMON = [
    *SMALL, "trainer.accelerator=cpu", "batch.token_budget=1024", f"max_steps={STEPS}", "trainer.log_every_n_steps=1",
    "trainer.validate_every_n_steps=3", "callbacks.decoding.every_n_steps=4", "callbacks.decoding.num_prompts=1",
    "callbacks.decoding.max_new_tokens=4",  # on rank 0, while the others wait
]  # fmt: skip


_POOL = ["placement=pool", "placement.targets=[cpu,cpu,cpu]"]  # two replicas for rank 0, one for rank 1


def run_folder(cwd: Path) -> Path:
    (config,) = cwd.glob("outputs/train/*/*/config.yaml")
    return config.parent


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("sampler", "placement", "tolerance"),
    [
        ("bucketed", [*_POOL, "placement.routing=least_loaded"], 1e-6),
        ("random", [*_POOL, "placement.routing=split_by_length"], 1e-5),  # other shapes round otherwise
        ("packed", [], 1e-6),
    ],
)
def test_two_ranks_are_one_process_with_the_same_global_batch(
    sampler: str,
    placement: list[str],
    tolerance: float,
    cache_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # of tests.inject
    # Batches of other sizes on the two ranks; now and then one of them has nothing to train; validation has one batch
    # only, which is split between them.
    empty = "+callbacks.inject={_target_: tests.inject.Inject, empty_with: [3, 4, 29]}"
    options = [*COMMON, f"sampler={sampler}", f"cache_dir={cache_dir}", empty]
    two = run_module("train", *options, *placement, "trainer.devices=2", cwd=tmp_path)
    assert two.returncode == 0, two.stdout + two.stderr
    assert train_here(tmp_path / "one", cache_dir, *options, "trainer.accumulate_grad_batches=2", start_from=[]) == 0

    ours, theirs = scalars(run_folder(tmp_path)), scalars(tmp_path / "one")
    for tag in (
        "train/loss",
        "grad/norm",
        "val/loss",
        "val/acceptance_length",
        "padding/ratio",
        "decode/acceptance_length",
    ):
        assert [step for step, _ in ours[tag]] == [step for step, _ in theirs[tag]], tag
        for (_, value), (_, expected) in zip(ours[tag], theirs[tag], strict=True):
            assert value == pytest.approx(expected, rel=tolerance, abs=tolerance), tag
    summaries = [json.loads((f / "summary.json").read_text()) for f in (run_folder(tmp_path), tmp_path / "one")]
    assert 1 <= summaries[0]["batches_without_anchor"] <= 3
    for key in ("batches_without_anchor", "steps", "epochs", "samples", "real_tokens", "padded_tokens", "anchors"):
        assert summaries[0][key] == summaries[1][key], key
    assert summaries[0]["eta2_ratio"] == pytest.approx(summaries[1]["eta2_ratio"], rel=1e-6)


@pytest.mark.timeout(200)
def test_a_rank_that_fails_takes_those_that_wait_for_it_along(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    fail = "+callbacks.inject={_target_: tests.inject.Inject, fail_at: 3}"
    options = [*COMMON, f"cache_dir={cache_dir}", fail, "trainer.devices=2", "validate_untrained=false"]
    result = run_module("train", *options, cwd=tmp_path)  # which waits for all that have its output open
    assert result.returncode == 1, result.stdout + result.stderr
    assert "RuntimeError: rank 0 fails on purpose" in result.stderr


def test_fewer_held_out_samples_than_ranks_are_refused(cache_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"held-out samples are too few for 64 ranks"):
        train_here(tmp_path, cache_dir, *COMMON, f"cache_dir={cache_dir}", "trainer.devices=64", "batch.max_samples=1",
                   start_from=[])  # fmt: skip
