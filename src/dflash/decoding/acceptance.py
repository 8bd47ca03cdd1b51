"""Which drafted tokens the target accepts, and what it says in place of the first that it does not."""

import torch
from torch import Tensor


def accept_greedy(drafted: Tensor, target_logits: Tensor) -> list[int]:
    """The leading drafted tokens that the target would have chosen itself, and its own choice after them.

    Args:
        drafted: [K - 1] int64.
        target_logits: [K, V]; row i is what follows i drafted tokens.

    Returns:
        1..K tokens, all of them the target's greedy choices.
    """
    chosen, proposed = target_logits.argmax(dim=-1).tolist(), drafted.tolist()
    matched = next((i for i, token in enumerate(proposed) if token != chosen[i]), len(proposed))
    return chosen[: matched + 1]


def accept_sampled(
    drafted: Tensor, draft_probabilities: Tensor, target_probabilities: Tensor, generator: torch.Generator
) -> list[int]:
    """Speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1): the result is distributed as the target.

    A drafted token d is accepted with probability min(1, p(d) / q(d)). In place of the first rejected one comes a
    sample of max(0, p - q), normalised; after a block without rejection, a sample of p.

    Args:
        drafted: [K - 1] int64, each sampled from its row of `draft_probabilities`.
        draft_probabilities: q, [K - 1, V].
        target_probabilities: p, [K, V]; row i is what follows i drafted tokens.
        generator: on their device.

    Returns:
        1..K tokens: the accepted ones and one more.
    """
    slots = torch.arange(len(drafted), device=drafted.device)
    chance = target_probabilities[slots, drafted] / draft_probabilities[slots, drafted]
    rejected = torch.rand(len(drafted), generator=generator, device=drafted.device, dtype=chance.dtype) >= chance
    tokens = drafted.tolist()
    matched = next((i for i, is_rejected in enumerate(rejected.tolist()) if is_rejected), len(tokens))
    remaining = target_probabilities[matched]
    if matched < len(tokens):
        remaining = (remaining - draft_probabilities[matched]).clamp(min=0)
    return [*tokens[:matched], int(torch.multinomial(remaining, 1, generator=generator))]


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) in float64: rounding must not tilt the ratio p / q. [..., V] -> [..., V]."""
    return torch.softmax(logits.double() / temperature, dim=-1)
