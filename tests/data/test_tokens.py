"""The token dataset: what is written, the ledger, the split, and the cache."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.conversations import JsonlFiles
from dflash.data.tokens import TokenDataset, build_token_datasets, show_sample
from dflash.target.tiny import build_tiny_tokenizer

TOKENIZER = build_tiny_tokenizer()  # one token a character, ChatML, <|mask|>
VOCAB_SIZE = len(TOKENIZER)
MASK_ID = TOKENIZER.mask_token_id


def write_rows(path: Path, rows: list) -> str:
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return str(path)


def build(folder: Path, rows: list, report=lambda text: None, *, vocab_size: int = VOCAB_SIZE, **options):
    path = write_rows(folder / "rows.jsonl", rows)
    return build_token_datasets(
        JsonlFiles(path=path, **{"val_fraction": 0.5, **options}),
        TOKENIZER,
        vocab_size=vocab_size,
        mask_token_id=MASK_ID,
        cache_dir=folder / "cache",
        report=report,
    )


def texts(number: int) -> list[dict]:
    return [{"text": f"text number {i}"} for i in range(number)]


def all_samples(*sides: TokenDataset) -> list:
    return [side.sample(i) for side in sides for i in range(len(side))]


def test_a_sample_comes_back_as_it_was_read(tmp_path):
    rows = [{"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 1, 0, 1], "group": i} for i in range(20)]
    train, val = build(tmp_path, rows)
    assert len(train) + len(val) == 20
    for sample in all_samples(train, val):
        assert sample.input_ids.dtype == np.int32
        assert sample.loss_mask.dtype == np.bool_
        assert sample.input_ids.tolist() == [5, 6, 7, 8, 9]
        assert sample.loss_mask.tolist() == [False, True, True, False, True]
    assert sorted(int(sample.source.rsplit(":", 1)[1]) for sample in all_samples(train, val)) == list(range(1, 21))


def test_lengths_and_anchor_counts_are_those_of_the_samples(tmp_path):
    masks = [[1, 1], [1, 1, 1, 0, 1, 1], [0, 1, 1, 0]] * 10
    rows = [{"input_ids": [4] * len(mask), "loss_mask": mask, "group": i} for i, mask in enumerate(masks)]
    for side in build(tmp_path, rows):
        assert side.lengths.dtype == side.num_anchorable.dtype == np.int64
        for i in range(len(side)):
            mask = side.sample(i).loss_mask.tolist()
            assert side.lengths[i] == len(mask)
            assert side.num_anchorable[i] == sum(mask[t] and mask[t + 1] for t in range(len(mask) - 1))


def test_more_rows_than_one_write_holds_stay_in_order(tmp_path):
    train, val = build(tmp_path, texts(2300))
    for side in (train, val):
        lines = [int(sample.source.rsplit(":", 1)[1]) for sample in all_samples(side)]
        assert lines == sorted(lines)
        assert all(
            f"text number {line - 1}" == TOKENIZER.decode(side.sample(k).input_ids) for k, line in enumerate(lines)
        )
    assert len(train) + len(val) == 2300


GOOD = [
    {"text": "some text"},
    {"prompt": "Q", "response": "A"},
    {"messages": [{"role": "user", "content": "Q2"}, {"role": "assistant", "content": "A2"}]},
    {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
]
BAD = {
    "invalid_json": b"{",
    "not_utf8": b'{"text": "\xff"}',
    "unknown_form": {"answer": 1},
    "unknown_role": {"messages": [{"role": "cat", "content": "meow"}]},
    "no_assistant_turn": {"messages": [{"role": "user", "content": "Q"}]},
    "id_out_of_range": {"input_ids": [5, VOCAB_SIZE], "loss_mask": [1, 1]},
    "loss_mask_length": {"input_ids": [5], "loss_mask": [1, 1]},
    "no_anchor": {"input_ids": [5, 6, 7], "loss_mask": [1, 0, 1]},
}
LONG = {"text": "x" * 200}


@settings(max_examples=30, deadline=None)
@given(
    good=st.lists(st.tuples(st.sampled_from(GOOD), st.integers(0, 6)), min_size=1, max_size=20),
    bad=st.lists(st.sampled_from(sorted(BAD)), max_size=10),
    num_long=st.integers(0, 3),
    over_length=st.sampled_from(["truncate", "drop"]),
    order=st.randoms(use_true_random=False),
)
def test_the_ledger_adds_up_and_no_group_is_on_both_sides(good, bad, num_long, over_length, order):
    rows = [{**row, "group": f"g{group}"} for row, group in good] + [BAD[reason] for reason in bad]
    # Groups whose sides are fixed by the hash, found by trial, so that neither side is empty.
    rows += [{"text": "train side", "group": "a"}, {"text": "val side", "group": "d"}] + [LONG] * num_long
    order.shuffle(rows)
    with tempfile.TemporaryDirectory() as folder:
        train, val = build(Path(folder), rows, on_bad_row="drop", max_length_tokens=100, over_length=over_length)
        ledger = train.info["ledger"]
        dropped_file = train.folder.parent / "dropped.jsonl"
        dropped = [json.loads(line) for line in dropped_file.read_text(encoding="utf-8").splitlines()]
        sides = {
            name: {sample.source for sample in all_samples(side)} for name, side in (("train", train), ("val", val))
        }

    expected_drops = Counter(bad) + Counter({"over_length": num_long if over_length == "drop" else 0})
    assert ledger["conversations"] == len(rows)
    assert ledger["read"] == len(rows)
    assert Counter(ledger["dropped"]) == expected_drops == Counter(entry["reason"] for entry in dropped)
    assert sum(ledger["truncated"].values()) == (num_long if over_length == "truncate" else 0)
    assert len(sides["train"]) + len(sides["val"]) == len(rows) - expected_drops.total()
    assert all(entry["detail"] and re.search(r":\d+$", entry["source"]) for entry in dropped)

    def groups(name: str) -> set:
        kept = (rows[int(source.rsplit(":", 1)[1]) - 1] for source in sides[name])
        return {row.get("group", row.get("text")) for row in kept}

    assert groups("train").isdisjoint(groups("val"))


def test_split_conversations_count_as_so_many_samples(tmp_path, monkeypatch):
    # Only the last answer keeps its thinking, as under Qwen3's template.
    monkeypatch.setattr(
        TOKENIZER,
        "chat_template",
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    turns = [{"role": role, "content": content} for role, content in (("user", "Q"), ("assistant", "t</think>A"))]
    rows = [{"messages": turns * 3, "group": i} for i in range(20)]
    train, val = build(tmp_path, [*rows, b"broken"], on_bad_row="drop")
    ledger = train.info["ledger"]
    assert (ledger["conversations"], ledger["read"], len(train) + len(val)) == (21, 61, 60)
    assert ledger["dropped"] == {"invalid_json": 1}


def test_a_bad_row_stops_the_build_with_file_line_reason_and_the_way_out(tmp_path):
    with pytest.raises(ValueError, match=r"rows\.jsonl:3: message 0 has the role 'cat'(.|\n)*data\.on_bad_row=drop"):
        build(tmp_path, [*texts(2), BAD["unknown_role"]])
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_truncation_cuts_the_end_and_drops_what_has_no_anchor_left(tmp_path):
    rows = [{"input_ids": [4, 5, 6, 7], "loss_mask": [1, 1, 1, 1], "group": i} for i in range(20)]
    rows += [{"input_ids": [4, 5, 6, 7], "loss_mask": [0, 0, 1, 1], "group": i} for i in range(20)]
    train, val = build(tmp_path, rows, max_length_tokens=3)
    assert {tuple(sample.input_ids.tolist()) for sample in all_samples(train, val)} == {(4, 5, 6)}
    assert train.info["ledger"]["dropped"] == {"no_anchor": 20}
    assert sum(train.info["ledger"]["truncated"].values()) == 20


def test_over_length_error_names_row_length_and_options(tmp_path):
    with pytest.raises(ValueError, match=r"rows\.jsonl:3: 200 tokens.*max_length_tokens=150.*truncate or drop"):
        build(tmp_path, [*texts(2), LONG], max_length_tokens=150, over_length="error")


def test_the_mask_token_in_the_data_stops_the_build_whatever_on_bad_row_says(tmp_path):
    rows = [*texts(4), {"prompt": "Q", "response": "fill <|mask|> in"}]
    with pytest.raises(ValueError, match=rf"rows\.jsonl:5: the mask token '<\|mask\|>' \(id {MASK_ID}\)"):
        build(tmp_path, rows, on_bad_row="drop")


def test_max_samples_bounds_the_conversations_read(tmp_path):
    train, val = build(tmp_path, texts(50), max_samples=30)
    assert {int(sample.source.rsplit(":", 1)[1]) for sample in all_samples(train, val)} == set(range(1, 31))


def test_the_side_of_a_conversation_does_not_depend_on_its_company(tmp_path):
    def val_texts(folder: Path, rows: list) -> set[str]:
        folder.mkdir()
        _, val = build(folder, rows)
        return {TOKENIZER.decode(sample.input_ids) for sample in all_samples(val)}

    few, many = val_texts(tmp_path / "few", texts(20)), val_texts(tmp_path / "many", texts(40)[::-1])
    assert few == many & {row["text"] for row in texts(20)}


def test_val_fraction_is_the_share_of_groups_that_validate(tmp_path):
    train, val = build(tmp_path, texts(2000), val_fraction=0.1)
    assert 150 < len(val) < 250  # 200 +- 4 standard deviations
    assert len(train) == 2000 - len(val)


def test_validation_of_its_own_is_used_whole_and_its_groups_leave_training(tmp_path):
    val_path = write_rows(tmp_path / "val.jsonl", texts(3))
    train, val = build(tmp_path, texts(10), val_path=val_path)
    assert len(val) == 3
    assert {TOKENIZER.decode(sample.input_ids) for sample in all_samples(train)} == {
        f"text number {i}" for i in range(3, 10)
    }
    assert train.info["ledger"]["dropped"] == {"also_in_validation": 3}


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"text": "one"}], {}, r"No samples for (train|val)\. .*data\.val_fraction=0\.5"),
        ([], {}, r"No samples for train and val"),
        ([b"{"], {"on_bad_row": "drop"}, r"dropped: invalid_json +1"),
    ],
)
def test_an_empty_side_is_an_error_that_shows_the_ledger(tmp_path, rows, options, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        build(tmp_path, rows, **options)


def test_the_second_build_takes_the_cache_and_says_so_in_one_line(tmp_path, monkeypatch):
    said: list[str] = []
    rows = [*texts(10), b"{"]
    train, val = build(tmp_path, rows, said.append, on_bad_row="drop")
    assert said[0].splitlines()[1:3] == [
        "conversations read                11",
        "samples                           11",
    ]
    monkeypatch.setattr("dflash.data.tokens.parse_row", lambda *_: pytest.fail("rows were read again"))
    again: list[str] = []
    cached_train, _ = build(tmp_path, rows, again.append, on_bad_row="drop")
    assert cached_train.folder == train.folder
    expected = f"11 samples = 10 kept + 0 truncated + 1 dropped (invalid_json 1); train {len(train)}, val {len(val)}"
    assert again == [f"Token dataset from the cache, {train.folder.parent}: {expected}"]


def test_everything_that_changes_the_samples_changes_the_cache(tmp_path, monkeypatch):
    folders = [build(tmp_path, texts(20))[0].folder]
    folders.append(build(tmp_path, texts(21))[0].folder)
    for options in (
        {"max_length_tokens": 5}, {"over_length": "drop"}, {"on_bad_row": "drop"}, {"multi_turn": "last"},
        {"val_fraction": 0.4}, {"max_samples": 15}, {"template_kwargs": {"a": 1}}, {"vocab_size": VOCAB_SIZE + 1},
    ):  # fmt: skip
        folders.append(build(tmp_path, texts(20), **options)[0].folder)
    monkeypatch.setattr(TOKENIZER, "chat_template", TOKENIZER.chat_template + " ")
    folders.append(build(tmp_path, texts(20))[0].folder)
    assert len(set(folders)) == len(folders)


def test_using_a_tokenizer_does_not_change_the_cache(tmp_path):
    first, _ = build(tmp_path, texts(20))
    TOKENIZER(["a", "bcd"], padding=True, truncation=True, max_length=2)
    second, _ = build(tmp_path, texts(20))
    TOKENIZER(["a", "bcd"], padding=False, truncation=False)
    assert first.folder == second.folder


SLOW_BUILD = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, sys.argv[3])
    import test_tokens as here
    from dflash.data import tokens

    parse, count = tokens.parse_row, 0
    def slow_parse(raw, source):
        global count
        count += 1
        if count == int(sys.argv[2]):
            print("reached", flush=True)
            time.sleep(600)
        return parse(raw, source)

    tokens.parse_row = slow_parse
    here.build(Path(sys.argv[1]), here.texts(1500))
"""


