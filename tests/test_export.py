"""`python -m dflash.export`: a folder that servers load and that another run can start from."""

import json
from pathlib import Path

import pytest
import torch

from dflash.decoding.check_export import compare_logits
from dflash.drafter.checkpoint import load_drafter
from dflash.export import export
from dflash.target.tiny import build_tiny_model
from tests.commands import compose_config, run_module, train_here


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    assert train_here(folder, folder / "cache", "max_steps=3", "callbacks.decoding=null") == 0
    return folder


def export_here(*overrides: str) -> None:
    export(compose_config("export", *overrides))


def test_the_command_writes_checks_and_tells_how_to_serve(run: Path, tmp_path: Path) -> None:
    result = run_module("export", f"run={run}", "out=served/drafter", "check=true", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "are the same to the bit" in result.stdout
    folder = tmp_path / "served" / "drafter"
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    vllm = next(line for line in result.stdout.splitlines() if "num_speculative_tokens" in line)
    options = json.loads(vllm.strip().strip("'"))
    assert options == {"method": "dflash", "model": str(folder), "num_speculative_tokens": 7}
    assert f"--speculative-algorithm DFLASH \\\n    --speculative-draft-model-path {folder}" in result.stdout


def test_training_starts_from_an_export_where_the_run_ended(run: Path, tmp_path: Path) -> None:
    export_here(f"run={run}", f"out={tmp_path / 'exported'}", "dtype=float32")
    start = [f"init_from={tmp_path / 'exported'}", "max_steps=1", "callbacks.decoding=null"]
    assert train_here(tmp_path / "second", run / "cache", *start) == 0
    first = json.loads((run / "summary.json").read_text())["validation"]["trained"]
    second = json.loads((tmp_path / "second" / "summary.json").read_text())["validation"]["untrained"]
    assert second == first


def test_a_changed_export_does_not_pass_the_check(run: Path, tmp_path: Path) -> None:
    trained, model = load_drafter(run, "run"), build_tiny_model()
    same = compare_logits(trained, torch.float32, load_drafter(run, "run"), model)
    assert same.num_slots == 63 * 7
    assert same.num_changed == 0
    changed = load_drafter(run, "run")
    with torch.no_grad():
        changed.layers[0].self_attn.k_norm.weight[0] += 1e-3
    with pytest.raises(ValueError, match="does not give the trained one's logits"):
        compare_logits(trained, torch.float32, changed, model)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["out=x"], "run=null"),
        (["run={run}"], "out=null"),
        (["run={run}", "out={run}"], "exists already"),
        (["run={run}", "out=x", "dtype=int8"], "dtype='int8' is unknown. Allowed: bfloat16, float16, float32"),
        (["run=nowhere/at-all", "out=x"], "neither a run folder"),
        (["run=nowhere/at-all", "out=x", "check=true"], "check=true needs the target"),
    ],
)
def test_what_can_not_be_exported_is_refused(run: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        export_here(*[o.format(run=run) for o in overrides])
