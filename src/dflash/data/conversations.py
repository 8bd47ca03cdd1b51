"""Where conversations come from (config group `data`) and how one row becomes a `Conversation`.

Rows are read one after the other, so memory stays flat. A row has one of these forms:

    {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}    chat; `tools` is optional
    {"conversations": [{"from": "human", "value": "..."}, ...]}                 chat, ShareGPT names
    {"prompt": "...", "response": "..."}                                        one user turn, one assistant turn
    {"text": "..."}                                                             plain text, all of it supervised
    {"input_ids": [...], "loss_mask": [...]}                                    tokenised already

and may carry `group` (rows of one group stay on one side of the train/val split) and `finish_reason` (`length`: the
last answer was cut by a limit, so that its end-of-turn token was never written).
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet

RawRow = bytes | dict[str, Any]  # a line of a JSONL file, or a decoded row

ON_BAD_ROW = ("error", "drop")
MULTI_TURN = ("split", "last", "error")
OVER_LENGTH = ("truncate", "drop", "error")
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip


class BadRow(Exception):
    """A row that can not be used.

    Args:
        reason: short snake_case name, under which the ledger counts it.
        detail: what was found and what is expected, for a person.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One usable row: exactly one of `messages`, `text` and `input_ids` (with `loss_mask`) is set.

    Attributes:
        source: `file:line` (JSONL), `file:row` (Parquet), both counted from 1, or `name[split]:row`, counted from 0.
        group: what the train/val split hashes.
        messages: role, content and whatever else the template reads; content is a string.
        tools: the functions the model may call, as JSON schemas.
        finish_reason: `length`: the template's last end-of-turn token was never written by the target.
    """

    source: str
    group: str
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    loss_mask: list[bool] | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class DataOptions(ABC):
    """What every option of the config group `data` has in common; a subclass says where the rows come from.

    Attributes:
        max_samples: conversations read from each source, None for all.
        on_bad_row: `error` stops at the first row that can not be used; `drop` counts and lists them.
        multi_turn: what happens where the chat template rewrites earlier turns (Qwen3 drops their thinking): `split`
            makes a sample of every assistant turn, each rendered as it would be served, `last` one of the final turn,
            `error` stops. Elsewhere a conversation is one sample in which every assistant turn is supervised.
        template_kwargs: handed to the chat template, for example {enable_thinking: false}.
        max_length_tokens: the longest sample.
        over_length: what happens to a longer one: `truncate` cuts its end, `drop` leaves it out, `error` stops.
        val_fraction: share of the groups that validate, in 0..1; not used where validation has a source of its own.

    Raises:
        ValueError: an option of the wrong type or range, named as `data.<key>`.
    """

    max_samples: int | None = None
    on_bad_row: str = "error"
    multi_turn: str = "split"
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_length_tokens: int = 3072
    over_length: str = "truncate"
    val_fraction: float = 0.05

    def __post_init__(self) -> None:
        for key, allowed in (("on_bad_row", ON_BAD_ROW), ("multi_turn", MULTI_TURN), ("over_length", OVER_LENGTH)):
            if getattr(self, key) not in allowed:
                raise ValueError(f"data.{key}={getattr(self, key)!r} is unknown: choose one of {', '.join(allowed)}.")
        if self.max_samples is not None and (type(self.max_samples) is not int or self.max_samples < 1):
            raise ValueError(f"data.max_samples={self.max_samples!r} must be an integer >= 1, or null to read all.")
        # A single token holds no block: an anchor and the token after it are the least.
        if type(self.max_length_tokens) is not int or self.max_length_tokens < 2:
            raise ValueError(f"data.max_length_tokens={self.max_length_tokens!r} must be an integer >= 2.")
        if not isinstance(self.template_kwargs, dict):
            raise ValueError(
                f"data.template_kwargs={self.template_kwargs!r} must be a mapping, for example "
                "data.template_kwargs={enable_thinking: false}."
            )
        if not self.has_val_source and not (isinstance(self.val_fraction, float) and 0 < self.val_fraction < 1):
            raise ValueError(
                f"data.val_fraction={self.val_fraction!r} must be a number between 0 and 1, both excluded: training "
                "measures acceptance on held-out conversations."
            )

    @property
    @abstractmethod
    def has_val_source(self) -> bool:
        """Whether validation has a source of its own; if not, rows("train") are split."""

    @abstractmethod
    def rows(self, split: str) -> Iterator[tuple[str, RawRow]]:
        """(source, raw row) of every row of `split`, "train" or "val"."""

    @abstractmethod
    def fingerprint(self, split: str) -> list[str]:
        """Identity of what `rows(split)` gives."""


@dataclass(frozen=True, kw_only=True)
class JsonlFiles(DataOptions):
    """JSONL files (one JSON object a line, UTF-8) and Parquet files: `data=jsonl`.

    Attributes:
        path: one file or several: .jsonl, .ndjson, .json (JSON lines, too) or .parquet.
        val_path: the same for validation, None to split `path`.
    """

    path: str | list[str]
    val_path: str | list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("path", "val_path") if self.has_val_source else ("path",):
            value = getattr(self, key)
            paths = [value] if isinstance(value, str) else value
            if not isinstance(paths, list) or not paths or not all(isinstance(path, str) and path for path in paths):
                raise ValueError(f"data.{key}={value!r}: expected a file, or a list of files as data.{key}=[a,b].")
            for path in paths:
                if not path.endswith((*JSONL_SUFFIXES, ".parquet")):
                    allowed = ", ".join((*JSONL_SUFFIXES, ".parquet"))
                    raise ValueError(f"data.{key}={path}: unknown kind of file. Its name must end in {allowed}.")
                if not Path(path).is_file():
                    raise ValueError(f"data.{key}={path}: no such file (working folder: {Path.cwd()}).")

    @property
    def has_val_source(self) -> bool:
        """Whether `val_path` is set."""
        return self.val_path is not None

    def _paths(self, split: str) -> list[str]:
        value = self.path if split == "train" else self.val_path
        return [value] if isinstance(value, str) else list(value or ())

    def rows(self, split: str) -> Iterator[tuple[str, RawRow]]:
        """Lines and Parquet rows, file after file."""
        for path in self._paths(split):
            yield from _parquet_rows(path) if path.endswith(".parquet") else _jsonl_rows(path)

    def fingerprint(self, split: str) -> list[str]:
        """SHA-256 of every file."""
        hashes = []
        for path in self._paths(split):
            with open(path, "rb") as file:
                hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
        return hashes


@dataclass(frozen=True, kw_only=True)
class HubDataset(DataOptions):
    """A dataset of the Hugging Face hub, or a local folder that `datasets.load_dataset` reads: `data=hub`.

    Attributes:
        name: hub name or folder.
        subset: the dataset's configuration, None for its default.
        revision: branch, tag or commit.
        split: for example `train` or `train[:10000]`.
        val_split: the same for validation, None to split `split`.
    """

    name: str
    subset: str | None = None
    revision: str | None = None
    split: str = "train"
    val_split: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"data.name={self.name!r}: expected a hub name, for example HuggingFaceH4/no_robots.")

    @property
    def has_val_source(self) -> bool:
        """Whether `val_split` is set."""
        return self.val_split is not None

    def _load(self, split: str) -> datasets.Dataset:
        split_name = self.split if split == "train" else self.val_split
        try:
            return datasets.load_dataset(self.name, self.subset, split=split_name, revision=self.revision)
        except (OSError, ValueError) as error:  # not found, offline, no such subset or split
            raise ValueError(
                f"data.name={self.name} (subset {self.subset or 'default'}, split {split_name}, revision "
                f"{self.revision or 'default'}) can not be loaded: {error}\nCheck the names; without a network, use a "
                "dataset that is cached or a local folder, or data=jsonl data.path=... with your own files."
            ) from error

    def rows(self, split: str) -> Iterator[tuple[str, RawRow]]:
        """The dataset's rows; the source counts from 0, as `dataset[i]` does."""
        name = self.split if split == "train" else self.val_split
        for i, row in enumerate(self._load(split)):
            yield f"{self.name}[{name}]:{i}", row

    def fingerprint(self, split: str) -> list[str]:
        """Name, subset, revision, split, and the fingerprint that `datasets` keeps of the content."""
        return [self.name, str(self.subset), str(self.revision), split, self._load(split)._fingerprint]