def test_a_killed_build_leaves_nothing_that_is_taken_for_complete(tmp_path):
    arguments = [str(tmp_path), "1200", str(Path(__file__).parent)]
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SLOW_BUILD), *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "reached\n"
        process.send_signal(signal.SIGKILL)
    left = list((tmp_path / "cache" / "tokens").iterdir())
    assert len(left) == 1  # the half-made one, so that the kill came in the middle
    train, val = build(tmp_path, texts(1500))
    assert len(train) + len(val) == 1500
    assert train.folder.parent not in left


def test_processes_that_build_the_same_at_once_both_end_with_a_whole_dataset(tmp_path):
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]); import test_tokens as here\n"
        # The rows are there already: written again, the file would be cut under the other reader.
        "here.write_rows = lambda path, rows: str(path)\n"
        "train, val = here.build(Path(sys.argv[1]), []); print(len(train) + len(val))"
    )
    write_rows(tmp_path / "rows.jsonl", texts(1500))
    command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0] for process in processes] == ["1500\n", "1500\n"]
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1


def test_a_build_that_finds_another_finished_before_it_takes_that_one(tmp_path, monkeypatch):
    rename = os.rename
    built: list[Path] = []

    def rename_second(aside, folder):
        if not built:
            built.append(folder)
            build(tmp_path, texts(20))  # the other process, faster
        rename(aside, folder)

    monkeypatch.setattr("dflash.data.tokens.os.rename", rename_second)
    train, val = build(tmp_path, texts(20))
    assert len(train) + len(val) == 20
    assert [path.name for path in (tmp_path / "cache" / "tokens").iterdir()] == [built[0].name]


