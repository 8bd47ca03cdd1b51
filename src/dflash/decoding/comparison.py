"""The same prompts decoded with and without the drafter: acceptance, speed, and whether the text is the same."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dflash.decoding.few_rows import TransposedFewRows, fastest_layout
from dflash.decoding.speculative import Drafting, decode
from dflash.decoding.transcript import DecodingOptions, Transcript
from dflash.metric_names import length_bucket, length_range
from dflash.target.frozen import FrozenTarget
from dflash.target.sequence import TargetSequence

# Two logits this close may change places between forwards of one token and of several: rounding, not the algorithm.
NEAR_TIE = 1e-4

WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Prompt:
    """What is decoded."""

    source: str  # file:line or row id
    token_ids: list[int]


@dataclass(frozen=True)
class Divergence:
    """Where the two texts part."""

    index: int  # of the first new token that differs
    gap: float | None  # of the target's logits: the best less the lower of the two tokens'; None where one text ends

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it: both tokens are as good as the target's best."""
        return self.gap is not None and self.gap <= NEAR_TIE


@dataclass(frozen=True)
class PromptOutcome:
    """One prompt, decoded both ways."""

    prompt: Prompt
    speculative: Transcript
    plain: Transcript
    divergence: Divergence | None  # None: the same text, or sampled, where texts may differ

    @property
    def length_tokens(self) -> int:
        """Of prompt and text together."""
        return len(self.prompt.token_ids) + len(self.speculative.token_ids)

    @property
    def same_text(self) -> str:
        """Whether the two texts are the same: yes, no, or parted at a near-tie."""
        if self.divergence is None:
            return "yes"
        return "near-tie" if self.divergence.is_near_tie else "no"


class Comparison:
    """Sums over prompts; every ratio is a sum over a sum.

    Args:
        outcomes: one or more.
        block_size: slots of a block at decoding.
        greedy: whether texts can be compared token by token.
        transposed_products: whether products of few rows were laid out anew, see `few_rows`.
    """

    def __init__(
        self, outcomes: Sequence[PromptOutcome], block_size: int, greedy: bool, transposed_products: bool = False
    ) -> None:
        self.outcomes = list(outcomes)
        self.transposed_products = transposed_products
        self.block_size = block_size
        self.greedy = greedy

    @property
    def num_rounds(self) -> int:
        """Forwards of the target that verified a block."""
        return sum(o.speculative.num_rounds for o in self.outcomes)

    @property
    def acceptance_length(self) -> float | None:
        """Emitted tokens (the prefill's not counted) over rounds; None where every text was a single token."""
        emitted = sum(sum(o.speculative.emitted) for o in self.outcomes)
        return emitted / self.num_rounds if self.num_rounds else None

    @property
    def tokens_per_s(self) -> float | None:
        """Of speculative decoding, after the first token."""
        return _rate([o.speculative for o in self.outcomes])

    @property
    def baseline_tokens_per_s(self) -> float | None:
        """Of plain decoding, after the first token."""
        return _rate([o.plain for o in self.outcomes])

    @property
    def speedup(self) -> float | None:
        """Tokens per second over the baseline's."""
        ours, theirs = self.tokens_per_s, self.baseline_tokens_per_s
        return ours / theirs if ours and theirs else None

    @property
    def lossless(self) -> bool | None:
        """Whether every text is the target's own, near-ties aside; None where it was sampled."""
        return all(o.divergence is None or o.divergence.is_near_tie for o in self.outcomes) if self.greedy else None

    def acceptance_by_slot(self) -> list[float]:
        """Share of rounds in which the drafts of slots 1..k were all accepted, for k = 1..K-1; empty without rounds."""
        matched = [m for o in self.outcomes for m in o.speculative.matched]
        return [sum(m >= k for m in matched) / len(matched) for k in range(1, self.block_size)] if matched else []

    def histogram(self) -> list[int]:
        """How many rounds emitted 1, 2, .. K tokens."""
        emitted = [e for o in self.outcomes for e in o.speculative.emitted]
        return [emitted.count(length) for length in range(1, self.block_size + 1)]

    def figures(self) -> dict[str, Any]:
        """Everything measured, in plain types: over all prompts, by length of prompt and text, and by prompt."""
        buckets: dict[int, list[PromptOutcome]] = defaultdict(list)
        for outcome in self.outcomes:
            buckets[length_bucket(outcome.length_tokens)].append(outcome)
        parts = {b: Comparison(buckets[b], self.block_size, self.greedy) for b in sorted(buckets)}
        return {
            **self._totals(),
            "transposed_products": self.transposed_products,
            "by_length": {length_range(bucket): part._totals() for bucket, part in parts.items()},
            "by_prompt": [self._prompt_figures(outcome) for outcome in self.outcomes],
        }

    def _totals(self) -> dict[str, Any]:
        speculative, plain = [o.speculative for o in self.outcomes], [o.plain for o in self.outcomes]
        return {
            "acceptance_length": self.acceptance_length,
            "speedup": self.speedup,
            "lossless": self.lossless,
            "prompts": len(self.outcomes),
            "tokens_per_s": self.tokens_per_s,
            "baseline_tokens_per_s": self.baseline_tokens_per_s,
            "acceptance_by_slot": self.acceptance_by_slot(),
            "acceptance_histogram": self.histogram(),
            "rounds": self.num_rounds,
            "new_tokens": sum(len(t.token_ids) for t in speculative),
            "first_token_seconds": sum(t.first_token_seconds for t in speculative) / len(speculative),
            "baseline_first_token_seconds": sum(t.first_token_seconds for t in plain) / len(plain),
            "drafter_seconds": sum(t.drafter_seconds for t in speculative),
            "target_seconds": sum(t.target_seconds for t in speculative),
            "other_seconds": sum(t.other_seconds for t in speculative),
        }

    def _prompt_figures(self, outcome: PromptOutcome) -> dict[str, Any]:
        alone = Comparison([outcome], self.block_size, self.greedy)
        return {
            "source": outcome.prompt.source,
            "prompt_tokens": len(outcome.prompt.token_ids),
            "new_tokens": len(outcome.speculative.token_ids),
            "rounds": alone.num_rounds,
            "acceptance_length": alone.acceptance_length,
            "tokens_per_s": alone.tokens_per_s,
            "baseline_tokens_per_s": alone.baseline_tokens_per_s,
            "lossless": outcome.same_text if self.greedy else None,
            "divergence": asdict(outcome.divergence) if outcome.divergence else None,
        }


