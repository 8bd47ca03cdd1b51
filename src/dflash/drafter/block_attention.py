"""Attention of draft blocks: each sees its document before its anchor, and itself.

The rule (design 4.6): a block with anchor a sees the context at t < a of its own document, its own slots in both
directions, and no other block.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

# (query, block_key, block_value, context_key, context_value) -> attended, shapes as in `DenseBlockAttention.__call__`.
BlockAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class DenseBlockAttention:
    """The rule as one dense mask over (context + all blocks) of each document: the reference for faster backends.

    Prepared once a batch, used by every layer. N blocks of K slots lie in a grid of B documents times M, the most
    blocks that one document has.

    Args:
        anchors: [N] int64, position of each block's anchor in its document.
        anchor_doc: [N] int64, document of each block, ascending.
        num_docs: B.
        context_length: S, positions of the context keys.
        block_size: K.
    """

    def __init__(
        self, anchors: Tensor, anchor_doc: Tensor, *, num_docs: int, context_length: int, block_size: int
    ) -> None:
        device = anchors.device
        blocks_per_doc = torch.bincount(anchor_doc, minlength=num_docs)
        self.num_docs = num_docs
        self.blocks_in_grid = int(blocks_per_doc.max())
        first_of_doc = blocks_per_doc.cumsum(0) - blocks_per_doc
        place_in_doc = torch.arange(len(anchors), device=device) - first_of_doc[anchor_doc]
        self.grid_cell = anchor_doc * self.blocks_in_grid + place_in_doc  # [N]

        # A cell without a block keeps anchor 0: it sees itself alone, stays finite, and is never read.
        anchor_grid = torch.zeros(num_docs * self.blocks_in_grid, dtype=torch.long, device=device)
        anchor_grid[self.grid_cell] = anchors
        # The anchor's own hidden state does not exist yet when decoding drafts from it: strictly before, not up to.
        sees_context = torch.arange(context_length, device=device) < anchor_grid[:, None]  # [B * M, S]
        sees_context = sees_context.repeat_interleave(block_size, dim=0).view(
            num_docs, self.blocks_in_grid * block_size, context_length
        )
        block_of_slot = torch.arange(self.blocks_in_grid, device=device).repeat_interleave(block_size)
        sees_slot = (block_of_slot[:, None] == block_of_slot).expand(num_docs, -1, -1)
        self.mask = torch.cat([sees_context, sees_slot], dim=-1)[:, None]  # [B, 1, M * K, S + M * K]

    def __call__(
        self, query: Tensor, block_key: Tensor, block_value: Tensor, context_key: Tensor, context_value: Tensor
    ) -> Tensor:
        """Attend.

        Args:
            query: [N, K, query heads, head_dim].
            block_key: [N, K, key heads, head_dim], likewise `block_value`.
            block_value: see `block_key`.
            context_key: [B, S, key heads, head_dim], likewise `context_value`.
            context_value: see `context_key`.

        Returns:
            [N, K, query heads, head_dim].
        """
        _, block_size, num_heads, head_dim = query.shape
        keys = torch.cat([context_key, self._to_grid(block_key)], dim=1)
        values = torch.cat([context_value, self._to_grid(block_value)], dim=1)
        # Key heads are repeated here: with enable_gqa and a mask CUDA would fall back to keeping all scores in float32.
        repeats = num_heads // keys.shape[2]
        attended = F.scaled_dot_product_attention(
            self._to_grid(query).transpose(1, 2),
            keys.transpose(1, 2).repeat_interleave(repeats, dim=1),
            values.transpose(1, 2).repeat_interleave(repeats, dim=1),
            attn_mask=self.mask,
        )  # [B, heads, M * K, head_dim]
        cells = attended.transpose(1, 2).reshape(-1, block_size, num_heads, head_dim)
        return cells[self.grid_cell]

    def _to_grid(self, blocks: Tensor) -> Tensor:
        """[N, K, heads, head_dim] -> [B, M * K, heads, head_dim], zero where a cell has no block."""
        _, block_size, num_heads, head_dim = blocks.shape
        grid = blocks.new_zeros(self.num_docs * self.blocks_in_grid, block_size, num_heads, head_dim)
        grid = grid.index_copy(0, self.grid_cell, blocks)
        return grid.view(self.num_docs, -1, num_heads, head_dim)


def attend_to_all(
    query: Tensor, block_key: Tensor, block_value: Tensor, context_key: Tensor, context_value: Tensor
) -> Tensor:
    """The rule for one block behind its whole context: everything is visible, no mask is needed.

    Shapes as in `DenseBlockAttention`, with N = B = 1.
    """
    keys = torch.cat([context_key, block_key], dim=1).transpose(1, 2)
    values = torch.cat([context_value, block_value], dim=1).transpose(1, 2)
    return F.scaled_dot_product_attention(query.transpose(1, 2), keys, values, enable_gqa=True).transpose(1, 2)
