"""`python -m dflash.prepare` as a person runs it."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from dflash.config import CONF_DIR
from dflash.data.conversations import HubDataset, JsonlFiles
from dflash.data.tokens import TokenDataset


def prepare(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dflash.prepare", "target=tiny", "data=jsonl", *overrides]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HYDRA_FULL_ERROR": "0"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)


def write_chats(folder: Path, number: int) -> None:
    lines = [json.dumps({"prompt": f"Q{i}", "response": f"A{i}"}) + "\n" for i in range(number)]
    (folder / "chats.jsonl").write_text("".join(lines))


def test_prepare_prints_ledger_sample_and_the_folder_it_wrote(tmp_path):
    write_chats(tmp_path, 40)
    done = prepare(tmp_path, "data.path=chats.jsonl", "data.val_fraction=0.3", "data.max_samples=30")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.rstrip().splitlines()
    assert lines[1].split() == ["conversations", "read", "30"]
    assert any(line.startswith("⟦A") and line.endswith("<|im_end|>⟧") for line in lines)
    folder = tmp_path / lines[-1]
    assert folder.parent == tmp_path / "outputs" / "cache" / "tokens"
    assert sum(len(TokenDataset.open(folder / split)) for split in ("train", "val")) == 30


def test_prepare_ends_with_the_bad_rows_file_and_line_and_no_traceback_of_ours(tmp_path):
    write_chats(tmp_path, 3)
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.write("{broken\n")
    done = prepare(tmp_path, "data.path=chats.jsonl")
    assert done.returncode == 1
    assert "chats.jsonl:4: the line is not valid JSON" in done.stderr
    assert "data.on_bad_row=drop" in done.stderr


@pytest.mark.parametrize("option", [JsonlFiles, HubDataset])
def test_the_config_shows_every_option_with_the_default_of_its_class(option):
    name = {JsonlFiles: "jsonl", HubDataset: "hub"}[option]
    shown = yaml.safe_load((Path(CONF_DIR) / "data" / f"{name}.yaml").read_text())
    assert shown.pop("_target_") == f"{option.__module__}.{option.__name__}"
    assert shown.pop("_convert_") == "all"
    for field in dataclasses.fields(option):
        default = {} if field.name == "template_kwargs" else field.default
        assert shown.pop(field.name) == ("???" if default is dataclasses.MISSING else default)
    assert shown == {}


def test_template_kwargs_and_lists_of_files_come_from_the_command_line_as_plain_types(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("")
    overrides = ["data=jsonl", f"data.path=[{tmp_path}/a.jsonl,{tmp_path}/b.jsonl]"]
    overrides += ["+data.template_kwargs.enable_thinking=false"]
    with initialize_config_dir(CONF_DIR, version_base=None):
        data = instantiate(compose("prepare", overrides).data)
    assert type(data.path) is list
    assert type(data.template_kwargs) is dict
    assert data.template_kwargs == {"enable_thinking": False}