def _jsonl_rows(path: str) -> Iterator[tuple[str, bytes]]:
    # Bytes, split at \n alone: decoding belongs to the row, whose line number an error must name.
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield f"{path}:{number}", line


def _parquet_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"data.path={path} is no Parquet file: {error}") from error
    number = 0
    with file:
        for batch in file.iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", row


def parse_row(raw: RawRow, source: str) -> Conversation:
    """The conversation in a row.

    Raises:
        BadRow: the row can not be used.
    """
    # Arrow gives every struct the fields of all: a null there stands for "not in this row".
    row = _decode_json(raw) if isinstance(raw, bytes) else _without_nulls(raw)
    row = {key: value for key, value in row.items() if value is not None}
    finish_reason = row.get("finish_reason")
    if finish_reason is not None and not isinstance(finish_reason, str):
        raise BadRow("finish_reason_type", f"finish_reason is {_kind(finish_reason)}, expected a string.")

    content: dict[str, Any]
    if "input_ids" in row or "loss_mask" in row:
        content = _parse_tokenised(row)
        root = json.dumps(content["input_ids"])
    elif row.keys() & {"messages", "conversations"} or ("prompt" in row and ("response" in row or "text" not in row)):
        content = {"messages": _parse_messages(row), "tools": _parse_tools(row.get("tools"))}
        users = [message["content"] for message in content["messages"] if message["role"] == "user"]
        root = users[0] if users else json.dumps(content["messages"])
    elif "text" in row:
        if not isinstance(row["text"], str):
            raise BadRow("text_type", f"text is {_kind(row['text'])}, expected a string.")
        content = {"text": row["text"]}
        root = row["text"]
    else:
        raise BadRow(
            "unknown_form",
            f"the row has the keys {sorted(row)}. Expected messages, conversations, prompt and response, text, or "
            "input_ids and loss_mask.",
        )
    group = row.get("group", root)
    if type(group) not in (str, int):
        raise BadRow("group_type", f"group is {_kind(group)}, expected a string or an integer.")
    return Conversation(source=source, group=str(group), finish_reason=finish_reason, **content)


