"""The token dataset: Arrow on disk, memory-mapped, with lengths, anchor counts and a ledger of every row's fate.

`build_token_datasets` is the one path from conversations to tokens; `dflash.prepare` and `dflash.train` both take it.
Its result is cached in `<cache_dir>/tokens/<fingerprint>`:

    train/tokens.arrow  val/tokens.arrow     input_ids, loss_mask, length, num_anchorable, source
    train/info.json     val/info.json        fingerprints, options, ledger
    dropped.jsonl                            one line a dropped sample: source, reason, detail
"""

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from types import TracebackType
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from dflash.anchors import valid_anchors
from dflash.data.conversations import BadRow, DataOptions, parse_row
from dflash.data.masks import ConversationTokenizer, TokenIds

FORMAT_VERSION = 1  # raise it when equal inputs give other files: caches made before are then left alone
SPLITS = ("train", "val")
ROWS_PER_WRITE = 1000

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("length", pa.int32()),
        ("num_anchorable", pa.int32()),
        ("source", pa.string()),
    ]
)


@dataclass(frozen=True)
class TokenSample(TokenIds):
    """One sample of a token dataset: input_ids [S] int32, loss_mask [S] bool, and where it comes from."""

    source: str


@dataclass
class Ledger:
    """What became of every sample: read = kept whole + truncated + dropped.

    Attributes:
        conversations: rows read.
        read: samples they gave; a row that gives none (a bad one) counts as one sample, which is dropped.
        kept: whole samples by split.
        truncated: samples cut to the longest allowed length, by split.
        dropped: samples by reason.
    """

    conversations: int = 0
    read: int = 0
    kept: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    truncated: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    dropped: dict[str, int] = field(default_factory=dict)

    def written(self, split: str) -> int:
        """Samples in the dataset of `split`."""
        return self.kept[split] + self.truncated[split]

    def check(self, rows: dict[str, int]) -> None:
        """Compare with the `rows` that really are in each split's file.

        Raises:
            RuntimeError: the books do not balance, which is a fault of this module.
        """
        accounted = sum(self.kept.values()) + sum(self.truncated.values()) + sum(self.dropped.values())
        if self.read != accounted or rows != {split: self.written(split) for split in SPLITS}:
            raise RuntimeError(f"The ledger of the token dataset does not add up: {self}, rows on disk {rows}.")

    def table(self) -> str:
        """For the screen: one line a fate."""
        lines = [("conversations read", self.conversations, ""), ("samples", self.read, "")]
        for name, counts in (("kept whole", self.kept), ("truncated", self.truncated)):
            by_split = ", ".join(f"{split} {counts[split]:,}" for split in SPLITS)
            lines.append((f"  {name}", sum(counts.values()), f"  ({by_split})"))
        lines += [(f"  dropped: {reason}", count, "") for reason, count in sorted(self.dropped.items())]
        width = max(len(name) for name, _, _ in lines)
        return "\n".join(f"{name:<{width}} {count:>12,}{note}" for name, count, note in lines)

    def one_line(self) -> str:
        """The same, shorter."""
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(self.dropped.items()))
        kept, truncated, dropped = (sum(counts.values()) for counts in (self.kept, self.truncated, self.dropped))
        return (
            f"{self.read:,} samples = {kept:,} kept + {truncated:,} truncated + {dropped:,} dropped"
            f"{f' ({reasons})' if reasons else ''}; train {self.written('train'):,}, val {self.written('val'):,}"
        )


class TokenDataset:
    """Samples on disk, memory-mapped.

    Attributes:
        folder: where it lies.
        info: tokenizer and template fingerprints, options and ledger of the build.
    """

    def __init__(self, folder: Path, info: dict[str, Any]) -> None:
        self.folder = folder
        self.info = info
        self._rows = datasets.Dataset.from_file(str(folder / "tokens.arrow")).with_format("arrow")

    @classmethod
    def open(cls, folder: str | Path) -> "TokenDataset":
        """Open `<cache_dir>/tokens/<fingerprint>/train` or `.../val`.

        Raises:
            ValueError: there is no token dataset, or one in another format.
        """
        folder = Path(folder)
        try:
            info = json.loads((folder / "info.json").read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ValueError(f"{folder} holds no token dataset. Build one with `python -m dflash.prepare`.") from error
        if info.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{folder} has the format {info.get('format_version')}, this version reads {FORMAT_VERSION}. Build it "
                "anew with `python -m dflash.prepare`."
            )
        return cls(folder, info)

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every sample, [N] int64."""
        return self._column("length")

    @cached_property
    def num_anchorable(self) -> NDArray[np.int64]:
        """Valid anchors of every sample, [N] int64, each at least 1."""
        return self._column("num_anchorable")

    def _column(self, name: str) -> NDArray[np.int64]:
        return self._rows.data.column(name).to_numpy().astype(np.int64)

    def sample(self, index: int) -> TokenSample:
        """Sample `index` in 0..N-1; the arrays are copies, the caller's own."""
        row = self._rows[index]
        return TokenSample(
            np.array(row["input_ids"][0].values, np.int32),
            np.array(row["loss_mask"][0].values, np.bool_),
            row["source"][0].as_py(),
        )


