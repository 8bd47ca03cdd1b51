"""`python -m dflash.evaluate`: what it decodes, what it reports, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from dflash.data.prompts import prompts_of_file
from dflash.data.tokens import TokenDataset
from dflash.drafter.checkpoint import load_drafter
from dflash.drafter.published import write_published
from dflash.evaluate import evaluate
from dflash.target.tiny import build_tiny_model, build_tiny_tokenizer
from tests.commands import compose_config, run_module, scalars, train_here

KEYS = {
    "acceptance_length", "speedup", "lossless", "prompts", "tokens_per_s", "baseline_tokens_per_s",
    "acceptance_by_slot",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    every = ["callbacks.decoding.every_n_steps=4", "callbacks.decoding.num_prompts=2", "max_steps=9"]
    assert train_here(folder, folder / "cache", *every, "callbacks.decoding.max_new_tokens=12") == 0
    return folder


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "drafter"
    write_published(load_drafter(run, "run"), folder, torch.float32)
    return folder


def evaluate_here(out: Path, *overrides: str) -> dict[str, Any]:
    config = compose_config("evaluate", *overrides)
    out.mkdir(exist_ok=True)
    evaluate(config, out)
    return json.loads((out / "evaluate.json").read_text())


def test_the_callback_logs_real_decoding_of_held_out_prompts(run: Path) -> None:
    tags = scalars(run)
    assert [step for step, _ in tags["decode/acceptance_length"]] == [4, 8]
    assert all(1 <= value <= 8 for _, value in tags["decode/acceptance_length"])
    assert all(value > 0 for _, value in tags["decode/speedup"])


def test_a_run_is_decoded_on_its_held_out_prompts(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = evaluate_here(tmp_path, f"run={run}", "num_prompts=3", "max_new_tokens=20")
    screen = capsys.readouterr().out
    assert figures.keys() >= KEYS
    assert (figures["prompts"], figures["lossless"]) == (3, True)
    assert len(figures["acceptance_by_slot"]) == 7
    assert figures["speedup"] == pytest.approx(figures["tokens_per_s"] / figures["baseline_tokens_per_s"])
    assert sum(figures["acceptance_histogram"]) == figures["rounds"]
    assert (tmp_path / "evaluate.png").read_bytes().startswith(b"\x89PNG")
    for row in figures["by_prompt"]:
        assert row["lossless"] == "yes"
        assert row["source"][-31:] in screen
    words = "FASTER than" if figures["speedup"] > 1.01 else "SLOWER than" if figures["speedup"] < 0.99 else "as fast as"
    assert f"decoding with the drafter is {words} the target alone" in screen
    # The prompts are those of the validation side.
    (val_folder,) = (run / "cache" / "tokens").glob("*/val")
    held_out = {TokenDataset.open(val_folder).sample(i).source for i in range(3)}
    assert {row["source"] for row in figures["by_prompt"]} == held_out


def test_a_drafter_trained_packed_and_in_pieces_decodes_losslessly(tmp_path: Path) -> None:
    options = ["sampler=packed", "max_steps=9", "target.prefill_chunk=16", "drafter.checkpoint_activations=true"]
    assert train_here(tmp_path / "run", tmp_path / "cache", "callbacks.decoding=null", *options) == 0
    figures = evaluate_here(tmp_path / "out", f"run={tmp_path / 'run'}", "num_prompts=6", "max_new_tokens=30")
    assert figures["lossless"] is True
    assert figures["acceptance_length"] > 1, "and something of it is accepted"


def test_a_file_of_prompts_is_decoded_from_its_last_question(exported: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "one"}]},
        {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]},
        {"messages": [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
        ]},
    ]  # fmt: skip
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = build_tiny_tokenizer()
    found = [ids for _, ids in prompts_of_file(str(prompts), tokenizer, {})]
    opening = "<|im_start|>assistant\n"
    assert [tokenizer.decode(ids) for ids in found] == [
        f"<|im_start|>user\none<|im_end|>\n{opening}",
        f"<|im_start|>user\none<|im_end|>\n{opening}",
        f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n{opening}",
    ]
    figures = evaluate_here(
        tmp_path / "out", f"run={exported}", "target=tiny", f"prompts={prompts}", "max_new_tokens=10", "block_size=3"
    )
    assert (figures["prompts"], figures["block_size"], len(figures["acceptance_by_slot"])) == (3, 3, 2)
    assert [row["source"] for row in figures["by_prompt"]] == [f"{prompts}:{n}" for n in (1, 2, 3)]
    model = build_tiny_model()
    for row, ids in zip(figures["by_prompt"], found, strict=True):
        theirs = model.generate(torch.tensor([ids]), max_new_tokens=10, do_sample=False, eos_token_id=2)
        assert row["new_tokens"] == theirs.shape[1] - len(ids)
        assert row["prompt_tokens"] == len(ids)


def test_sampled_texts_are_evaluated_without_a_verdict_on_sameness(run: Path, tmp_path: Path) -> None:
    figures = evaluate_here(tmp_path, f"run={run}", "num_prompts=2", "max_new_tokens=8", "temperature=0.8")
    assert figures["lossless"] is None
    assert figures["acceptance_length"] >= 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "run=null: name a run folder"),
        (["run={exported}"], r"could name its target: give target=hf.*\n.*could name its prompts: give prompts="),
        (["run={run}", "prompts=nowhere.jsonl"], "prompts=nowhere.jsonl: no such file"),
        (["run={run}", "num_prompts=0"], "num_prompts=0: expected a whole number of 1 or more"),
        (["run={run}", "max_new_tokens=none"], "max_new_tokens='none'"),
        (["run={run}", "block_size=9", "num_prompts=1"], "block_size=9: expected a whole number from 2 to 8"),
        (["run={run}", "dtype=float99"], "^dtype='float99' is unknown"),
        (["run={run}", "target=hf", "target.name={other}"], "was trained for another target than .*hidden_size 64 in"),
        (["run={run}/checkpoints/none.ckpt"], "found no checkpoint at"),
    ],
)
def test_what_can_not_be_evaluated_is_refused(
    run: Path, exported: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    other = tmp_path / "other"  # its config alone is enough to see it
    LlamaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=104).save_pretrained(other)
    filled = [o.format(run=run, exported=exported, other=other) for o in overrides]
    with pytest.raises(ValueError, match=message):
        evaluate_here(tmp_path, *filled)
    assert not list(tmp_path.glob("evaluate.*"))


def test_the_command_works_from_any_folder(run: Path, tmp_path: Path) -> None:
    result = run_module("evaluate", f"run={run}", "num_prompts=1", "max_new_tokens=5", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (written,) = (tmp_path / "outputs" / "evaluate").glob("*/*/evaluate.json")
    assert json.loads(written.read_text()).keys() >= KEYS
    assert "On this machine decoding with the drafter is" in result.stdout
