"""Ten thousand randomly damaged rows: none is lost, none stops the build, memory stays flat."""

import json
import random
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

from dflash.data.conversations import JsonlFiles
from dflash.data.tokens import build_token_datasets
from dflash.target.tiny import build_tiny_tokenizer

NUM_ROWS = 10_000


def sound_row(rng: random.Random, number: int) -> dict[str, Any]:
    answer = "".join(rng.choice("abc def. ") for _ in range(rng.randrange(3, 60)))
    chat = [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": answer}]
    return rng.choice(
        [
            {"messages": chat},
            {"messages": [{"role": "system", "content": "be kind"}, *chat, *chat]},
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": answer}]},
            {"prompt": "q", "response": answer},
            {"text": answer},
            {"input_ids": list(range(4, 20)), "loss_mask": [0] * 6 + [1] * 10},
        ]
    )


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return [(*path, key) for key, _ in items] + [p for key, child in items for p in places(child, (*path, key))]


def damaged(rng: random.Random, row: dict[str, Any]) -> bytes:
    """Some part of the row replaced, removed or repeated, then perhaps some of its bytes."""
    row = json.loads(json.dumps(row))
    if rng.random() < 0.7:
        *parents, last = rng.choice(places(row))
        node: Any = row
        for key in parents:
            node = node[key]
        odd = [None, 0, -1, 1.5, True, "", "x", [], {}, [[]], {"role": "pirate"}, "\u0000", "\ud83d", 10**30, "é" * 40]
        match rng.randrange(3):
            case 0:
                node[last] = rng.choice(odd)
            case 1:
                del node[last]
            case _:
                node[f"{last}?" if isinstance(node, dict) else last] = rng.choice(odd)
    line = json.dumps(row, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.4 and line:
        at = rng.randrange(len(line))
        junk = bytes(rng.randrange(256) for _ in range(rng.randrange(4))).replace(b"\n", b"")
        line = rng.choice([line[:at], line[:at] + junk + line[at + 1 :], line + junk, line[at:]])
    return line.replace(b"\n", b" ")


def build(folder: Path, lines: list[bytes]) -> tuple[dict[str, Any], int, list[dict[str, str]], int]:
    """The ledger, samples on disk, dropped rows, and the peak of Python's memory while building."""
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    data = JsonlFiles(path=str(path), on_bad_row="drop", val_fraction=0.2, max_length_tokens=200)
    tracemalloc.start()
    train, val = build_token_datasets(
        data, build_tiny_tokenizer(), vocab_size=104, mask_token_id=None, cache_dir=folder, report=lambda _: None
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    dropped = [json.loads(line) for line in (train.folder.parent / "dropped.jsonl").read_text().splitlines()]
    return train.info["ledger"], len(train) + len(val), dropped, peak


def test_every_row_is_kept_or_counted_with_its_reason_and_memory_stays_flat(tmp_path: Path) -> None:
    rng = random.Random(0)
    lines = [damaged(rng, sound_row(rng, number)) for number in range(NUM_ROWS)]
    (tmp_path / "half").mkdir()
    half_peak = build(tmp_path / "half", lines[: NUM_ROWS // 2])[3]
    ledger, on_disk, dropped, peak = build(tmp_path, lines)

    assert ledger["conversations"] == sum(1 for line in lines if line.strip())
    assert ledger["read"] == on_disk + len(dropped)
    assert ledger["dropped"] == Counter(row["reason"] for row in dropped)
    assert on_disk > NUM_ROWS // 5, "many rows are still sound"
    assert len(ledger["dropped"]) > 12, "many kinds of damage were met"
    assert all(row["detail"] and row["source"].startswith(str(tmp_path / "rows.jsonl:")) for row in dropped)
    # Both fill the writer's buffer of 1,000 samples; twice the rows would be twice the memory if they were kept.
    assert peak < 1.3 * half_peak
