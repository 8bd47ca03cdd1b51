"""Embedded prompts: questions about the running Python's own standard library (`data=stdlib_chat`).

Real text without a network. The library's source files are parsed with `ast`, nothing is imported. Short prompts ask
about a public function or method by its qualified name; long ones carry its source, with lengths spread evenly on a
logarithmic scale. The target writes the answers: `python -m dflash.regenerate data=stdlib_chat data.max_samples=700`.
"""

import ast
import dataclasses
import hashlib
import logging
import math
import os
import random
import sys
import sysconfig
import textwrap
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import decode_source
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash.data.answers import answers_folder, read_conversations, write_answers
from dflash.data.conversations import DataOptions, JsonlFiles, RawRow
from dflash.data.generation import AnswerOptions

log = logging.getLogger(__name__)

SKIPPED_FOLDERS = {
    "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data", "site-packages", "dist-packages",
    "lib-dynload",
}  # fmt: skip

SHORT_TEMPLATES = (
    "What does `{name}` do?",
    "What is `{name}` for, and when should I use it?",
    "Explain the parameters of `{signature}` in Python.",
    "Write a short example that uses `{name}`.",
    "What does Python's `{name}` return?",
    "How do I use `{name}` in Python? Please answer in a few sentences.",
    "Which mistakes do people make with `{name}`, and how can they be avoided?",
    "I found `{signature}` in some Python code. Explain to a beginner what it does.",
    "Describe `{name}` from the Python standard library in one paragraph.",
    "How would you test code that calls `{name}`?",
)
LONG_TEMPLATES = (
    "Explain this function from Python's `{module}` module:\n\n```python\n{code}\n```",
    "Here is the source of `{name}`:\n\n```python\n{code}\n```\n\nWhat does it do, step by step?",
    "```python\n{code}\n```\n\nThis is `{name}`. Summarise it in a few sentences.",
    "Review the following code (`{name}`). What could go wrong when it runs?\n\n```python\n{code}\n```",
)

SHORTEST_CODE_CHARS = 160  # a source below this makes no long prompt


@dataclass(frozen=True, kw_only=True)
class StdlibChat(DataOptions):
    """The embedded prompts: `data=stdlib_chat`.

    The rows have no answers yet: `write_answers` has the target write them, and `answered` reads the result.

    Attributes:
        max_samples: how many prompts; more of them begin with the same ones, so that cached answers are used again.
        seed: of choice and order.
        long_fraction: share of prompts that carry a function's source, in 0..1.
        max_code_chars: no source longer than this; code has about 4 characters a token.
    """

    seed: int = 0
    long_fraction: float = 0.2
    max_code_chars: int = 8000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_samples is None:
            raise ValueError(
                "data.max_samples=null: data=stdlib_chat makes as many prompts as it is told, so give a number."
            )
        if type(self.long_fraction) not in (int, float) or not 0 <= self.long_fraction <= 1:
            raise ValueError(
                f"data.long_fraction={self.long_fraction!r} must be a number from 0 (no prompt carries source) to 1 "
                "(each does)."
            )
        if type(self.max_code_chars) is not int or self.max_code_chars < SHORTEST_CODE_CHARS:
            raise ValueError(
                f"data.max_code_chars={self.max_code_chars!r} must be an integer >= {SHORTEST_CODE_CHARS}."
            )

    @property
    def has_val_source(self) -> bool:
        """Never: rows are split by function."""
        return False

    def rows(self, split: str) -> Iterator[tuple[str, RawRow]]:
        """The prompts, as rows that end with the user's turn."""
        assert self.max_samples is not None
        prompts = make_prompts(
            self.max_samples, self.seed, long_fraction=self.long_fraction, max_code_chars=self.max_code_chars
        )
        for prompt in prompts:
            yield prompt.pop("source"), prompt

    def fingerprint(self, split: str) -> list[str]:
        """The Python whose library it is, and the options of the prompts."""
        return [sys.version, str((self.max_samples, self.seed, self.long_fraction, self.max_code_chars))]

    def answered(self, path: str | Path) -> JsonlFiles:
        """The same options for the chat JSONL that `write_answers` made of these prompts."""
        common = {field.name: getattr(self, field.name) for field in dataclasses.fields(DataOptions)}
        return JsonlFiles(path=str(path), **common)