def build_token_datasets(
    data: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int,
    mask_token_id: int | None,
    cache_dir: str | Path,
    report: Callable[[str], object] = print,
) -> tuple[TokenDataset, TokenDataset]:
    """Train and validation samples of the conversations that `data` names, from the cache if they are there.

    Args:
        data: the config group `data`.
        tokenizer: the target's, a fast one.
        vocab_size: rows of the target's embedding.
        mask_token_id: what the drafter reads as "unknown", so that it must not occur in the data; None: not checked.
        cache_dir: the result lies in `<cache_dir>/tokens/<fingerprint>`.
        report: takes what a person should read: the ledger, or that the cache was used.

    Raises:
        ValueError: a row, an option or the outcome is not usable; the message names it and says what to do.
    """
    settings = _settings(data, tokenizer, vocab_size, mask_token_id)
    fingerprint = _sha256(settings)[:32]
    folder = Path(cache_dir) / "tokens" / fingerprint
    cached = folder.is_dir()
    if not cached:
        _build_aside(folder, data, tokenizer, vocab_size, mask_token_id, {**settings, "fingerprint": fingerprint})
    train, val = (TokenDataset.open(folder / split) for split in SPLITS)
    ledger = Ledger(**train.info["ledger"])
    if cached:
        report(f"Token dataset from the cache, {folder}: {ledger.one_line()}")
    else:
        report(f"Token dataset {folder}\n{ledger.table()}")
        if ledger.dropped:
            report(f"What was dropped, and why: {folder / 'dropped.jsonl'}")
    return train, val


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Identity of what the tokenizer does to a text: vocabulary, merges, added and special tokens; no chat template."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for key in ("padding", "truncation"):  # left behind by the last call, not the tokenizer's own
        backend.pop(key, None)
    return _sha256([backend, tokenizer.special_tokens_map])


