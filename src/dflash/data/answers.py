"""Conversations whose answers the target itself wrote, kept in a log that survives being killed.

A drafter learns what its target would say, so the training text must be the target's own. Every assistant turn of a
conversation is written anew, in order, with the target's earlier answers as history. Each finished batch becomes one
line of `answers.jsonl`, in a folder named by everything that shapes an answer (target, settings, template arguments)
but not by the set of prompts: asking for more prompts continues the same log. Run:
`python -m dflash.regenerate`.
"""

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash.data.conversations import BadRow, Conversation, DataOptions, RawRow, parse_row
from dflash.data.generation import Answer, AnswerOptions, cut_batches, digest, generate

LOG_NAME = "answers.jsonl"
LOG_VERSION = 1


@dataclass
class AnswerReport:
    """What became of the conversations: num_conversations = num_written + num_left_out."""

    out: Path
    num_conversations: int = 0
    num_written: int = 0
    num_left_out: int = 0  # no turn to answer, or their first answer is empty or its prompt too long
    num_answers: int = 0  # of the conversations, cached ones included
    num_generated: int = 0
    num_cut: int = 0  # ended by max_new_tokens
    num_empty: int = 0
    num_too_long: int = 0  # prompts over max_prompt_tokens
    num_retokenised: int = 0  # their text does not encode to the ids that were generated
    num_shortened: int = 0  # conversations that end before their last turn: no answer, or a cut one, to go on from
    num_torn_lines: int = 0  # half-written last lines of a killed run, removed
    generated_tokens: int = 0
    generation_seconds: float = 0.0

    def __str__(self) -> str:
        speed = self.generated_tokens / self.generation_seconds if self.generation_seconds else 0.0
        lines = [
            f"{self.num_conversations} conversations = {self.num_written} written + {self.num_left_out} left out "
            f"-> {self.out}",
            f"{self.num_answers} answers, {self.num_generated} of them generated now "
            f"({self.generated_tokens} tokens, {speed:.0f} tokens/s)",
            f"cut by the limit {self.num_cut}, empty {self.num_empty}, prompts too long {self.num_too_long}, "
            f"text that encodes to other tokens {self.num_retokenised}, conversations ended early {self.num_shortened}",
        ]
        if self.num_torn_lines:
            lines.append("The log's last line was torn by a killed run: removed, its batch was written again.")
        return "\n".join(lines)


def answers_folder(
    cache_dir: str | Path,
    target_fingerprint: str,
    options: AnswerOptions,
    template_kwargs: dict[str, Any] | None = None,
) -> Path:
    """`<cache_dir>/answers/<fingerprint>`: one folder for everything that shapes an answer, whatever the prompts."""
    shaping = {
        "version": LOG_VERSION,
        "target": target_fingerprint,
        "template_kwargs": template_kwargs or {},
        "max_new_tokens": options.max_new_tokens,
        "temperature": float(options.temperature),
        "seed": options.seed if options.temperature > 0 else None,
    }
    return Path(cache_dir) / "answers" / digest(json.dumps(shaping, sort_keys=True, default=str))


def read_conversations(data: DataOptions) -> tuple[list[Conversation], dict[str, int]]:
    """The training conversations that `data` names, with or without answers, and how many rows were dropped, by reason.

    Raises:
        ValueError: a row that can not be used, under `data.on_bad_row=error`.
    """
    conversations = []
    dropped: Counter[str] = Counter()
    for source, raw in islice(data.rows("train"), data.max_samples):
        try:
            try:
                conversation = parse_row(raw, source)
            except BadRow as bad:
                if bad.reason != "no_assistant_turn":
                    raise
                conversation = parse_row(_with_open_turn(raw), source)
            if conversation.messages is None:
                raise BadRow("no_messages", "the row is no chat, so there is no turn to answer. Expected messages.")
        except BadRow as bad:
            if data.on_bad_row == "error":
                raise ValueError(f"{source}: {bad.detail}\nMend the row, or set data.on_bad_row=drop.") from bad
            dropped[bad.reason] += 1
        else:
            conversations.append(conversation)
    return conversations, dict(dropped)


def _with_open_turn(raw: RawRow) -> RawRow:
    """A row of questions alone, with a blank where the answer goes."""
    row = json.loads(raw) if isinstance(raw, bytes) else raw
    if "messages" in row:
        return row | {"messages": [*row["messages"], {"role": "assistant", "content": ""}]}
    return row | {"conversations": [*row["conversations"], {"from": "gpt", "value": ""}]}


