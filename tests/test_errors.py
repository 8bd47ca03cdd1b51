"""Mistakes in values and in data: each ends before the target's weights are loaded, and nothing is written."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dflash.drafter.config import DrafterOptions, drafter_config
from dflash.drafter.network import DFlashDrafter
from dflash.drafter.published import write_published
from tests.commands import train_here
from tests.models import ARCHITECTURES

TINY = [
    "target=tiny", "data=jsonl", "data.val_fraction=0.2", "drafter.num_layers=1", "drafter.target_layer_ids=[0,1]",
    "batch.token_budget=512", "batch.anchors_per_sample=4", "max_steps=2", "trainer.num_threads=1",
    "callbacks.decoding=null", "validate_untrained=false",
]  # fmt: skip
LONGEST = 17  # line of the longest conversation


def conversation(number: int) -> str:
    answer = "y" * (200 if number == LONGEST else 20 + number)
    turns = [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns})


LINES = [conversation(number) for number in range(1, 41)]


@pytest.fixture
def unread_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*args: object, **kwargs: object) -> None:
        pytest.fail("the target's weights were loaded")

    monkeypatch.setattr("dflash.target.loading.load_causal_lm", loaded)


def write(path: Path, content: bytes | None = None) -> Path:
    path.write_bytes("\n".join(LINES).encode() if content is None else content)
    return path


def check_refused(folder: Path, data: Path, *overrides: str, message: str) -> None:
    run_folder = folder / "run"
    with pytest.raises(ValueError, match=message):
        train_here(run_folder, folder / "cache", f"data.path={data}", *overrides, start_from=TINY)
    assert list(run_folder.iterdir()) == []


@pytest.mark.usefixtures("unread_weights")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampler.width=abc", r"sampler\.width='abc' must be a number > 1"),
        ("sampler.width=0.9", r"sampler\.width=0\.9 must be a number > 1"),
        ("sampler.width=null", r"sampler\.width=None must be a number > 1"),
        (
            "batch.token_budget=10",
            r"batch\.token_budget=10 is smaller than batch\.pad_multiple=16: .* Raise batch\.tok",
        ),
        ("batch.token_budget=1e3", r"batch\.token_budget=1000\.0: expected a whole number .* Did you mean 1000\?"),
        ("batch.anchor_budget=3", r"batch\.anchors_per_sample=4 is more than batch\.anchor_budget=3: .* Lower batch\."),
        ("placement.cache_gib=-1", r"placement\.cache_gib=-1: expected a number of 0 or more"),
        ("optimizer.warmup_fraction=2", r"optimizer\.warmup_fraction=2: expected a number in 0\.\.1"),
        ("optimizer.optimizer.lr=-1", r"Invalid learning rate: -1"),
        ("spikes.skip=maybe", r"spikes\.skip='maybe'"),
        ("objective.gamma=0", r"objective\.gamma=0: expected a number above 0"),
    ],
)
def test_a_wrong_value(override: str, message: str, tmp_path: Path) -> None:
    check_refused(tmp_path, write(tmp_path / "chats.jsonl"), override, message=message)


@pytest.mark.usefixtures("unread_weights")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: b"", r"(?s)No samples for train and val.*conversations read +0"),
        (lambda lines: b"\n".join([*lines[:4], b'{"messages": [', *lines[4:]]), r"chats\.jsonl:5: .*JSON"),
        (lambda lines: b"\n".join([*lines[:6], b'{"text": "caf\xe9"}']), r"chats\.jsonl:7: .*UTF-8"),
        (
            lambda lines: b"\n".join([lines[0], lines[1].replace(b'"assistant"', b'"asistant"')]),
            r"chats\.jsonl:2: .*'asistant'.*(?s:.*)data\.on_bad_row=drop",
        ),
        (
            lambda lines: b"\n".join([lines[0], lines[1].replace(b'"assistant"', b'"user"')]),
            r"chats\.jsonl:2: .*assistant",
        ),
    ],
    ids=["an empty file", "a broken line", "bytes that are no UTF-8", "an unknown role", "no assistant turn"],
)
def test_damaged_data(damage: Callable[[list[bytes]], bytes], message: str, tmp_path: Path) -> None:
    data = write(tmp_path / "chats.jsonl", damage([line.encode() for line in LINES]))
    check_refused(tmp_path, data, message=message)


@pytest.mark.usefixtures("unread_weights")
def test_a_missing_file(tmp_path: Path) -> None:
    check_refused(tmp_path, tmp_path / "chats.jsonl", message=r"data\.path=.*chats\.jsonl: no such file")


@pytest.mark.usefixtures("unread_weights")
def test_over_long_samples_where_they_are_an_error(tmp_path: Path) -> None:
    data = write(tmp_path / "chats.jsonl")
    over = ["data.max_length_tokens=150", "data.over_length=error"]
    check_refused(
        tmp_path, data, *over, message=rf"chats\.jsonl:{LONGEST}: 2\d\d tokens, more than data\.max_length_to"
    )
    message = rf"1 of \d+ samples do not fit into batch\.token_budget=128 .* The longest is .*chats\.jsonl:{LONGEST}"
    check_refused(tmp_path, data, "batch.token_budget=128", message=message)


@pytest.mark.usefixtures("unread_weights")
def test_a_held_out_sample_over_the_budget(tmp_path: Path) -> None:
    data, held_out = write(tmp_path / "chats.jsonl", conversation(99).encode()), write(tmp_path / "held_out.jsonl")
    overrides = [f"data.val_path={held_out}", "batch.token_budget=128"]
    check_refused(tmp_path, data, *overrides, message=rf"The longest is .*held_out\.jsonl:{LONGEST}")


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        (["data.max_length_tokens=150"], r"truncated +1 "),
        (["data.max_length_tokens=150", "data.over_length=drop"], r"dropped: over_length +1\b"),
        (["batch.token_budget=128", "batch.too_long=drop"], r"'dropped': \{'too_long': 1\}"),
        (["batch.token_budget=128", "batch.too_long=truncate"], r"'truncated': 1\}"),
        (["batch.token_budget=128", "batch.too_long=alone"], r"'emitted': 39, 'dropped': \{\}, 'truncated': 0\}"),
    ],
)
def test_over_long_samples_under_each_policy_are_counted(
    overrides: list[str], shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Validation has a file of its own without the long sample, which would be judged by the same policy.
    data, held_out = write(tmp_path / "chats.jsonl"), write(tmp_path / "held_out.jsonl", LINES[2].encode())
    paths = [f"data.path={data}", f"data.val_path={held_out}"]
    train_here(tmp_path / "run", tmp_path / "cache", *paths, *overrides, start_from=TINY)
    assert re.search(shown, capsys.readouterr().out)


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    data = write(tmp_path / "chats.jsonl", b"\xef\xbb\xbf" + "\r\n".join(LINES).encode())
    assert train_here(tmp_path / "run", tmp_path / "cache", f"data.path={data}", start_from=TINY) == 0


@pytest.mark.usefixtures("unread_weights")
def test_a_target_that_is_nowhere(tmp_path: Path) -> None:
    data = write(tmp_path / "chats.jsonl")
    message = r"target\.name='nobody/nothing' .*is neither a folder with a model nor a hub model that is cached"
    check_refused(tmp_path, data, "target=hf", "target.name=nobody/nothing", message=message)


@pytest.mark.usefixtures("unread_weights")
def test_an_export_for_another_hidden_size(tmp_path: Path) -> None:
    options = DrafterOptions(block_size=8, num_layers=1, num_captured=2, target_layer_ids=[0, 1])
    write_published(
        DFlashDrafter(drafter_config(options, ARCHITECTURES["llama"], mask_token_id=3)), tmp_path / "out", torch.float32
    )
    message = r"init_from=.*its drafter is another: .*hidden_norm\.weight"
    check_refused(tmp_path, write(tmp_path / "chats.jsonl"), f"init_from={tmp_path / 'out'}", message=message)


@pytest.mark.usefixtures("unread_weights")
def test_no_room_for_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    message = r"run: 0\.00 GiB are free on this disk, and the checkpoints of a drafter of .* Make room, or write"
    check_refused(tmp_path, write(tmp_path / "chats.jsonl"), message=message)


def test_resuming_ends_before_the_weights_are_loaded(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_folder = tmp_path / "run"
    train_here(run_folder, cache_dir, "stop_after_steps=1")
    kept = {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
    checkpoint, config = run_folder / "checkpoints" / "last.ckpt", run_folder / "config.yaml"
    monkeypatch.setattr("dflash.target.loading.load_causal_lm", lambda *args: pytest.fail("the weights were loaded"))
    config.write_text(config.read_text().replace("token_budget: 2048", "token_budget: 1536"))
    with pytest.raises(ValueError, match=r"the plan of epoch 0 is not the one the checkpoint was made with"):
        train_here(run_folder, cache_dir, f"resume_from={run_folder}")
    config.write_bytes(kept[config])
    checkpoint.unlink()
    with pytest.raises(ValueError, match=r"resume_from=.*found no checkpoint at .*last\.ckpt"):
        train_here(run_folder, cache_dir, f"resume_from={run_folder}")
    checkpoint.write_bytes(kept[checkpoint])
    assert {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()} == kept