def _decode_json(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRow("not_utf8", f"the line is not UTF-8 ({error}). Convert the file to UTF-8.") from error
    except (ValueError, RecursionError) as error:
        raise BadRow(
            "invalid_json", f"the line is not valid JSON ({error}). Expected one JSON object a line."
        ) from error
    if not isinstance(row, dict):
        raise BadRow("not_an_object", f"the line holds {_kind(row)}, expected a JSON object.")
    return row


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _parse_messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    if "messages" in row:
        key, messages = "messages", row["messages"]
    elif "conversations" in row:
        key, messages = "conversations", row["conversations"]
    else:
        key = "prompt"
        messages = [{"role": "user", "content": row["prompt"]}]
        messages += [{"role": "assistant", "content": row["response"]}] if "response" in row else []
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadRow("messages_type", f"{key} is {_kind(messages)}, expected a list of objects.")
    if key == "conversations":
        messages = [_from_sharegpt(message, i) for i, message in enumerate(messages)]
    return [_parse_message(message, i) for i, message in enumerate(messages)]


def _from_sharegpt(message: dict[str, Any], i: int) -> dict[str, Any]:
    sender = message.get("from")
    if not isinstance(sender, str) or sender not in SHAREGPT_ROLES:
        raise BadRow(
            "unknown_role", f"conversations[{i}].from is {sender!r}, expected one of {', '.join(SHAREGPT_ROLES)}."
        )
    return {"role": SHAREGPT_ROLES[sender], "content": message.get("value")}


def _parse_message(message: dict[str, Any], i: int) -> dict[str, Any]:
    # Keys with a null are dropped: templates test whether a key is there. Unknown ones stay: templates may read them.
    message = {key: value for key, value in message.items() if value is not None}
    if message.get("role") not in ROLES:
        raise BadRow(
            "unknown_role", f"message {i} has the role {message.get('role')!r}, expected one of {', '.join(ROLES)}."
        )
    if "tool_calls" in message:
        message["tool_calls"] = _parse_tool_calls(message["tool_calls"], i)
    # An answer that only calls tools comes with null content.
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, list):
        content = "".join(_text_part(part, i) for part in content)
    if not isinstance(content, str):
        raise BadRow(
            "content_type", f"message {i} has {_kind(content)} as content, expected a string or a list of text parts."
        )
    return {**message, "content": content}


def _text_part(part: Any, i: int) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        found = part.get("type") if isinstance(part, dict) else _kind(part)
        raise BadRow(
            "content_part",
            f'message {i} has a content part of type {found}, expected {{"type": "text", "text": "..."}} only.',
        )
    return part["text"]


def _parse_tool_calls(calls: Any, i: int) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadRow("tool_calls_type", f"message {i} has {_kind(calls)} as tool_calls, expected a list.")
    parsed = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow("tool_calls_type", f"message {i} has a tool call without a name, expected one.")
        function = {**function, "arguments": _parsed_json(function.get("arguments", {}))}
        parsed.append({**call, "function": function} if "function" in call else function)
    return parsed


def _parsed_json(value: Any) -> Any:
    """Tool arguments and schemas come as JSON in a string, too; templates (and servers) take them decoded."""
    if isinstance(value, str):
        try:
            decoded = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return decoded if isinstance(decoded, dict | list) else value
    return value


def _parse_tools(tools: Any) -> list[dict[str, Any]] | None:
    tools = _parsed_json(tools)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRow("tools_type", f"tools is {_kind(tools)}, expected a list of JSON schemas.")
    return tools or None


def _parse_tokenised(row: dict[str, Any]) -> dict[str, Any]:
    ids, mask = row.get("input_ids"), row.get("loss_mask")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise BadRow(
            "input_ids_type", f"input_ids is {_kind(ids)}, expected a list of integers (with loss_mask beside it)."
        )
    if not isinstance(mask, list) or not all(type(m) in (int, bool) and m in (0, 1) for m in mask):
        raise BadRow(
            "loss_mask_type", f"loss_mask is {_kind(mask)}, expected a list of 0 and 1 (with input_ids beside it)."
        )
    if len(ids) != len(mask):
        raise BadRow(
            "loss_mask_length", f"input_ids has {len(ids)} entries and loss_mask {len(mask)}, expected as many."
        )
    return {"input_ids": ids, "loss_mask": [bool(m) for m in mask]}


def _kind(value: Any) -> str:
    if value is None:
        return "missing"
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a truth value",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), type(value).__name__) + (f" of {len(value)}" if isinstance(value, list) else "")
