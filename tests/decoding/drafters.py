"""Drafters that follow a script: what decoding must withstand, and what acceptance must come out as."""

from collections.abc import Callable

import torch
from torch import Tensor

from dflash.target.frozen import FrozenTarget


class ScriptedDrafter:
    """Proposes whatever `propose(position of the anchor, anchor's token)` says: K - 1 token ids.

    Notes the hidden states that it is given, so that a test can compare them.
    """

    def __init__(self, propose: Callable[[int, int], list[int]], vocab_size: int) -> None:
        self.propose = propose
        self.vocab_size = vocab_size
        self.pieces: list[Tensor] = []

    def start(self) -> None:
        self.pieces = []

    def read(self, hidden: Tensor) -> None:
        self.pieces.append(hidden)

    def logits(self, anchor_token: int) -> Tensor:
        position = sum(piece.shape[1] for piece in self.pieces)
        proposed = torch.tensor(self.propose(position, anchor_token))
        return torch.nn.functional.one_hot(proposed.to(self.pieces[0].device), self.vocab_size).float() * 50.0


def scripts(text: list[int], block_size: int, vocab_size: int, stop_id: int) -> dict[str, ScriptedDrafter]:
    """Good, random and adversarial drafters of a known text (prompt and answer)."""
    num_drafts = block_size - 1
    generator = torch.Generator().manual_seed(0)

    def ahead(position: int) -> list[int]:
        return [text[t] if t < len(text) else 0 for t in range(position + 1, position + block_size)]

    def half_right(position: int, anchor: int) -> list[int]:
        keep = position % block_size
        return [t if k < keep else (t + 1) % vocab_size for k, t in enumerate(ahead(position))]

    propose: dict[str, Callable[[int, int], list[int]]] = {
        "always right": lambda position, anchor: ahead(position),
        "always wrong": lambda position, anchor: [(t + 1) % vocab_size for t in ahead(position)],
        "right for a while": half_right,
        "right but for the first": lambda position, anchor: [
            (ahead(position)[0] + 1) % vocab_size,
            *ahead(position)[1:],
        ],
        "random": lambda position, anchor: torch.randint(vocab_size, (num_drafts,), generator=generator).tolist(),
        "repeating": lambda position, anchor: [anchor] * num_drafts,
        "ending early": lambda position, anchor: [stop_id] * num_drafts,
        "right, then ending early": lambda position, anchor: [*ahead(position)[:1], *[stop_id] * (num_drafts - 1)],
    }
    return {name: ScriptedDrafter(function, vocab_size) for name, function in propose.items()}


def greedy_text(target: FrozenTarget, prompt: list[int], max_new_tokens: int, stop_ids: list[int]) -> list[int]:
    """The target's own `generate`."""
    output = target.model.generate(  # type: ignore[operator]
        torch.tensor([prompt], device=target.device),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=target.device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=stop_ids,
        pad_token_id=stop_ids[0],
    )
    return output[0, len(prompt) :].tolist()
