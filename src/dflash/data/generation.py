"""One batch of answers: which prompts go together, and what the target writes to them.

transformers' `generate` on its growing KV cache, padded on the left. On 2 CPU cores a preallocated cache gains under
15 %, and few short answers end early enough for dropping their rows to matter.
"""

import hashlib
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from dflash.checks import check_integer
from dflash.target.loading import end_of_turn_ids


@dataclass(frozen=True)
class AnswerOptions:
    """The config group `regenerate`.

    Args:
        max_new_tokens: an answer is cut here and marked `finish_reason: length`.
        temperature: 0 = greedy, which is what a drafter is measured on; above 0 samples from the full distribution.
        seed: of sampling; unused when greedy.
        max_batch_prompts: at most so many answers are written side by side.
        batch_token_budget: bounds rows * (padded prompt + new tokens) of a batch, and so its KV cache.
        max_prompt_tokens: longer prompts get no answer; their conversations end before them, with a count.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    max_batch_prompts: int = 64
    batch_token_budget: int = 32768
    max_prompt_tokens: int = 4096

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_batch_prompts", "batch_token_budget", "max_prompt_tokens"):
            check_integer(f"regenerate.{name}", getattr(self, name), 1)
        if not isinstance(self.temperature, int | float) or not self.temperature >= 0:
            raise ValueError(f"regenerate.temperature={self.temperature!r}: expected 0 (greedy) or a positive number.")


@dataclass(frozen=True)
class Answer:
    """What the target wrote to one prompt."""

    text: str  # without the end-of-turn token, otherwise as decoded
    finish_reason: str  # stop | length
    num_tokens: int  # generated, end-of-turn token included
    num_prompt_tokens: int
    same_tokens: bool  # encoding `text` gives the generated ids back

    @property
    def is_empty(self) -> bool:
        """Nothing but white space: no text to learn from."""
        return not self.text.strip()


def cut_batches(prompts: dict[str, list[int]], options: AnswerOptions) -> list[list[str]]:
    """Keys in batches of similar length, the longest first, so that running out of memory shows at once.

    `rows * (longest prompt + max_new_tokens)` stays within the budget; a prompt that is over it alone runs alone. No
    row is padded to more than twice its own prompt and answer: a few long ones would make all short ones pay for them.
    """
    batches: list[list[str]] = []
    longest = 0
    for key in sorted(prompts, key=lambda k: (-len(prompts[k]), k)):
        rows = len(batches[-1]) + 1 if batches else 1
        fits = rows * (longest + options.max_new_tokens) <= options.batch_token_budget
        similar = 2 * (len(prompts[key]) + options.max_new_tokens) >= longest + options.max_new_tokens
        if batches and fits and similar and rows <= options.max_batch_prompts:
            batches[-1].append(key)
        else:
            longest = len(prompts[key])
            batches.append([key])
    return batches


def generate(
    prompts: list[list[int]], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: AnswerOptions
) -> list[Answer]:
    """Answers to the token ids of prompts, in one batch, padded on the left: all answers begin in one column."""
    ends = end_of_turn_ids(model, tokenizer)
    longest = max(map(len, prompts))
    input_ids = torch.full((len(prompts), longest), ends[0], dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(prompts):
        input_ids[row, longest - len(ids) :] = torch.tensor(ids)
        attention_mask[row, longest - len(ids) :] = 1
    # Plain argmax, or plain sampling: what speculative decoding reproduces. Published generation configs carry
    # penalties and cut-offs, and generate() fills in from them whatever is left unset here.
    is_sampled = options.temperature > 0
    choice = {"temperature": options.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0} if is_sampled else {}
    config = GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        do_sample=is_sampled,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        num_beams=1,
        eos_token_id=ends,
        pad_token_id=ends[0],
        **choice,
    )
    device = model.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if is_sampled:
            torch.manual_seed(int(digest(f"{options.seed} {prompts}"), 16) % 2**63)
        output = model.generate(  # type: ignore[operator]
            input_ids.to(device), attention_mask=attention_mask.to(device), generation_config=config
        )
    return [
        _to_answer(ids, ends, len(prompt), tokenizer)
        for ids, prompt in zip(output[:, longest:].tolist(), prompts, strict=True)
    ]


def _to_answer(ids: list[int], ends: list[int], num_prompt_tokens: int, tokenizer: PreTrainedTokenizerBase) -> Answer:
    stop = next((i for i, token in enumerate(ids) if token in ends), None)
    kept = ids[:stop]
    text = str(tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    same_tokens = tokenizer.encode(text, add_special_tokens=False) == kept
    if stop is None:
        return Answer(text, "length", len(ids), num_prompt_tokens, same_tokens)
    return Answer(text, "stop", stop + 1, num_prompt_tokens, same_tokens)


def digest(text: str) -> str:
    """Short name of a text, for keys and file names."""
    return hashlib.sha256(text.encode()).hexdigest()[:24]
