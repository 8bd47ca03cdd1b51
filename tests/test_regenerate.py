"""Answers written by the target (dflash.data.answers, dflash.data.generation) and the command around them."""

import fcntl
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash.data.answers import (
    AnswerReport,
    answers_folder,
    read_conversations,
    read_log,
    write_answers,
)
from dflash.data.conversations import Conversation, JsonlFiles, parse_row
from dflash.data.generation import AnswerOptions, cut_batches
from dflash.target.tiny import build_tiny_model, build_tiny_tokenizer

OPTIONS = AnswerOptions(max_new_tokens=12, max_batch_prompts=3)
QUESTIONS = [f"Say {word} and then stop" * repeats for repeats in (1, 2, 5) for word in ("a", "bcd", "hello", "x y z")]


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on so small a model, more of them only wait for each other
    yield build_tiny_model().eval()
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tiny_tokenizer()


def ask(*questions: str) -> list[Conversation]:
    return [
        Conversation(source=f"questions:{i}", group=question, messages=[{"role": "user", "content": question}])
        for i, question in enumerate(questions)
    ]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def answer_alone(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], max_new_tokens: int
) -> tuple[str, str]:
    """Text and finish reason of a batch of one, token by token, without a cache, padding or generate()."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    ids = list(prompt)
    for _ in range(max_new_tokens):
        with torch.no_grad():
            token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        if token == tokenizer.eos_token_id:
            return tokenizer.decode(ids[len(prompt) :]), "stop"
        ids.append(token)
    return tokenizer.decode(ids[len(prompt) :]), "length"


def script(
    monkeypatch: pytest.MonkeyPatch,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    reply: Callable[[str], str],
) -> list[list[str]]:
    """Let the model write `reply(prompt)`; returns the batches of prompts it is asked, as they come."""
    asked: list[list[str]] = []

    def generate(input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
        asked.append([tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(input_ids, attention_mask, strict=True)])
        texts = [tokenizer.encode(reply(prompt), add_special_tokens=False) for prompt in asked[-1]]
        width = max(map(len, texts))
        padded = [ids + [tokenizer.eos_token_id] * (width - len(ids)) for ids in texts]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)

    monkeypatch.setattr(model, "generate", generate)
    return asked


def fail_after(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, num_batches: int) -> None:
    """Have the model die, as by a kill, when it is asked for one batch more."""
    generate, calls = model.generate, iter(range(num_batches))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return generate(*args, **kwargs)

    monkeypatch.setattr(model, "generate", failing)


def never_called() -> PreTrainedModel:
    raise AssertionError("the model was loaded although every answer is cached")


def test_batched_answers_equal_those_of_each_prompt_alone(
    tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    report = write_answers(ask(*QUESTIONS), model, tokenizer, replace(OPTIONS, max_batch_prompts=5), tmp_path)
    found = {row["group"]: (row["messages"][-1]["content"], row["finish_reason"]) for row in rows(report.out)}
    alone = {q: answer_alone(model, tokenizer, [{"role": "user", "content": q}], 12) for q in QUESTIONS}
    assert found == {question: answer for question, answer in alone.items() if answer[0].strip()}
    assert {reason for _, reason in found.values()} == {"stop", "length"}  # both kinds were put to the test


def test_penalties_and_sampling_of_a_published_generation_config_are_not_used(
    tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    plain = write_answers(ask(*QUESTIONS), model, tokenizer, OPTIONS, tmp_path / "plain").out.read_bytes()
    model.generation_config.update(do_sample=True, temperature=3.0, repetition_penalty=5.0, no_repeat_ngram_size=1)
    assert write_answers(ask(*QUESTIONS), model, tokenizer, OPTIONS, tmp_path / "b").out.read_bytes() == plain


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_batches", [0, 1, 3])
def test_a_killed_run_continues_and_ends_with_the_same_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_batches: int,
    temperature: float,
) -> None:
    options = replace(OPTIONS, temperature=temperature)
    whole = write_answers(ask(*QUESTIONS), model, tokenizer, options, tmp_path / "whole")
    with monkeypatch.context() as patch:
        fail_after(patch, model, num_batches)
        with pytest.raises(KeyboardInterrupt):
            write_answers(ask(*QUESTIONS), model, tokenizer, options, tmp_path / "killed")
    assert not (tmp_path / "killed" / whole.out.name).exists()

    continued = write_answers(ask(*QUESTIONS), model, tokenizer, options, tmp_path / "killed")
    assert continued.num_generated == len(QUESTIONS) - 3 * num_batches
    assert continued.out.read_bytes() == whole.out.read_bytes()


def test_a_line_torn_by_a_kill_is_cut_and_its_batch_written_again(
    tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    whole = write_answers(ask(*QUESTIONS), model, tokenizer, OPTIONS, tmp_path)
    expected, log = whole.out.read_bytes(), tmp_path / "answers.jsonl"
    whole_log = log.read_bytes()
    log.write_bytes(whole_log[:-40])
    whole.out.unlink()

    report = write_answers(ask(*QUESTIONS), model, tokenizer, OPTIONS, tmp_path)
    assert (report.num_torn_lines, report.num_generated) == (1, 3)
    assert report.out.read_bytes() == expected
    assert log.read_bytes() == whole_log


def test_a_damaged_line_in_the_middle_of_the_log_is_an_error_that_names_it(
    tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    write_answers(ask(*QUESTIONS), model, tokenizer, OPTIONS, tmp_path)
    log = tmp_path / "answers.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(lines[0] + lines[1][:-9] + b"\n" + b"".join(lines[2:]))
    with pytest.raises(ValueError, match=r"answers\.jsonl:2 is damaged"):
        write_answers(ask(*QUESTIONS), never_called, tokenizer, OPTIONS, tmp_path)


def test_a_second_run_does_not_load_the_model(
    tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    first = write_answers(ask(*QUESTIONS), lambda: model, tokenizer, OPTIONS, tmp_path)
    content = first.out.read_bytes()
    second = write_answers(ask(*QUESTIONS), never_called, tokenizer, OPTIONS, tmp_path)
    assert (second.num_generated, second.out.read_bytes()) == (0, content)


def test_more_prompts_generate_only_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    asked = script(monkeypatch, model, tokenizer, lambda prompt: "Yes.")
    few = write_answers(ask("one", "two"), model, tokenizer, OPTIONS, tmp_path)
    asked.clear()
    more = write_answers(ask("one", "two", "three"), model, tokenizer, OPTIONS, tmp_path)
    assert ["three" in prompt for batch in asked for prompt in batch] == [True]
    assert few.out != more.out
    assert [row["group"] for row in rows(more.out)] == ["one", "two", "three"]


def test_equal_prompts_are_answered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    asked = script(monkeypatch, model, tokenizer, lambda prompt: "Yes.")
    report = write_answers(ask("same", "same"), model, tokenizer, OPTIONS, tmp_path)
    assert sum(map(len, asked)) == 1
    assert len(rows(report.out)) == 2


def test_every_assistant_turn_is_rewritten_in_order_on_the_targets_own_history(
    tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    old = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "First question"},
        {"role": "assistant", "content": "OLD"},
        {"role": "tool", "content": "tool result"},
        {"role": "assistant", "content": "OLD"},
        {"role": "user", "content": "Last question"},
    ]
    options = replace(OPTIONS, max_new_tokens=60)
    expected: list[dict[str, Any]] = []
    for message in old:
        if message["role"] == "assistant":
            text, reason = answer_alone(model, tokenizer, expected, 60)
            assert reason == "stop"  # else the conversation would end here
            expected.append({"role": "assistant", "content": text})
        else:
            expected.append(message)
    expected.append({"role": "assistant", "content": answer_alone(model, tokenizer, expected, 60)[0]})

    conversation = Conversation(source="file:1", group="g", messages=old)
    report = write_answers([conversation, *ask(*QUESTIONS)], model, tokenizer, options, tmp_path)
    assert rows(report.out)[0]["messages"] == expected


def test_a_tool_call_that_the_next_message_answers_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    script(monkeypatch, model, tokenizer, lambda prompt: "Yes.")
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = [
        {"role": "user", "content": "u"},
        call,
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "OLD"},
    ]
    tools = [{"name": "f"}]
    conversation = Conversation(source="file:1", group="g", messages=messages, tools=tools)
    (row,) = rows(write_answers([conversation], model, tokenizer, OPTIONS, tmp_path).out)
    assert row["messages"] == [*messages[:3], {"role": "assistant", "content": "Yes."}]
    assert row["tools"] == tools


def test_a_conversation_ends_at_its_first_cut_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The next turn would be an answer to half a sentence, whose end the target never wrote."""
    script(monkeypatch, model, tokenizer, lambda prompt: "abcdefghijkl" if "again" in prompt else "Yes.<|im_end|>")
    messages = [{"role": role, "content": text} for text in ("hi", "again", "more") for role in ("user", "assistant")]
    conversation = Conversation(source="file:1", group="g", messages=messages)
    report = write_answers([conversation], model, tokenizer, OPTIONS, tmp_path)
    (row,) = rows(report.out)
    assert [m["content"] for m in row["messages"]] == ["hi", "Yes.", "again", "abcdefghijkl"]
    assert row["finish_reason"] == "length"
    assert (report.num_cut, report.num_shortened, report.num_answers) == (1, 1, 2)