def _settings(
    data: DataOptions, tokenizer: PreTrainedTokenizerBase, vocab_size: int, mask_token_id: int | None
) -> dict[str, Any]:
    """Everything that the samples depend on."""
    return {
        "format_version": FORMAT_VERSION,
        "sources": {split: data.fingerprint(split) for split in (SPLITS if data.has_val_source else ("train",))},
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "chat_template": _sha256(tokenizer.chat_template),
        "options": {f.name: getattr(data, f.name) for f in dataclasses.fields(DataOptions)},
        "vocab_size": vocab_size,
        "mask_token_id": mask_token_id,
    }


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _build_aside(
    folder: Path,
    data: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    mask_token_id: int | None,
    settings: dict[str, Any],
) -> None:
    # A folder that bears the final name is complete: a killed build leaves one with a dot, which nobody reads.
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        for split in SPLITS:
            (aside / split).mkdir(parents=True)
        ledger = _write_samples(aside, data, tokenizer, vocab_size, mask_token_id)
        for split in SPLITS:
            info = {**settings, "split": split, "ledger": dataclasses.asdict(ledger)}
            (aside / split / "info.json").write_text(json.dumps(info, indent=2), encoding="utf-8")
        try:
            os.rename(aside, folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, and its samples are the same
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_samples(
    folder: Path, data: DataOptions, tokenizer: PreTrainedTokenizerBase, vocab_size: int, mask_token_id: int | None
) -> Ledger:
    to_samples = ConversationTokenizer(
        tokenizer, vocab_size=vocab_size, multi_turn=data.multi_turn, template_kwargs=data.template_kwargs
    )
    ledger = Ledger()
    val_groups: set[bytes] = set()  # filled only where validation has a source of its own, which is read first
    with ExitStack() as stack:
        writers = {split: stack.enter_context(_ArrowWriter(folder / split / "tokens.arrow")) for split in SPLITS}
        dropped_file = stack.enter_context(open(folder / "dropped.jsonl", "w", encoding="utf-8"))

        def drop(source: str, reason: str, detail: str) -> None:
            ledger.dropped[reason] = ledger.dropped.get(reason, 0) + 1
            dropped_file.write(json.dumps({"source": source, "reason": reason, "detail": detail}) + "\n")

        for read_split, source, raw in _rows(data):
            ledger.conversations += 1
            try:
                conversation = parse_row(raw, source)
                group_hash = hashlib.blake2b(
                    conversation.group.encode("utf-8", "surrogatepass"), digest_size=8
                ).digest()
                samples = to_samples.samples(conversation)
            except BadRow as bad:
                if data.on_bad_row == "error":
                    raise ValueError(
                        f"{source}: {bad.detail}\nMend the row, or set data.on_bad_row=drop to leave such rows out "
                        f"(counted as {bad.reason} and listed in dropped.jsonl)."
                    ) from bad
                ledger.read += 1
                drop(source, bad.reason, bad.detail)
                continue

            split = read_split
            if not data.has_val_source:
                split = "val" if int.from_bytes(group_hash, "big") < data.val_fraction * 2**64 else "train"
            elif read_split == "val":
                val_groups.add(group_hash)
            for sample in samples:
                ledger.read += 1
                if read_split == "train" and group_hash in val_groups:
                    drop(source, "also_in_validation", "the validation data have a conversation of the same group.")
                    continue
                length = sample.input_ids.size
                is_long = length > data.max_length_tokens
                if is_long and data.over_length != "truncate":
                    detail = f"{length} tokens, more than data.max_length_tokens={data.max_length_tokens}."
                    if data.over_length == "error":
                        raise ValueError(f"{source}: {detail} Raise it, or set data.over_length to truncate or drop.")
                    drop(source, "over_length", detail)
                    continue
                sample = TokenIds(
                    sample.input_ids[: data.max_length_tokens], sample.loss_mask[: data.max_length_tokens]
                )
                if not len(valid_anchors(sample.loss_mask)):
                    cut = f" within data.max_length_tokens={data.max_length_tokens}" if is_long else ""
                    drop(source, "no_anchor", f"no two neighbouring supervised tokens{cut}: no block can begin.")
                    continue
                if mask_token_id is not None and mask_token_id in sample.input_ids:
                    raise ValueError(
                        f"{source}: the mask token {tokenizer.decode([mask_token_id])!r} (id {mask_token_id}) occurs "
                        "in the data, but the drafter is to read it as 'unknown'. Set target.mask_token_id to another "
                        "reserved token that never occurs, or take this row out."
                    )
                writers[split].add(sample, source)
                (ledger.truncated if is_long else ledger.kept)[split] += 1

    ledger.check({split: writers[split].num_rows for split in SPLITS})
    _check_sides(ledger, data)
    return ledger


def _rows(data: DataOptions) -> Iterator[tuple[str, str, Any]]:
    for split in ("val", "train") if data.has_val_source else ("train",):
        rows = islice(data.rows(split), data.max_samples)
        for source, raw in tqdm(rows, desc=f"tokenising {split}", unit=" rows", disable=None, total=data.max_samples):
            yield split, source, raw


def _check_sides(ledger: Ledger, data: DataOptions) -> None:
    empty = [split for split in SPLITS if not ledger.written(split)]
    if not empty:
        return
    if data.has_val_source:
        advice = "See below what became of the rows of each source."
    else:
        advice = (
            f"Conversations are split by group with data.val_fraction={data.val_fraction}: change it, bring more "
            "groups, or name validation data of their own (data.val_path=..., data.val_split=...)."
        )
    raise ValueError(f"No samples for {' and '.join(empty)}. {advice}\n{ledger.table()}")


class _ArrowWriter:
    """Writes samples as an Arrow stream, a batch of rows at a time."""

    def __init__(self, path: Path) -> None:
        self.num_rows = 0
        self._pending: list[tuple[TokenIds, str]] = []
        self._stream = pa.ipc.new_stream(str(path), SCHEMA)

    def __enter__(self) -> "_ArrowWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        if kind is None:
            self._flush()
        self._stream.close()

    def add(self, sample: TokenIds, source: str) -> None:
        self._pending.append((sample, source))
        if len(self._pending) == ROWS_PER_WRITE:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        samples, sources = [sample for sample, _ in self._pending], [source for _, source in self._pending]
        lengths = np.array([sample.input_ids.size for sample in samples], np.int32)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        columns = [
            pa.ListArray.from_arrays(offsets, pa.array(np.concatenate([sample.input_ids for sample in samples]))),
            pa.ListArray.from_arrays(offsets, pa.array(np.concatenate([sample.loss_mask for sample in samples]))),
            pa.array(lengths),
            pa.array([len(valid_anchors(sample.loss_mask)) for sample in samples], pa.int32()),
            pa.array(sources, pa.string()),
        ]
        self._stream.write_batch(pa.record_batch(columns, schema=SCHEMA))
        self.num_rows += len(samples)
        self._pending = []


SHOWN_CHARS = 600  # of a stretch of equal mask; the middle of a longer one is left out


def show_sample(
    dataset: TokenDataset, tokenizer: PreTrainedTokenizerBase, index: int = 0, colour: bool | None = None
) -> str:
    """A sample decoded, what is supervised set off: in green, or between ⟦ and ⟧ where stdout is no terminal.

    Args:
        dataset: the token dataset.
        tokenizer: the one that made it.
        index: which sample, in 0..N-1.
        colour: True and False choose between the two.
    """
    sample = dataset.sample(index)
    opening, closing = ("\033[32m", "\033[0m") if (sys.stdout.isatty() if colour is None else colour) else ("⟦", "⟧")
    shown = []
    for supervised, stretch in groupby(
        zip(sample.input_ids, sample.loss_mask, strict=True), key=lambda pair: bool(pair[1])
    ):
        text = str(tokenizer.decode([int(i) for i, _ in stretch], skip_special_tokens=False))
        if len(text) > SHOWN_CHARS:
            half = SHOWN_CHARS // 2
            text = f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"
        shown.append(f"{opening}{text}{closing}" if supervised else text)
    return (
        f"sample {index} ({sample.source}): {sample.input_ids.size} tokens, {int(sample.loss_mask.sum())} supervised, "
        f"marked {opening}so{closing}, {len(valid_anchors(sample.loss_mask))} anchors\n{''.join(shown)}"
    )
