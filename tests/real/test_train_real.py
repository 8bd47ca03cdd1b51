"""A few steps on the real small LLM: its own text is learned, its weights stay what they are."""

import json
from pathlib import Path

import pytest

from tests.commands import train_here

ANSWERS = [
    ("What is a list in Python?", "A list is an ordered collection of items. Lists are mutable."),
    ("What is a tuple in Python?", "A tuple is an ordered collection of items. Tuples are immutable."),
    ("What is a set in Python?", "A set is an unordered collection of unique items. Sets are mutable."),
    ("What is a dict in Python?", "A dict is a collection of keys and values. Dicts are mutable."),
]


@pytest.mark.real
def test_validation_loss_falls_on_the_real_llm(cache_dir: Path, tmp_path: Path) -> None:
    for name, count in (("train", 4), ("val", 2)):
        rows = [
            {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}], "group": f"{name} {q}"}
            for q, a in ANSWERS[:count]
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    exit_code = train_here(
        tmp_path / "run", cache_dir, "target=smollm2", "data=jsonl", f"data.path={tmp_path / 'train.jsonl'}",
        f"data.val_path={tmp_path / 'val.jsonl'}", "drafter.target_layer_ids=[1,14,27]", "max_steps=6",
        "trainer.num_threads=2", start_from=[],
    )  # fmt: skip
    assert exit_code == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["validation"]["trained"]["loss"] < 0.8 * summary["validation"]["untrained"]["loss"]
    assert summary["real_tokens"] > 0