def test_empty_answers_stay_in_the_log_and_out_of_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    script(monkeypatch, model, tokenizer, lambda prompt: "\n<|im_end|>" if "silence" in prompt else "Yes.<|im_end|>")
    report = write_answers(ask("silence", "speak"), model, tokenizer, OPTIONS, tmp_path)
    assert [row["group"] for row in rows(report.out)] == ["speak"]
    assert (report.num_conversations, report.num_written, report.num_left_out, report.num_empty) == (2, 1, 1, 1)
    assert sorted(answer.text for answer in read_log(tmp_path / "answers.jsonl")[0].values()) == ["\n", "Yes."]


def test_prompts_over_the_limit_are_counted_and_never_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    asked = script(monkeypatch, model, tokenizer, lambda prompt: "Yes.")
    options = replace(OPTIONS, max_prompt_tokens=60)
    report = write_answers(ask("short", "long" * 60), model, tokenizer, options, tmp_path)
    assert sum(map(len, asked)) == 1
    assert (report.num_too_long, report.num_written) == (1, 1)


def test_only_the_end_of_turn_token_is_taken_off_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    script(monkeypatch, model, tokenizer, lambda prompt: " a , b <|mask|>\n\n<|im_end|>")
    report = write_answers(ask("q"), model, tokenizer, OPTIONS, tmp_path)
    (row,) = rows(report.out)
    assert row["messages"][-1]["content"] == " a , b <|mask|>\n\n"
    assert (row["finish_reason"], report.num_retokenised) == ("stop", 0)


