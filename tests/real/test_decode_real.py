"""Speculative decoding of the real SmolLM2."""

from contextlib import nullcontext

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash.data.generation import AnswerOptions, generate
from dflash.data.stdlib_chat import StdlibChat
from dflash.decoding.comparison import NEAR_TIE, Prompt, find_divergence
from dflash.decoding.few_rows import TransposedFewRows
from dflash.decoding.speculative import decode
from dflash.decoding.transcript import DecodingOptions, Transcript
from dflash.target.frozen import FrozenTarget
from dflash.target.loading import end_of_turn_ids
from tests.decoding.drafters import scripts

NEW_TOKENS = 10


@pytest.mark.real
def test_smollm2s_greedy_text_is_its_own_on_64_held_out_prompts(
    smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    model, tokenizer = smollm2
    target = FrozenTarget(model, [1, 14, 27])
    stop_ids = end_of_turn_ids(model, tokenizer)
    rows = [row for _, row in StdlibChat(max_samples=64, seed=7, long_fraction=0.0).rows("train")]
    prompts = [
        tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=True)["input_ids"]  # type: ignore[index, call-overload]
        for row in rows
    ]
    # The target's own `generate`, side by side: in a row for each prompt, padded.
    answers = []
    for first in range(0, 64, 32):
        answers += generate(prompts[first : first + 32], model, tokenizer, AnswerOptions(max_new_tokens=NEW_TOKENS))
    near_ties = []
    emitted: set[int] = set()
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer.same_tokens, "else the text would have to be tokenised otherwise"
        theirs = tokenizer.encode(answer.text, add_special_tokens=False)
        theirs += stop_ids[:1] if answer.finish_reason == "stop" else []
        drafters = list(scripts(prompt + theirs, 4, model.config.vocab_size, stop_ids[0]).values())
        # Each script drafts for eight prompts, half of them with products of few rows laid out anew.
        with TransposedFewRows(4) if number // 8 % 2 else nullcontext():
            transcript = decode(target, drafters[number % 8], prompt, DecodingOptions(stop_ids, NEW_TOKENS))
        emitted |= set(transcript.emitted)
        parted = find_divergence(target, Prompt(str(number), prompt), transcript, Transcript(theirs))
        if parted:
            assert parted.gap <= NEAR_TIE, (number, parted)
            near_ties.append((number, parted))
    print("near-ties:", near_ties)
    assert emitted == {1, 2, 3, 4}


@pytest.mark.real
def test_a_second_sequence_starts_from_nothing(smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = smollm2
    target, options = FrozenTarget(model, [1]), DecodingOptions(end_of_turn_ids(model, tokenizer), 4)
    prompt = tokenizer.encode("The capital of France is")
    first = decode(target, None, prompt, options).token_ids
    decode(target, None, tokenizer.encode("One, two, three,"), options)
    assert decode(target, None, prompt, options).token_ids == first
    assert torch.is_grad_enabled()