def write_answers(
    conversations: Iterable[Conversation],
    model: PreTrainedModel | Callable[[], PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    options: AnswerOptions,
    folder: str | Path,
    out: str | Path | None = None,
    *,
    template_kwargs: dict[str, Any] | None = None,
) -> AnswerReport:
    """Rewrite every assistant turn of `conversations` and write the result as chat JSONL.

    Args:
        conversations: with `messages`; a last turn without an answer gets one.
        model: the target, or a function that loads it, called only if an answer is missing.
        tokenizer: with a chat template.
        options: how answers are generated.
        folder: of the log, from `answers_folder`. A second process that wants to write there waits.
        out: the chat JSONL; by default in `folder`, named by the set of conversations. It is replaced in one piece.
        template_kwargs: arguments of the chat template (`data.template_kwargs`).

    Raises:
        ValueError: a conversation without messages, one that the template refuses, a prompt beyond the model's
            positions, or a damaged log.
    """
    folder = Path(folder)
    dialogues = [_Dialogue(conversation) for conversation in conversations]
    report = AnswerReport(out=Path(out) if out else folder / f"{_set_fingerprint(dialogues)}.jsonl")
    report.num_conversations = len(dialogues)
    with _only_writer(folder):
        answers, torn_at = read_log(folder / LOG_NAME)
        if torn_at is not None:
            os.truncate(folder / LOG_NAME, torn_at)
            report.num_torn_lines = 1
        # Strictly turn by turn, also where later answers are cached already: a killed run then cuts the very batches
        # that an uninterrupted one would have cut, and rounding in other company cannot change an answer.
        while due := [d for d in dialogues if d.move_to_next_answer()]:
            missing = _missing_prompts(due, tokenizer, answers, options, template_kwargs)
            if missing:
                if not isinstance(model, PreTrainedModel):
                    model = model()
                _generate_missing(missing, model, tokenizer, options, folder / LOG_NAME, answers, report)
            for dialogue in due:
                dialogue.take(answers.get(dialogue.key), options, report)
        _write_chat_jsonl(dialogues, report)
    return report


class _Dialogue:
    """One conversation while its assistant turns are written anew."""

    def __init__(self, conversation: Conversation) -> None:
        if not conversation.messages:
            raise ValueError(f"{conversation.source}: no messages, so there is no turn to answer.")
        self.conversation = conversation
        self.upcoming = list(conversation.messages)
        self.history: list[dict[str, Any]] = []
        self.num_kept = 0  # messages up to the last written answer
        self.finish_reason: str | None = None
        self.key = ""  # of the prompt whose answer is due

    def move_to_next_answer(self) -> bool:
        """Move the messages before the next assistant turn into the history; false where no answer is due any more."""
        if self.finish_reason in ("length", "none"):
            return False
        while self.upcoming:
            message = self.upcoming.pop(0)
            # A tool's reply answers exactly this call: a new one would leave the reply without its question.
            calls_a_tool = message.get("tool_calls") and self.upcoming and self.upcoming[0]["role"] == "tool"
            if message["role"] == "assistant" and not calls_a_tool:
                return True
            self.history.append(message)
        return bool(self.history) and self.history[-1]["role"] not in ("assistant", "system", "developer")

    def render(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None) -> str:
        """The prompt of the due answer, as the chat template writes it; sets `key`."""
        try:
            prompt = tokenizer.apply_chat_template(
                self.history,
                tools=self.conversation.tools,  # type: ignore[arg-type]
                add_generation_prompt=True,
                tokenize=False,
                **(template_kwargs or {}),
            )
        except TemplateError as error:
            raise ValueError(
                f"{self.conversation.source}: the chat template refuses this conversation: {error}"
            ) from error
        assert isinstance(prompt, str)
        self.key = digest(prompt)
        return prompt

    def take(self, answer: Answer | None, options: AnswerOptions, report: AnswerReport) -> None:
        """Go on with the answer; without one, or after half of one, the conversation ends here."""
        too_long = answer is None or answer.num_prompt_tokens > options.max_prompt_tokens
        if answer is None or too_long or answer.is_empty:
            report.num_too_long += too_long
            report.num_empty += not too_long
            report.num_answers += not too_long
            report.num_shortened += self.num_kept > 0
            self.finish_reason = "none"
            return
        report.num_answers += 1
        report.num_cut += answer.finish_reason == "length"
        report.num_retokenised += not answer.same_tokens
        self.history.append({"role": "assistant", "content": answer.text})
        self.num_kept = len(self.history)
        self.finish_reason = answer.finish_reason
        report.num_shortened += answer.finish_reason == "length" and bool(self.upcoming)

    def row(self) -> dict[str, Any]:
        """The line of the chat JSONL."""
        row: dict[str, Any] = {"messages": self.history[: self.num_kept]}
        if self.conversation.tools:
            row["tools"] = self.conversation.tools
        # An answer that is missing was never begun: what is kept ends with a whole one.
        finish_reason = "length" if self.finish_reason == "length" else "stop"
        return row | {
            "group": self.conversation.group,
            "source": self.conversation.source,
            "finish_reason": finish_reason,
        }


def _missing_prompts(
    due: list[_Dialogue],
    tokenizer: PreTrainedTokenizerBase,
    answers: dict[str, Answer],
    options: AnswerOptions,
    template_kwargs: dict[str, Any] | None,
) -> dict[str, list[int]]:
    """Token ids by key of the prompts that are short enough and not in the log; equal prompts are asked once."""
    texts = {}
    for dialogue in due:
        text = dialogue.render(tokenizer, template_kwargs)
        if dialogue.key not in answers:
            texts[dialogue.key] = text
    if not texts:
        return {}
    encoded = tokenizer(list(texts.values()), add_special_tokens=False)["input_ids"]
    return {key: ids for key, ids in zip(texts, encoded, strict=True) if len(ids) <= options.max_prompt_tokens}


def _generate_missing(
    prompts: dict[str, list[int]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: AnswerOptions,
    log: Path,
    answers: dict[str, Answer],
    report: AnswerReport,
) -> None:
    """Generate, append to the log batch by batch, and add to `answers`."""
    longest = max(map(len, prompts.values()))
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions and longest + options.max_new_tokens > positions:
        raise ValueError(
            f"A prompt of {longest} tokens and regenerate.max_new_tokens={options.max_new_tokens} exceed the target's "
            f"{positions} positions. Set regenerate.max_prompt_tokens to {max(positions - options.max_new_tokens, 1)} "
            "or less."
        )
    start = time.perf_counter()
    with log.open("ab") as file, tqdm(total=len(prompts), desc="answers", unit="answer", smoothing=0.1) as bar:
        for batch in cut_batches(prompts, options):
            written = dict(zip(batch, generate([prompts[k] for k in batch], model, tokenizer, options), strict=True))
            # One line a batch: after a kill it is there as a whole or not at all, and the same batches are cut again.
            line = {key: asdict(answer) for key, answer in written.items()}
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            answers |= written
            report.num_generated += len(batch)
            report.generated_tokens += sum(answer.num_tokens for answer in written.values())
            bar.set_postfix_str(
                f"{report.generated_tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False
            )
            bar.update(len(batch))
    report.generation_seconds += time.perf_counter() - start


def read_log(path: Path) -> tuple[dict[str, Answer], int | None]:
    """The answers by key, and the byte at which a half-written last line begins (None: the log is whole).

    Raises:
        ValueError: a damaged line that is not the last one.
    """
    answers: dict[str, Answer] = {}
    if not path.exists():
        return answers, None
    whole_bytes = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("no line end")
                answers |= {key: Answer(**fields) for key, fields in json.loads(line).items()}
            except (ValueError, TypeError, AttributeError) as error:
                if file.read(1):
                    raise ValueError(
                        f"{path}:{number} is damaged ({error}) and is not the last line, so no killed run left it like "
                        "this. Delete that line to have its answers written again."
                    ) from error
                return answers, whole_bytes
            whole_bytes += len(line)
    return answers, None


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the system releases it when the process ends, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Another process is writing answers in {folder}: waiting until it is done ...", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_chat_jsonl(dialogues: list[_Dialogue], report: AnswerReport) -> None:
    report.out.parent.mkdir(parents=True, exist_ok=True)
    partial = report.out.with_name(f"{report.out.name}.partial-{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        for dialogue in dialogues:
            if dialogue.num_kept:
                file.write(json.dumps(dialogue.row(), ensure_ascii=False) + "\n")
                report.num_written += 1
            else:
                report.num_left_out += 1
    os.replace(partial, report.out)


def _set_fingerprint(dialogues: list[_Dialogue]) -> str:
    conversations = [d.conversation for d in dialogues]
    return digest(json.dumps([[c.messages, c.tools, c.group, c.source] for c in conversations], default=str))