def compare_decoding(
    target: FrozenTarget,
    drafter: Drafting,
    prompts: Sequence[Prompt],
    options: DecodingOptions,
    *,
    block_size: int,
    on_prompt: Callable[[PromptOutcome], None] = lambda outcome: None,
) -> Comparison:
    """Decode every prompt both ways, in turns, so that whatever else the machine does meets both alike.

    Args:
        target: decodes.
        drafter: helps.
        prompts: one or more.
        options: the same for both.
        block_size: of the drafter, for the figures by slot.
        on_prompt: called with each outcome.
    """
    layout = fastest_layout(target.model.get_output_embeddings().weight, block_size)
    contexts: dict[Drafting | None, AbstractContextManager[Any]] = {
        drafter: layout,
        None: nullcontext(),
    }  # plain decoding has one row, which needs none

    def decode_one(way: Drafting | None, prompt: Prompt, options: DecodingOptions) -> Transcript:
        with contexts[way]:
            return decode(target, way, prompt.token_ids, options)

    warm_up = replace(options, max_new_tokens=min(WARM_UP_TOKENS, options.max_new_tokens))
    for way in (drafter, None):
        decode_one(way, prompts[0], warm_up)
    outcomes = []
    for number, prompt in enumerate(prompts):
        ways: list[Drafting | None] = [drafter, None] if number % 2 == 0 else [None, drafter]
        by_way = {way: decode_one(way, prompt, options) for way in ways}
        speculative, plain = by_way[drafter], by_way[None]
        divergence = None if options.temperature else find_divergence(target, prompt, speculative, plain)
        outcome = PromptOutcome(prompt, speculative, plain, divergence)
        outcomes.append(outcome)
        on_prompt(outcome)
    return Comparison(
        outcomes,
        block_size,
        greedy=options.temperature == 0,
        transposed_products=isinstance(layout, TransposedFewRows),
    )


def find_divergence(
    target: FrozenTarget, prompt: Prompt, speculative: Transcript, plain: Transcript
) -> Divergence | None:
    """Where two greedy texts part, and how far the target prefers one of the two tokens; None if they are the same."""
    ours, theirs = speculative.token_ids, plain.token_ids
    if ours == theirs:
        return None
    index = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if index is None:  # one is the beginning of the other: a stop or a limit, which no rounding moves
        return Divergence(min(len(ours), len(theirs)), None)
    context = torch.tensor(prompt.token_ids + theirs[:index], device=target.device)
    logits, _ = TargetSequence(target, captures=False).prefill(context)
    last = logits[-1].double()
    return Divergence(index, float(last.max() - last[[ours[index], theirs[index]]].min()))


def _rate(transcripts: Sequence[Transcript]) -> float | None:
    tokens, seconds = sum(len(t.token_ids) - 1 for t in transcripts), sum(t.seconds for t in transcripts)
    return tokens / seconds if tokens else None
