"""Lossless speculative decoding of one sequence, and the target's plain decoding to hold it against.

A round drafts a block behind the latest token (the anchor), has the target read it in one forward, and keeps the
longest prefix that the target agrees with and one token of the target's own. Greedy text is the target's greedy text;
sampled text is distributed as the target's. Both loops run the same cached forwards of the target.
"""

from typing import Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from dflash.decoding.acceptance import accept_greedy, accept_sampled, probabilities
from dflash.decoding.transcript import DecodingOptions, Stopwatch, Transcript
from dflash.target.frozen import FrozenTarget
from dflash.target.sequence import TargetSequence


class Drafting(Protocol):
    """What the loop asks of a drafter; `BlockDrafter` is one."""

    def start(self) -> None:
        """A new sequence begins."""

    def read(self, hidden: Tensor) -> None:
        """The target has read P more tokens; its captured states are [1, P, L * H]."""

    def logits(self, anchor_token: int) -> Tensor:
        """Logits of the K - 1 tokens after the anchor, [K - 1, V]."""


@torch.no_grad()
def decode(
    target: FrozenTarget, drafter: Drafting | None, prompt_ids: list[int], options: DecodingOptions
) -> Transcript:
    """Decode one prompt.

    Args:
        target: whose text it is.
        drafter: proposes; what it proposes can change the time, never the text. None: the target's plain decoding,
            token by token, which is what speculative decoding is held against.
        prompt_ids: one token or more.
        options: limits, stop tokens, sampling.

    Raises:
        ValueError: an empty prompt, or one that leaves the target too few positions.
    """
    _check_fits(target, prompt_ids, options)
    device, temperature = target.device, options.temperature
    generator = torch.Generator(device).manual_seed(options.seed)
    transcript = Transcript()
    watch = Stopwatch(device)

    sequence = TargetSequence(target, captures=drafter is not None)
    logits, hidden = sequence.prefill(torch.tensor(prompt_ids, device=device))
    no_draft = torch.empty(0, dtype=torch.long, device=device)
    tokens = _accept(no_draft, None, logits, temperature, generator)
    transcript.token_ids += tokens
    transcript.first_token_seconds = watch.lap()
    if drafter is not None:
        drafter.start()

    while not transcript.is_complete(options):
        drafted, draft_probabilities = no_draft, None
        transcript.other_seconds += watch.lap()
        if drafter is not None:
            assert hidden is not None
            drafter.read(hidden)
            draft_logits = drafter.logits(tokens[-1])
            transcript.drafter_seconds += watch.lap()
            drafted, draft_probabilities = _propose(draft_logits, temperature, generator)
        block = torch.cat([torch.tensor(tokens[-1:], device=device), drafted])
        transcript.other_seconds += watch.lap()

        logits, hidden = sequence.extend(block)
        transcript.target_seconds += watch.lap()

        tokens = _accept(drafted, draft_probabilities, logits, temperature, generator)
        # What stays read are the anchor and the accepted drafts; the round's last token is the next anchor.
        sequence.take_back(len(block) - len(tokens))
        if hidden is not None:
            hidden = hidden[:, : len(tokens)]
        transcript.add(tokens, len(tokens) - 1, options)
    transcript.other_seconds += watch.lap()
    return transcript


def _propose(draft_logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """[K - 1, V] -> drafted tokens [K - 1] int64, and the probabilities they were sampled from where they were."""
    if temperature == 0:
        return draft_logits.argmax(dim=-1), None
    draft_probabilities = probabilities(draft_logits, temperature)
    return torch.multinomial(draft_probabilities, 1, generator=generator)[:, 0], draft_probabilities


def _accept(
    drafted: Tensor,
    draft_probabilities: Tensor | None,
    target_logits: Tensor,
    temperature: float,
    generator: torch.Generator,
) -> list[int]:
    """The round's tokens, from [K - 1] drafts, [K - 1, V] probabilities of theirs, and the target's logits [K, V]."""
    if temperature == 0:
        return accept_greedy(drafted, target_logits)
    target_probabilities = probabilities(target_logits, temperature)
    if draft_probabilities is None:
        draft_probabilities = target_probabilities[:0]
    return accept_sampled(drafted, draft_probabilities, target_probabilities, generator)


def max_prompt_tokens(target: PretrainedConfig, max_new_tokens: int) -> int | None:
    """The longest prompt that leaves the target positions for `max_new_tokens`; None where it has no limit."""
    config = target.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Beyond this the target turns all positions by other frequencies, also those it has cached.
        positions = rope.get("original_max_position_embeddings") or positions
    return positions - max_new_tokens if positions else None


def _check_fits(target: FrozenTarget, prompt_ids: list[int], options: DecodingOptions) -> None:
    if not prompt_ids:
        raise ValueError("The prompt has no token, so there is nothing to decode from.")
    longest = max_prompt_tokens(target.model.config, options.max_new_tokens)
    if longest is not None and len(prompt_ids) > longest:
        raise ValueError(
            f"A prompt of {len(prompt_ids)} tokens and max_new_tokens={options.max_new_tokens} exceed the target's "
            f"{longest + options.max_new_tokens} positions. Lower max_new_tokens or leave the prompt out."
        )
