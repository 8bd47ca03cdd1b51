"""Which prompts are decoded, and that none is passed over in silence."""

import json
from pathlib import Path

import pytest

from dflash.data.prompts import left_out_text, prompts_of_file, prompts_of_samples, take_prompts
from dflash.target.tiny import build_tiny_tokenizer
from tests.data.make import token_datasets


def test_a_samples_prompt_is_what_stands_before_its_first_supervised_token(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8, 9, 10], "loss_mask": [0, 0, 1, 1, 0, 1]},
        {"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]},
        {"input_ids": [9, 8, 7], "loss_mask": [0, 1, 1]},
    ]
    _, val = token_datasets(tmp_path, [{"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 1]}], rows)
    assert [ids for _, ids in prompts_of_samples(val)] == [[5, 6], [], [9]]


def test_prompts_that_can_not_be_decoded_are_counted_by_reason() -> None:
    prompts = [("a:1", [1] * 5), ("a:2", []), ("a:3", [1] * 9), ("a:4", [1]), ("a:5", [1] * 9), ("a:6", [1])]
    taken, left_out = take_prompts(prompts, limit=None, longest_tokens=8)
    assert [source for source, _ in taken] == ["a:1", "a:4", "a:6"]
    assert list(left_out.values()) == [["a:2"], ["a:3", "a:5"]]
    text = left_out_text(left_out)
    assert "1 prompts left out, supervised from the first token on: no prompt: a:2" in text
    assert "2 prompts left out, longer than the 8 tokens that leave room to decode: a:3, a:5" in text
    # Those behind the last one taken are not looked at.
    assert take_prompts(prompts, limit=1, longest_tokens=8) == ([("a:1", [1] * 5)], {})
    assert take_prompts(prompts, limit=None, longest_tokens=None)[0][1][0] == "a:3"


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("prompts.txt", {"messages": []}, r"prompts=.*prompts\.txt: expected a chat file that ends in \.jsonl"),
        ("p.jsonl", {"messages": [{"role": "assistant", "content": "hi"}]}, r"p\.jsonl:1: there is no turn before"),
        ("p.jsonl", {"text": "no chat"}, r"p\.jsonl:1: .*no chat"),
    ],
)
def test_a_file_without_questions_is_refused_by_line(tmp_path: Path, name: str, row: object, message: str) -> None:
    (tmp_path / name).write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message):
        list(prompts_of_file(str(tmp_path / name), build_tiny_tokenizer(), {}))
