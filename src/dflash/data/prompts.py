"""Prompts to decode: the held-out samples' own, or those of a file."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from dflash.data.answers import read_conversations
from dflash.data.conversations import JsonlFiles
from dflash.data.tokens import TokenDataset


def prompts_of_samples(samples: TokenDataset, limit: int | None = None) -> list[tuple[str, list[int]]]:
    """What stands before the first supervised token of each sample, in the dataset's order.

    Args:
        samples: the validation side.
        limit: at most so many; None for all.

    Returns:
        (source, token ids) pairs. A sample that is supervised from its very first token has no prompt and is left out.
    """
    prompts: list[tuple[str, list[int]]] = []
    for index in range(len(samples)):
        if limit is not None and len(prompts) == limit:
            break
        sample = samples.sample(index)
        first = int(np.argmax(sample.loss_mask))
        if first > 0:
            prompts.append((sample.source, sample.input_ids[:first].tolist()))
    return prompts


def prompts_of_file(
    path: str, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]
) -> Iterator[tuple[str, list[int]]]:
    """Each conversation of a chat JSONL or Parquet file, without its last turn where that is the assistant's.

    Args:
        path: the file.
        tokenizer: the target's, with its chat template.
        template_kwargs: handed to the template.

    Yields:
        (source, token ids).

    Raises:
        ValueError: a row that is no conversation, naming file and line.
    """
    conversations, _ = read_conversations(JsonlFiles(path=path))
    for conversation in conversations:
        assert conversation.messages
        answered = conversation.messages[-1]["role"] == "assistant"
        prompt = tokenizer.apply_chat_template(
            conversation.messages[:-1] if answered else conversation.messages,
            tools=conversation.tools,  # type: ignore[arg-type]
            add_generation_prompt=True,
            tokenize=False,
            **template_kwargs,
        )
        yield conversation.source, tokenizer.encode(prompt, add_special_tokens=False)
