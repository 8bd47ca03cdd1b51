"""`python -m dflash.compare`: what the runs have measured, side by side."""

import csv
import json
from pathlib import Path

import pytest

from dflash.compare import compare
from tests.commands import run_module, scalars, train_here


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    options = ["max_steps=3", "validate_untrained=false", "callbacks.decoding=null", "trainer.log_every_n_steps=1"]
    for sampler in ("sorted", "random"):
        assert train_here(folder / sampler, folder / "cache", *options, f"sampler={sampler}") == 0
    return [folder / "sorted", folder / "random"]


def test_the_table_holds_each_runs_own_figures(runs: list[Path], tmp_path: Path) -> None:
    result = run_module("compare", f"runs=[{runs[0]},{runs[1]}]", f"hydra.run.dir={tmp_path}", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    rows = list(csv.DictReader((tmp_path / "compare.csv").open()))
    assert [row["run"] for row in rows] == [str(run) for run in runs]
    for row, run in zip(rows, runs, strict=True):
        summary = json.loads((run / "summary.json").read_text())
        assert float(row["val_loss"]) == summary["validation"]["trained"]["loss"]
        assert float(row["padding_ratio"]) == summary["padding_ratio"]
        assert int(row["gradient_spikes"]) == summary["spikes"]["gradient"]
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert result.stdout.splitlines()[0].split() == ["sorted", "random"]


def test_curves_are_what_tensorboard_shows(runs: list[Path]) -> None:
    from dflash.report.curves import read_curves

    shown = scalars(runs[0])
    assert read_curves(runs[0], ["train/loss", "no/such"]) == {"train/loss": shown["train/loss"]}


@pytest.mark.parametrize("names", [[], ["sorted"], ["sorted", "sorted"]])
def test_fewer_than_two_runs_are_refused(runs: list[Path], tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(ValueError, match="expected two or more different run folders"):
        compare([runs[0].parent / name for name in names], ["train/loss"], tmp_path)


def test_a_folder_that_is_no_finished_run_is_refused(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"found no summary\.json to read"):
        compare([runs[0], tmp_path], ["train/loss"], tmp_path)
