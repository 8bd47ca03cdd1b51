"""The drafter at work on one sequence: its KV cache of the context, and a block at a time."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dflash.drafter.network import ContextKV, DFlashDrafter
from dflash.target.ends import TargetEnds


class BlockDrafter:
    """Drafts the tokens that follow an anchor.

    Args:
        drafter: in the dtype to run in.
        ends: the target's embedding and LM head.
        block_size: slots of a block, the anchor's included; None takes the drafter's own.
        precision: makes the context that the drafter's forwards run in, such as training's autocast. The target's must
            not: in training it runs in its own dtype.

    Raises:
        ValueError: a block size that the drafter was not trained for.
    """

    def __init__(
        self,
        drafter: DFlashDrafter,
        ends: TargetEnds,
        block_size: int | None = None,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.block_size = check_block_size(block_size, drafter)
        self.drafter = drafter
        self.ends = ends
        self.precision = precision
        self.context: ContextKV = []
        self._block = torch.full((1, self.block_size), drafter.mask_token_id, device=ends.embedding.device)

    def start(self) -> None:
        """Forget the sequence before."""
        self.context = []

    @torch.no_grad()
    def read(self, hidden: Tensor) -> None:
        """Append captured target states of the positions that follow, [1, P, L * H]."""
        num_read = self.context[0][0].shape[1] if self.context else 0
        with self.precision():
            positions = num_read + torch.arange(hidden.shape[1], device=hidden.device)
            new = self.drafter.project_context(hidden, positions[None])
        if self.context:
            new = [
                (torch.cat([key, new_key], dim=1), torch.cat([value, new_value], dim=1))
                for (key, value), (new_key, new_value) in zip(self.context, new, strict=True)
            ]
        self.context = new

    @torch.no_grad()
    def logits(self, anchor_token: int) -> Tensor:
        """Logits of the tokens after the anchor, whose position is the first that has not been read.

        Args:
            anchor_token: the latest token of the text; the target has not seen it yet.

        Returns:
            [K - 1, V].
        """
        self._block[0, 0] = anchor_token
        with self.precision():
            states = self.drafter.denoise_next(self.ends.embed(self._block), self.context)
        # Slot 0 rides along: matrix products with K rows are faster than with K - 1 where K is a power of two.
        return self.ends.logits(states[0])[1:]


def check_block_size(block_size: int | None, drafter: DFlashDrafter) -> int:
    """The block size to decode with; None stands for the drafter's own.

    Raises:
        ValueError: one that the drafter was not trained for.
    """
    if block_size is None:
        return drafter.block_size
    if type(block_size) is not int or not 2 <= block_size <= drafter.block_size:
        raise ValueError(
            f"block_size={block_size!r}: expected a whole number from 2 to {drafter.block_size}, the block size that "
            "the drafter was trained with."
        )
    return block_size
