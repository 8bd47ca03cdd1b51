"""Answers of the real SmolLM2."""

from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash.data.answers import read_conversations, write_answers
from dflash.data.conversations import parse_row
from dflash.data.generation import AnswerOptions
from dflash.data.stdlib_chat import StdlibChat


@pytest.mark.real
def test_smollm2s_padded_answers_equal_its_answers_to_each_prompt_alone(
    tmp_path: Path, smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase]
) -> None:
    model, tokenizer = smollm2
    # Every other prompt carries source, so that the batch mixes short and long.
    data = StdlibChat(max_samples=4, long_fraction=0.5, max_code_chars=600)
    asked, _ = read_conversations(data)
    report = write_answers(asked, model, tokenizer, AnswerOptions(max_new_tokens=12), tmp_path)
    written = [parse_row(row, source).messages for source, row in data.answered(report.out).rows("train")]

    for messages, conversation in zip(written, asked, strict=True):
        prompt = tokenizer.apply_chat_template(
            conversation.messages[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        alone = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert messages[-1]["content"] == tokenizer.decode(alone).removesuffix("<|im_end|>")
