"""`python -m dflash.plan`: the table, the picture, the advice; and that a run comes to the figures of its plan."""

import csv
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.commands import compose_config, run_module, train_here

COLUMNS = [
    "sampler", "real_over_padded", "fill", "steps", "lost_padding", "lost_attention", "lost_stragglers", "lost_anchors",
    "rank_imbalance", "eta2_ratio", "reuse", "longest_gap_steps", "plan_seconds", "relative_throughput",
]  # fmt: skip


def table_of(folder: Path) -> dict[str, dict[str, str]]:
    (path,) = folder.glob("outputs/plan/*/*/plan.csv")
    assert (path.parent / "plan.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(path.open()))
    assert list(rows[0]) == COLUMNS
    return {row["sampler"]: row for row in rows}


def test_the_scenario_is_planned_and_the_best_sampler_named(tmp_path: Path) -> None:
    result = run_module("plan", "scenario.num_samples=20000", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    rows = table_of(tmp_path)
    assert list(rows)[:3] == ["sorted", "random", "bucketed"]
    assert float(rows["sorted"]["relative_throughput"]) == 1.0
    assert float(rows["random"]["relative_throughput"]) < 0.5
    assert "The fastest with eta2_ratio <= 2: packed." in result.stdout
    (advice,) = [line for line in result.stdout.splitlines() if "python -m dflash.train" in line]
    trained = compose_config("train", *advice.split()[3:])
    assert trained.sampler._target_ == "dflash.samplers.packed.PackedSampler"
    assert (trained.batch.token_budget, trained.batch.anchor_budget, trained.trainer.devices) == (49152, None, 8)


def test_the_advice_trains_on_the_data_and_with_the_costs_that_were_planned(tmp_path: Path) -> None:
    data = [
        "data=sized_text",
        "data.max_samples=90",
        "data.val_fraction=0.2",
        "target=tiny",
        "data.max_length_tokens=300",
    ]
    costs = ["cost.per_batch=7", "accumulate=2", "world_size=1", "batch.token_budget=4096"]
    best = 'samplers=["bucketed boundaries=optimal num_buckets=3"]'
    result = run_module("plan", *data, *costs, best, "wanted_eta2_ratio=1000", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (advice,) = [line for line in result.stdout.splitlines() if "python -m dflash.train" in line]
    trained = compose_config("train", *advice.split()[3:])
    assert (trained.data.max_samples, trained.target.name, trained.cost.per_batch) == (90, "tiny", 7)
    assert (trained.sampler.boundaries, trained.sampler.num_buckets) == ("optimal", 3)
    assert (trained.batch.anchors_per_sample, trained.trainer.accumulate_grad_batches) == (512, 2)


def test_it_says_so_where_no_sampler_mixes_as_wanted(tmp_path: Path) -> None:
    wanted = ["scenario.num_samples=5000", "samplers=[sorted]", "wanted_eta2_ratio=1.5"]
    result = run_module("plan", *wanted, cwd=tmp_path)
    assert "None of them mixes as well as eta2_ratio <= 1.5" in result.stdout


def test_topologies_are_simulated_and_the_two_measured_figures_met(tmp_path: Path) -> None:
    small = ["scenario.num_samples=20000", "simulation.max_batches=250", "topology=[6+1,6+2,inline]"]
    result = run_module("plan", "experiment=eight_gpus", *small, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (path,) = tmp_path.glob("outputs/plan/*/*/topology.csv")
    assert (path.parent / "topology.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(path.open()))
    assert list(rows[0]) == ["sampler", "routing", "topology", "real_tokens_per_s", "target_idle", "drafter_idle"]
    rate = {(r["sampler"], r["routing"], r["topology"]): float(r["real_tokens_per_s"]) for r in rows}
    assert rate["sorted", "least_loaded", "6+1"] == pytest.approx(32000, rel=0.01)
    assert rate["random", "least_loaded", "6+1"] == pytest.approx(11900, rel=0.01)
    assert rate["random", "split_by_length", "6+1"] > 2 * rate["random", "least_loaded", "6+1"]
    assert rate["packed", "-", "inline"] < rate["packed", "least_loaded", "6+1"]
    assert "calibrated, in seconds:" in result.stdout
    mixing = {key: value for key, value in rate.items() if key[0] in ("random", "packed")}
    best_sampler, best_routing, best_topology = max(mixing, key=lambda key: mixing[key])
    assert f"Most real tokens/s of those that mix as wanted: {best_sampler} with placement.routing=" in result.stdout
    (advice,) = [line for line in result.stdout.splitlines() if "python -m dflash.train" in line]
    trained = compose_config("train", *advice.split()[3:])
    drafters = int(best_topology[-1])
    assert best_sampler.title() in trained.sampler._target_.replace("FullShuffle", "Random")
    assert list(trained.placement.targets) == [f"cuda:{gpu}" for gpu in range(drafters, drafters + 6)]
    assert trained.placement.routing == best_routing
    assert (trained.trainer.devices, trained.trainer.accumulate_grad_batches) == (drafters, 8 // drafters)
    assert 0 < trained.placement.cost.target_per_token < 1e-3  # calibrated: seconds


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["topology=6"], "topology=6: expected targets+drafters with a target for every drafter"),
        (["topology=6+1", "simulation.routings=[fastest]"], "simulation.routings=['fastest']: expected a list of"),
        (["topology=6+1", "simulation.max_batches=0"], "simulation.max_batches=0: expected a whole number"),
        (["calibration={topology: 6+1, random: 1, sorted: 2}"], "calibration fits what is simulated: add a topology"),
        (
            ["topology=6+1", "calibration={topology: 6+1, random: -1, sorted: 2}"],
            "calibration.random=-1: expected a number above 0",
        ),
        (["lengths=normal"], "lengths='normal' is unknown: lognormal, or null"),
        (["scenario.num_samples=0"], "scenario.num_samples=0: expected a whole number of 1 or more"),
        (["scenario.num_samples=1e3"], "scenario.num_samples=1000.0: expected a whole number of 1 or more."),
        (["world_size=0"], "world_size=0: expected a whole number of 1 or more"),
        (["profile=true"], "profile=true runs the target and the drafter, so it needs samples"),
        (['samplers=["bucketed width=1"]'], "sampler.width=1 must be a number > 1"),
        (["cost.per_batch=-1"], "cost.per_batch=-1: expected a number of 0 or more"),
    ],
)
def test_a_mistake_ends_with_one_message(overrides: list[str], message: str, tmp_path: Path) -> None:
    result = run_module("plan", *overrides, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith(f"Error: {message}"), result.stderr


def test_the_profile_fits_the_cost_model_to_this_machine(tmp_path: Path) -> None:
    tiny = [
        "target=tiny", "data=sized_text", "data.max_samples=80", "data.val_fraction=0.2", "data.median_tokens=30",
        "data.longest_tokens=200",
        "drafter.num_layers=1", "drafter.target_layer_ids=[0,1]", "batch.token_budget=1024",
        "batch.anchors_per_sample=4", "num_threads=1", "samplers=[sorted,packed]", "world_size=1",
    ]  # fmt: skip
    result = run_module("plan", "profile=true", *tiny, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "fitted to this machine, in seconds" in result.stdout
    assert set(table_of(tmp_path)) == {"sorted", "packed"}


@pytest.mark.parametrize("sampler", ["sorted", "bucketed", "packed"])
def test_a_run_of_one_epoch_comes_to_the_figures_of_its_plan(sampler: str, cache_dir: Path, tmp_path: Path) -> None:
    quiet = ["callbacks.decoding=null", "validate_untrained=false", "epochs=1", "trainer.accumulate_grad_batches=2"]
    run_folder = tmp_path / "run"
    train_here(run_folder, cache_dir, *quiet, f"sampler={sampler}")
    summary = json.loads((run_folder / "summary.json").read_text())
    config = OmegaConf.load(run_folder / "config.yaml")
    same = [
        "data=stdlib_chat", "target=tiny", f"samplers=[{sampler}]", "world_size=1", "accumulate=2",
        f"cache_dir={cache_dir}",
        *(f"data.{k}={config.data[k]}" for k in ("max_samples", "max_code_chars", "max_length_tokens", "val_fraction")),
        f"regenerate.max_new_tokens={config.regenerate.max_new_tokens}",
        *(f"batch.{key}={config.batch[key]}" for key in ("token_budget", "anchors_per_sample", "anchor_budget")),
        "data.long_fraction=0.2",
    ]  # fmt: skip
    result = run_module("plan", *same, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    row = table_of(tmp_path)[sampler]
    assert summary["padding_ratio"] == pytest.approx(1 - float(row["real_over_padded"]), rel=1e-9)
    assert summary["eta2_ratio"] == pytest.approx(float(row["eta2_ratio"]), rel=1e-6)
    assert summary["steps"] == int(row["steps"])
