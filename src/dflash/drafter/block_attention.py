"""Attention of draft blocks: each sees its document before its anchor, and itself.

The rule (design 4.6): a block with anchor a sees the context at t < a of its own document, its own slots in both
directions, and no other block. The context lies in B rows of S positions, padded (a document a row) or packed (many in
one row); among the B * S positions, row after row, a block's context is `start` to `start + anchor`, that excluded.

`block_attention` prepares a batch once, for every layer. Three backends, equal up to rounding:

    flex      one compiled kernel that passes over what is not seen: for GPUs
    grouped   computes the visible pairs and little more, neighbouring blocks of a document together: for CPUs
    dense     one mask over (context + all blocks) of every row: the reference
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash.checks import suggestion
from dflash.drafter.grouped_attention import GroupedBlockAttention

# (query, block_key, block_value, context_key, context_value) -> attended, shapes as in `DenseBlockAttention.__call__`.
BlockAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

BACKENDS = ("auto", "flex", "grouped", "dense")
_LEAST_FLEX_HEAD_DIM = 16  # of the matrix units that its kernel is written for


def check_backend(backend: str) -> str:
    """The backend, if there is one of this name.

    Raises:
        ValueError: there is none.
    """
    if backend not in BACKENDS:
        near = suggestion(str(backend), BACKENDS)
        raise ValueError(f"drafter.attention={backend!r} is unknown: choose one of {', '.join(BACKENDS)}.{near}")
    return backend


def choose_backend(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """What `auto` stands for, and whether flex can be had.

    Args:
        backend: one of BACKENDS.
        device: of the drafter.
        dtype: of its queries.
        head_dim: of its heads.

    Raises:
        ValueError: flex off CUDA, where it has no backward pass.
    """
    if backend == "flex" and device.type != "cuda":
        raise ValueError(
            f"drafter.attention=flex trains on CUDA only, not on {device.type}. Set drafter.attention=auto: it takes "
            "grouped there."
        )
    if backend != "auto":
        return backend
    has_kernel = device.type == "cuda" and dtype != torch.float64 and head_dim >= _LEAST_FLEX_HEAD_DIM
    return "flex" if has_kernel else "grouped"


def block_attention(
    backend: str, anchors: Tensor, starts: Tensor, *, num_rows: int, row_length: int, block_size: int
) -> BlockAttention:
    """The attention of a batch's blocks.

    Args:
        backend: flex, grouped or dense.
        anchors: [N] int64, position of each block's anchor in its document, ascending within a document.
        starts: [N] int64, where its document begins among the B * S positions, ascending.
        num_rows: B.
        row_length: S.
        block_size: K.
    """
    if backend == "flex":
        from dflash.drafter.flex_block_attention import FlexBlockAttention  # imports the compiler

        return FlexBlockAttention(anchors, starts, num_positions=num_rows * row_length, block_size=block_size)
    if backend == "grouped":
        return GroupedBlockAttention(anchors, starts, block_size=block_size)
    return DenseBlockAttention(anchors, starts, num_rows=num_rows, row_length=row_length, block_size=block_size)


class DenseBlockAttention:
    """The rule as one dense mask over (context + all blocks) of each row: the reference for faster backends.

    N blocks of K slots lie in a grid of B rows times M, the most blocks that one row has.

    Args:
        anchors: [N] int64, position of each block's anchor in its document.
        starts: [N] int64, where its document begins among the B * S positions, ascending.
        num_rows: B.
        row_length: S.
        block_size: K.
    """

    def __init__(self, anchors: Tensor, starts: Tensor, *, num_rows: int, row_length: int, block_size: int) -> None:
        device = anchors.device
        row, begin = starts // max(row_length, 1), starts % max(row_length, 1)
        blocks_per_row = torch.bincount(row, minlength=num_rows)
        self.num_rows = num_rows
        self.blocks_in_grid = int(blocks_per_row.max())
        first_of_row = blocks_per_row.cumsum(0) - blocks_per_row
        place_in_row = torch.arange(len(anchors), device=device) - first_of_row[row]
        self.grid_cell = row * self.blocks_in_grid + place_in_row  # [N]

        # A cell without a block sees itself alone, stays finite, and is never read.
        position = torch.arange(row_length, device=device)
        sees = torch.zeros(num_rows * self.blocks_in_grid, row_length, dtype=torch.bool, device=device)
        # The anchor's own hidden state does not exist yet when decoding drafts from it: strictly before, not up to.
        sees[self.grid_cell] = (position >= begin[:, None]) & (position < (begin + anchors)[:, None])
        sees_context = sees.repeat_interleave(block_size, dim=0).view(
            num_rows, self.blocks_in_grid * block_size, row_length
        )
        block_of_slot = torch.arange(self.blocks_in_grid, device=device).repeat_interleave(block_size)
        sees_slot = (block_of_slot[:, None] == block_of_slot).expand(num_rows, -1, -1)
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
        grid = blocks.new_zeros(self.num_rows * self.blocks_in_grid, block_size, num_heads, head_dim)
        grid = grid.index_copy(0, self.grid_cell, blocks)
        return grid.view(self.num_rows, -1, num_heads, head_dim)


def attend_to_all(
    query: Tensor, block_key: Tensor, block_value: Tensor, context_key: Tensor, context_value: Tensor
) -> Tensor:
    """The rule for one block behind its whole context: everything is visible, no mask is needed.

    Shapes as in `DenseBlockAttention`, with N = B = 1.
    """
    keys = torch.cat([context_key, block_key], dim=1).transpose(1, 2)
    values = torch.cat([context_value, block_value], dim=1).transpose(1, 2)
    return F.scaled_dot_product_attention(query.transpose(1, 2), keys, values, enable_gqa=True).transpose(1, 2)
