"""Prompts to decode: the held-out samples' own, or those of a file."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from dflash.data.answers import read_conversations
from dflash.data.conversations import JSONL_SUFFIXES, JsonlFiles
from dflash.data.tokens import TokenDataset

SourceAndIds = tuple[str, list[int]]  # file:line or row id, token ids


def prompts_of_samples(samples: TokenDataset) -> Iterator[SourceAndIds]:
    """What stands before the first supervised token of each sample, in the dataset's order; it may be nothing."""
    for index in range(len(samples)):
        sample = samples.sample(index)
        yield sample.source, sample.input_ids[: int(np.argmax(sample.loss_mask))].tolist()


def prompts_of_file(
    path: str, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]
) -> Iterator[SourceAndIds]:
    """Each conversation of a chat JSONL or Parquet file, without its last turn where that is the assistant's.

    Args:
        path: the file.
        tokenizer: the target's, with its chat template.
        template_kwargs: handed to the template.

    Raises:
        ValueError: another kind of file, a row that is no conversation, or one that the template refuses; it names file
            and line.
    """
    if not path.endswith((*JSONL_SUFFIXES, ".parquet")) or not Path(path).is_file():
        raise ValueError(f"prompts={path}: expected a chat file that ends in {', '.join(JSONL_SUFFIXES)} or .parquet.")
    conversations, _ = read_conversations(JsonlFiles(path=path))
    for conversation in conversations:
        assert conversation.messages
        answered = conversation.messages[-1]["role"] == "assistant"
        messages = conversation.messages[:-1] if answered else conversation.messages
        if not messages:
            raise ValueError(f"{conversation.source}: there is no turn before the assistant's, so nothing to answer.")
        try:
            prompt = tokenizer.apply_chat_template(
                messages,
                tools=conversation.tools,  # type: ignore[arg-type]
                add_generation_prompt=True,
                tokenize=False,
                **template_kwargs,
            )
        except TemplateError as error:
            raise ValueError(f"{conversation.source}: the chat template refuses this conversation: {error}") from error
        yield conversation.source, tokenizer.encode(prompt, add_special_tokens=False)


def take_prompts(
    prompts: Iterable[SourceAndIds], limit: int | None, longest_tokens: int | None
) -> tuple[list[SourceAndIds], dict[str, list[str]]]:
    """The first `limit` prompts that can be decoded, and the sources of those passed over on the way, by reason."""
    taken: list[SourceAndIds] = []
    left_out: dict[str, list[str]] = defaultdict(list)
    for source, token_ids in prompts:
        if len(taken) == limit:
            break
        if not token_ids:
            left_out["supervised from the first token on: no prompt"].append(source)
        elif longest_tokens is not None and len(token_ids) > longest_tokens:
            left_out[f"longer than the {longest_tokens} tokens that leave room to decode"].append(source)
        else:
            taken.append((source, token_ids))
    return taken, dict(left_out)


def left_out_text(left_out: dict[str, list[str]], num_shown: int = 3) -> str:
    """One line a reason: how many prompts, and the first of them."""
    return "\n".join(
        f"{len(sources)} prompts left out, {reason}: {', '.join(sources[:num_shown])}"
        f"{', ...' if len(sources) > num_shown else ''}"
        for reason, sources in left_out.items()
    )