def with_answers(
    data: DataOptions,
    target_model: Callable[[], PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    target_fingerprint: str,
    options: AnswerOptions,
    cache_dir: str | Path,
) -> DataOptions:
    """Data that training can read: `data` itself, or for the embedded prompts those with the target's answers.

    Args:
        data: the config group `data`.
        target_model: loads the target; called only if an answer is missing from the cache.
        tokenizer: the target's.
        target_fingerprint: of the target that answers.
        options: how it answers.
        cache_dir: answers are kept in `<cache_dir>/answers`.
    """
    if not isinstance(data, StdlibChat):
        return data
    conversations, _ = read_conversations(data)
    folder = answers_folder(cache_dir, target_fingerprint, options, data.template_kwargs)
    print(f"{len(conversations):,} embedded prompts; the target's answers are kept in {folder}", flush=True)
    report = write_answers(
        conversations, target_model, tokenizer, options, folder, template_kwargs=data.template_kwargs
    )
    print(report, flush=True)
    return data.answered(report.out)


@dataclass(frozen=True)
class StdlibFunction:
    """A public function or method: the first name under which its body was found."""

    name: str  # qualified: json.decoder.JSONDecoder.decode
    module: str
    signature: str  # the name with its arguments
    code: str  # dedented, decorators included
    source: str  # file:line, relative to the library's folder


def make_prompts(
    num_prompts: int,
    seed: int = 0,
    *,
    long_fraction: float = 0.2,
    max_code_chars: int = 8000,
    stdlib_folder: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Unique prompts, the same for one Python version and seed; fewer prompts are a prefix of more.

    Args:
        num_prompts: how many (`data.max_samples`).
        seed: another seed asks other questions, in another order.
        long_fraction: share of prompts that carry a function's source, in 0..1; it holds in every prefix.
        max_code_chars: functions with a longer source get short questions only.
        stdlib_folder: where the library's .py files are; the running Python's own by default.

    Returns:
        Records `{"messages": [{"role": "user", "content": ...}], "group": ..., "source": ...}`. `group` is the
        function's name: all prompts about one function, under however many names it is found, share it, and so stay on
        one side of a split.

    Raises:
        ValueError: more prompts than exist, an option out of range, or no readable library.
    """
    if num_prompts < 1:
        raise ValueError(f"data.max_samples={num_prompts}: data=stdlib_chat needs at least 1 prompt.")
    if not 0 <= long_fraction <= 1:
        raise ValueError(
            f"data.long_fraction={long_fraction} is no share: set it between 0 (no source) and 1 (always)."
        )
    if max_code_chars < SHORTEST_CODE_CHARS:
        raise ValueError(
            f"data.max_code_chars={max_code_chars} leaves no source to show: at least {SHORTEST_CODE_CHARS}."
        )

    functions = read_functions(Path(stdlib_folder or sysconfig.get_path("stdlib")))
    showable = [f for f in functions if SHORTEST_CODE_CHARS <= len(f.code) <= max_code_chars]
    # The share holds in every prefix: prompt i is long where the running total i * long_fraction passes an integer.
    num_long = math.floor(num_prompts * long_fraction)
    _check_enough(num_prompts - num_long, len(functions) * len(SHORT_TEMPLATES), "short", num_prompts, long_fraction)
    _check_enough(num_long, len(showable) * len(LONG_TEMPLATES), "source-carrying", num_prompts, long_fraction)

    short = _short_prompts(functions, seed)
    long = _long_prompts(showable, seed)
    prompts = []
    for i in range(num_prompts):
        is_long = math.floor((i + 1) * long_fraction) > math.floor(i * long_fraction)
        function, text = next(long if is_long else short)
        prompts.append(
            {"messages": [{"role": "user", "content": text}], "group": function.name, "source": function.source}
        )
    return prompts


def _check_enough(asked: int, available: int, kind: str, num_prompts: int, long_fraction: float) -> None:
    if asked > available:
        raise ValueError(
            f"data.max_samples={num_prompts} with data.long_fraction={long_fraction} asks for {asked} {kind} prompts, "
            f"but this Python's standard library gives {available}. Lower data.max_samples, change data.long_fraction, "
            "or bring your own prompts with data=jsonl data.path=..."
        )


def _short_prompts(functions: tuple[StdlibFunction, ...], seed: int) -> Iterator[tuple[StdlibFunction, str]]:
    """Every (function, template) once; all functions are visited before any is asked about again."""
    order = random.Random(f"short order {seed}").sample(functions, len(functions))
    for visit in range(len(SHORT_TEMPLATES)):
        for function in order:
            yield function, _template(SHORT_TEMPLATES, function, seed, visit).format(**vars(function))


def _long_prompts(functions: list[StdlibFunction], seed: int) -> Iterator[tuple[StdlibFunction, str]]:
    """Every (function, template) once, in each visit the source nearest to a length drawn evenly in log scale."""
    rng = random.Random(f"long order {seed}")
    for visit in range(len(LONG_TEMPLATES)):
        left = sorted(functions, key=lambda f: (len(f.code), f.name))
        shortest, longest = math.log(len(left[0].code)), math.log(len(left[-1].code))
        while left:
            wanted_chars = math.exp(rng.uniform(shortest, longest))
            function = left.pop(min(bisect_left(left, wanted_chars, key=lambda f: len(f.code)), len(left) - 1))
            yield function, _template(LONG_TEMPLATES, function, seed, visit).format(**vars(function))


def _template(templates: tuple[str, ...], function: StdlibFunction, seed: int, visit: int) -> str:
    """Each function goes through the templates in an order of its own."""
    order = list(templates)
    random.Random(f"template {seed} {function.name}").shuffle(order)
    return order[visit]


@cache  # takes seconds, and the library does not change under a running Python
def read_functions(folder: Path) -> tuple[StdlibFunction, ...]:
    """All public functions and methods below `folder`, by file and line; equal arguments and body are one function.

    Raises:
        ValueError: no function found (an embedded Python may come without sources).
    """
    functions: dict[bytes, StdlibFunction] = {}
    names: set[str] = set()
    unreadable = []
    for path in _library_files(folder):
        relative = path.relative_to(folder)
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        try:
            text = decode_source(path.read_bytes())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in old modules
                tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError, ValueError, OSError):
            unreadable.append(str(relative))
            continue
        lines = text.splitlines()
        for node, owner in _definitions(tree, module):
            name = f"{owner}.{node.name}"
            body = hashlib.sha256(_body_text(node, lines).encode()).digest()
            # A name's second definition is a setter, an overload or another platform's version: the same to a reader.
            if name in names or body in functions:
                continue
            names.add(name)
            first_line = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            code = textwrap.dedent("\n".join(lines[first_line - 1 : node.end_lineno]))
            functions[body] = StdlibFunction(
                name, module, f"{name}({ast.unparse(node.args)})", code, f"{relative.as_posix()}:{node.lineno}"
            )
    if unreadable:
        log.info(
            "stdlib_chat: %d files could not be parsed and are left out: %s", len(unreadable), ", ".join(unreadable[:5])
        )
    if not functions:
        raise ValueError(
            f"data=stdlib_chat: no Python source in {folder}. Bring your own prompts with data=jsonl data.path=..."
        )
    return tuple(functions.values())


def _library_files(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith(("_", ".", "config-")))
        for file in sorted(files):
            if file.endswith(".py") and (file == "__init__.py" or not file.startswith("_")):
                yield Path(root, file)


def _definitions(tree: ast.AST, owner: str) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """Public functions with the module or class that holds them; functions inside functions are nobody's interface."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("_"):
                yield node, owner
        elif isinstance(node, ast.ClassDef):
            if not node.name.startswith("_"):
                yield from _definitions(node, f"{owner}.{node.name}")
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _definitions(node, owner)


def _body_text(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str:
    """Arguments and body without the function's name, indentation and comments above the first statement."""
    body = "\n".join(lines[node.body[0].lineno - 1 : node.end_lineno])
    return f"{ast.unparse(node.args)}\n{textwrap.dedent(body)}"
