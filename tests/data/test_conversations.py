"""Every form a row can have, every way it can be damaged, and where rows come from."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash.data.conversations import BadRow, HubDataset, JsonlFiles, parse_row

USER, ASSISTANT = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}


def parse_json(row: object):
    return parse_row(json.dumps(row).encode(), "x.jsonl:1")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"prompt": "Q", "response": "A"},
        {"prompt": "Q", "response": "A", "text": "not this"},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, ASSISTANT], "tools": None},
    ],
)
def test_every_chat_form_gives_the_same_messages(row):
    assert parse_json(row).messages == [USER, ASSISTANT]


def test_sharegpt_names_become_roles():
    turns = [{"from": name, "value": "v"} for name in ("system", "human", "gpt", "tool", "user", "assistant")]
    roles = [message["role"] for message in parse_json({"conversations": turns}).messages]
    assert roles == ["system", "user", "assistant", "tool", "user", "assistant"]


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_json({"messages": [{"role": "user", "content": parts}, ASSISTANT]}).messages[0]["content"] == "ab"


def test_tool_calls_and_tools_in_strings_are_decoded():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    row = {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2"},
        ],
        "tools": '[{"type": "function", "function": {"name": "f"}}]',
    }
    conversation = parse_json(row)
    assert conversation.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    }
    assert conversation.tools == [{"type": "function", "function": {"name": "f"}}]


def test_other_keys_of_a_message_reach_the_template():
    message = {"role": "assistant", "content": "A", "reasoning_content": "because", "name": None}
    expected = {"role": "assistant", "content": "A", "reasoning_content": "because"}
    assert parse_json({"messages": [USER, message]}).messages[1] == expected


def test_tokenised_rows_take_0_and_1_or_truth_values_as_mask():
    conversation = parse_json({"input_ids": [5, 6, 7], "loss_mask": [0, 1, True]})
    assert conversation.input_ids == [5, 6, 7]
    assert conversation.loss_mask == [False, True, True]


@pytest.mark.parametrize(
    ("row", "group"),
    [
        ({"messages": [{"role": "system", "content": "S"}, USER, ASSISTANT], "group": "g"}, "g"),
        ({"messages": [{"role": "system", "content": "S"}, USER, ASSISTANT], "group": 7}, "7"),
        ({"messages": [{"role": "system", "content": "S"}, USER, ASSISTANT]}, "Q"),
        ({"text": "T"}, "T"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1]}, "[1, 2]"),
    ],
)
def test_the_group_is_the_rows_own_else_the_first_user_message_else_the_content(row, group):
    assert parse_json(row).group == group


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], "not_an_object"),
        ({}, "unknown_form"),
        ({"prompt": None, "answer": "A"}, "unknown_form"),
        ({"messages": "Q"}, "messages_type"),
        ({"messages": ["Q", "A"]}, "messages_type"),
        ({"messages": [{"role": "narrator", "content": "Q"}, ASSISTANT]}, "unknown_role"),
        ({"messages": [{"content": "Q"}, ASSISTANT]}, "unknown_role"),
        ({"messages": [{"role": ["user"], "content": "Q"}]}, "unknown_role"),
        ({"conversations": [{"from": "bot", "value": "Q"}]}, "unknown_role"),
        ({"conversations": [{"from": ["human"], "value": "Q"}]}, "unknown_role"),
        ({"messages": [{"role": "user", "content": None}, ASSISTANT]}, "content_type"),
        ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]}, "content_type"),
        ({"messages": [{"role": "user", "content": 3}, ASSISTANT]}, "content_type"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "u"}]}, ASSISTANT]}, "content_part"),
        ({"messages": [{"role": "user", "content": ["Q"]}, ASSISTANT]}, "content_part"),
        ({"messages": [USER, {"role": "assistant", "content": "A", "tool_calls": "f"}]}, "tool_calls_type"),
        ({"messages": [USER, {"role": "assistant", "content": "A", "tool_calls": [{"id": 1}]}]}, "tool_calls_type"),
        ({"messages": [USER, ASSISTANT], "tools": "no json"}, "tools_type"),
        ({"messages": [USER, ASSISTANT], "tools": [1]}, "tools_type"),
        ({"prompt": "Q", "response": 1}, "content_type"),
        ({"text": 1}, "text_type"),
        ({"input_ids": [1, 2]}, "loss_mask_type"),
        ({"loss_mask": [1, 1]}, "input_ids_type"),
        ({"input_ids": [1, 2.0], "loss_mask": [1, 1]}, "input_ids_type"),
        ({"input_ids": [1, True], "loss_mask": [1, 1]}, "input_ids_type"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "loss_mask_type"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask_length"),
        ({"text": "T", "group": [1]}, "group_type"),
        ({"text": "T", "finish_reason": 1}, "finish_reason_type"),
    ],
)
def test_a_damaged_row_names_its_reason_and_what_is_expected(row, reason):
    with pytest.raises(BadRow, match=r"[Ee]xpected") as bad:
        parse_json(row)
    assert bad.value.reason == reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "caf\xe9"}', "not_utf8"),
        (b'{"text": "half', "invalid_json"),
        (b'{"text": 1} {"text": 2}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"text": ' + b"9" * 5000 + b"}", "invalid_json"),
    ],
)
def test_a_broken_line_is_a_bad_row(line, reason):
    with pytest.raises(BadRow) as bad:
        parse_row(line, "x.jsonl:1")
    assert bad.value.reason == reason


def test_byte_order_mark_crlf_and_blank_lines_do_not_disturb_rows_or_line_numbers(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a\\u2028"}\r\n\r\n   \n{"text": "\xe2\x80\xa8b"}\r\n{"text": "c"}')
    rows = [parse_row(raw, source) for source, raw in JsonlFiles(path=str(path)).rows("train")]
    assert [row.text for row in rows] == ["a\u2028", "\u2028b", "c"]
    assert [row.source for row in rows] == [f"{path}:1", f"{path}:4", f"{path}:5"]


def test_parquet_rows_lose_the_nulls_that_arrow_adds_and_are_counted_from_1(tmp_path):
    def called(**arguments):
        return {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": arguments}]}

    path = tmp_path / "chats.parquet"
    pq.write_table(pa.table({"messages": [[USER, called(x=1)], [USER, called(y=2)]], "prompt": ["other", None]}), path)
    rows = [parse_row(raw, source) for source, raw in JsonlFiles(path=str(path)).rows("train")]
    assert [row.messages[1]["tool_calls"] for row in rows] == [
        [{"name": "f", "arguments": {"x": 1}}],
        [{"name": "f", "arguments": {"y": 2}}],
    ]
    assert [row.source for row in rows] == [f"{path}:1", f"{path}:2"]


def test_several_files_are_read_one_after_the_other(tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.ndjson"]
    for path in paths:
        path.write_text(json.dumps({"text": path.name}))
    sources = [source for source, _ in JsonlFiles(path=[str(path) for path in paths]).rows("train")]
    assert sources == [f"{path}:1" for path in paths]


def test_a_file_is_read_line_by_line_not_whole(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 3)
    rows = JsonlFiles(path=str(path)).rows("train")
    next(rows)
    with path.open("a") as file:  # beyond what was buffered, so that only a reader that has not finished sees it
        file.write('{"text": "late"}\n' * 20_000)
    assert sum(1 for _ in rows) == 20_002


def test_a_local_folder_is_read_as_a_hub_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "chats"
    folder.mkdir()
    lines = [json.dumps({"messages": [USER, {"role": "assistant", "content": f"A{i}"}]}) + "\n" for i in range(3)]
    (folder / "train.jsonl").write_text("".join(lines))
    (folder / "test.jsonl").write_text(lines[0])
    data = HubDataset(name=str(folder), split="train[1:]", val_split="test")
    rows = [parse_row(raw, source) for source, raw in data.rows("train")]
    assert [(row.source, row.messages[1]["content"]) for row in rows] == [
        (f"{folder}[train[1:]]:0", "A1"),
        (f"{folder}[train[1:]]:1", "A2"),
    ]
    assert len(list(data.rows("val"))) == 1
    assert data.fingerprint("train") == data.fingerprint("train") != data.fingerprint("val")


def test_a_hub_dataset_that_cannot_be_reached_names_the_option_and_the_way_out(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    data = HubDataset(name="nobody/nothing")
    with pytest.raises(ValueError, match=r"data\.name=nobody/nothing(.|\n)*data=jsonl data\.path="):
        list(data.rows("train"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"path": "missing.jsonl"}, r"data\.path=missing\.jsonl: no such file"),
        ({"path": "chats.csv"}, r"data\.path=chats\.csv.*\.jsonl.*\.parquet"),
        ({"path": []}, r"data\.path=\[\]"),
        ({"path": 3}, r"data\.path=3"),
        ({"val_path": "missing.jsonl"}, r"data\.val_path=missing\.jsonl"),
        ({"on_bad_row": "skip"}, r"data\.on_bad_row='skip'.*error, drop"),
        ({"multi_turn": "all"}, r"data\.multi_turn='all'.*split, last, error"),
        ({"over_length": None}, r"data\.over_length=None.*truncate, drop, error"),
        ({"max_samples": 0}, r"data\.max_samples=0"),
        ({"max_samples": True}, r"data\.max_samples=True"),
        ({"max_length_tokens": 1}, r"data\.max_length_tokens=1"),
        ({"max_length_tokens": "long"}, r"data\.max_length_tokens='long'"),
        ({"template_kwargs": "enable_thinking"}, r"data\.template_kwargs='enable_thinking'"),
        ({"val_fraction": 1.0}, r"data\.val_fraction=1\.0"),
        ({"val_fraction": 0}, r"data\.val_fraction=0"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(tmp_path, options, named):
    good = tmp_path / "a.jsonl"
    good.write_text("")
    with pytest.raises(ValueError, match=named):
        JsonlFiles(**{"path": str(good), **options})