def test_opening_a_folder_without_a_token_dataset_says_how_to_build_one(tmp_path):
    with pytest.raises(ValueError, match=r"holds no token dataset.*dflash\.prepare"):
        TokenDataset.open(tmp_path)


def test_opening_another_format_says_so(tmp_path):
    train, _ = build(tmp_path, texts(20))
    info = {**train.info, "format_version": 0}
    (train.folder / "info.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match="has the format 0, this version reads"):
        TokenDataset.open(train.folder)


def test_a_sample_is_shown_with_its_mask(tmp_path):
    train, _ = build(tmp_path, [{"prompt": f"Q{i % 10}", "response": "A"} for i in range(20)])
    shown = show_sample(train, TOKENIZER, 0, colour=False)
    assert re.fullmatch(
        r"sample 0 \(.*rows\.jsonl:\d+\): \d+ tokens, 2 supervised, marked ⟦so⟧, 1 anchors\n"
        r"<\|im_start\|>user\nQ\d<\|im_end\|>\n<\|im_start\|>assistant\n⟦A<\|im_end\|>⟧\n",
        shown,
    )
    assert show_sample(train, TOKENIZER, 0, colour=True).replace("\033[32m", "⟦").replace("\033[0m", "⟧") == shown


def test_the_middle_of_a_long_stretch_is_not_shown(tmp_path):
    train, _ = build(tmp_path, [{"text": "a" * 1000 + "b" * 1000, "group": i} for i in range(20)])
    shown = show_sample(train, TOKENIZER, 0, colour=False)
    assert shown.endswith("⟦" + "a" * 300 + " … 1,400 characters … " + "b" * 300 + "⟧")


def test_a_token_dataset_survives_the_trip_to_a_worker_process(tmp_path):
    import pickle

    train, _ = build(tmp_path, texts(20))
    there = pickle.loads(pickle.dumps(train))
    assert there.sample(3).input_ids.tolist() == train.sample(3).input_ids.tolist()
    assert dataclasses.asdict(there.sample(3))["source"] == train.sample(3).source


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("dflash.data.tokens.ROWS_PER_WRITE", 10)
    peaks = []
    for number in (50, 550):
        path = write_rows(tmp_path / f"{number}.jsonl", [{"text": "x" * 2000, "group": i} for i in range(number)])
        data = JsonlFiles(path=path, val_fraction=0.5)
        tracemalloc.start()
        build_token_datasets(data, TOKENIZER, vocab_size=VOCAB_SIZE, mask_token_id=MASK_ID, cache_dir=tmp_path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    kept = 500 * 2000 * 5  # bytes that 500 more samples would take if they were kept: int32 and bool
    assert peaks[1] - peaks[0] < kept / 4