def test_answers_whose_text_encodes_to_other_tokens_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    def generate(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        pieces = ["<", "|", "m", "a", "s", "k", "|", ">"]  # eight tokens whose text is one
        return torch.cat([input_ids, torch.tensor([tokenizer.convert_tokens_to_ids(pieces)])], dim=1)

    monkeypatch.setattr(model, "generate", generate)
    report = write_answers(ask("q"), model, tokenizer, OPTIONS, tmp_path)
    assert (report.num_retokenised, report.generated_tokens, report.num_cut) == (1, 8, 1)


def test_the_result_is_what_the_data_path_reads(
    tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    out = tmp_path / "result" / "answers.jsonl"
    report = write_answers(ask(*QUESTIONS), model, tokenizer, OPTIONS, tmp_path, out)
    read = [parse_row(raw, source) for source, raw in JsonlFiles(path=str(out)).rows("train")]
    assert len(read) == report.num_written > 0
    for conversation, row in zip(read, rows(out), strict=True):
        assert (conversation.messages, conversation.group) == (row["messages"], row["group"])
        assert conversation.finish_reason == row["finish_reason"]


def test_a_second_writer_waits_for_the_first(
    tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    reports: list[AnswerReport] = []
    writer = threading.Thread(
        target=lambda: reports.append(write_answers(ask("q"), model, tokenizer, OPTIONS, tmp_path)), daemon=True
    )
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        writer.start()
        writer.join(timeout=1.0)
        assert writer.is_alive()
        assert not (tmp_path / "answers.jsonl").exists()
    writer.join(timeout=60)
    assert reports[0].num_answers == 1


@given(
    lengths=st.lists(st.integers(1, 300), max_size=60),
    max_batch_prompts=st.integers(1, 10),
    batch_token_budget=st.integers(1, 1500),
)
def test_batches_hold_every_prompt_once_within_both_bounds(
    lengths: list[int], max_batch_prompts: int, batch_token_budget: int
) -> None:
    options = AnswerOptions(
        max_new_tokens=20, max_batch_prompts=max_batch_prompts, batch_token_budget=batch_token_budget
    )
    prompts = {f"key{i}": [0] * length for i, length in enumerate(lengths)}
    batches = cut_batches(prompts, options)
    assert sorted(key for batch in batches for key in batch) == sorted(prompts)
    for batch in batches:
        padded = len(batch) * (max(len(prompts[key]) for key in batch) + 20)
        assert len(batch) <= max_batch_prompts
        assert padded <= batch_token_budget or len(batch) == 1
    order = [len(prompts[key]) for batch in batches for key in batch]
    assert order == sorted(order, reverse=True)


def test_the_cache_is_shared_by_what_does_not_shape_an_answer_and_by_nothing_else(tmp_path: Path) -> None:
    def folder(target: str = "t", kwargs: dict[str, Any] | None = None, **options: Any) -> Path:
        return answers_folder(tmp_path, target, AnswerOptions(**options), kwargs)

    same = [folder(), folder(max_batch_prompts=3), folder(batch_token_budget=99), folder(seed=5), folder(kwargs={})]
    other = [folder("u"), folder(max_new_tokens=7), folder(temperature=1.0), folder(temperature=1.0, seed=5)]
    other.append(folder(kwargs={"enable_thinking": False}))
    assert len(set(same)) == 1
    assert len({same[0], *other}) == 1 + len(other)


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_new_tokens", 0), ("max_batch_prompts", 1.5), ("batch_token_budget", -1), ("temperature", -0.1)],
)
def test_a_wrong_option_is_an_error_that_names_it(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"regenerate\.{key}="):
        AnswerOptions(**{key: value})


def test_a_prompt_beyond_the_models_positions_is_an_error_that_says_what_to_set(
    tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    model.config.max_position_embeddings = 50
    with pytest.raises(ValueError, match=r"Set regenerate\.max_prompt_tokens to 38 or less"):
        write_answers(ask("a" * 40), model, tokenizer, OPTIONS, tmp_path)


def test_bad_rows_stop_or_are_counted_and_rows_of_questions_alone_are_read(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": "open"}]},
        {"conversations": [{"from": "human", "value": "also open"}]},
        {"text": "no chat"},
        {"messages": 3},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"chats\.jsonl:3: the row is no chat"):
        read_conversations(JsonlFiles(path=str(path)))
    conversations, dropped = read_conversations(JsonlFiles(path=str(path), on_bad_row="drop"))
    assert [c.group for c in conversations] == ["open", "also open"]
    assert dropped == {"no_messages": 1, "messages_type": 1}


def test_the_command_writes_answers_for_a_file_of_questions(tmp_path: Path) -> None:
    lines = [json.dumps({"messages": [{"role": "user", "content": question}]}) for question in QUESTIONS]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    command = [sys.executable, "-m", "dflash.regenerate", "target=tiny", "data=jsonl", "data.path=questions.jsonl"]
    result = subprocess.run(
        [*command, "out=answers.jsonl", "regenerate.max_new_tokens=12"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "12 conversations" in result.stdout
    written = rows(tmp_path / "answers.jsonl")
    assert {row["messages"][0]["content"] for row in written} <= set(QUESTIONS)
    assert all(row["messages"][-1]["role"] == "assistant" for row in written)
