"""Attention of draft blocks: each sees its document before its anchor, and itself.

The rule (design 4.6): a block with anchor a sees the context at t < a of its own document, its own slots in both
directions, and no other block. The context lies in B rows of S positions, padded (a document a row) or packed (many in
one row); among the B * S positions, row after row, a block's context is `start` to `start + anchor`, that excluded.

`block_attention` prepares a batch once, for every layer. Two backends, equal up to rounding:

    grouped   computes the visible pairs and little more: neighbouring blocks of a document together
    dense     one mask over (context + all blocks) of every row: the reference
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash.checks import suggestion

# (query, block_key, block_value, context_key, context_value) -> attended, shapes as in `DenseBlockAttention.__call__`.
BlockAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

BACKENDS = ("auto", "grouped", "dense")
GROUP_SLOTS = 128  # slots of neighbouring blocks that attend together: fewer waste less, more fill the matrix units


def check_backend(backend: str) -> str:
    """The backend, if there is one of this name.

    Raises:
        ValueError: there is none.
    """
    if backend not in BACKENDS:
        near = suggestion(str(backend), BACKENDS)
        raise ValueError(f"drafter.attention={backend!r} is unknown: choose one of {', '.join(BACKENDS)}.{near}")
    return backend


def block_attention(
    backend: str, anchors: Tensor, starts: Tensor, *, num_rows: int, row_length: int, block_size: int
) -> BlockAttention:
    """The attention of a batch's blocks.

    Args:
        backend: grouped, dense, or auto: grouped on a CPU, dense elsewhere.
        anchors: [N] int64, position of each block's anchor in its document, ascending within a document.
        starts: [N] int64, where its document begins among the B * S positions, ascending.
        num_rows: B.
        row_length: S.
        block_size: K.
    """
    # Off the CPU, many small products and what they keep for the backward pass cost more than one masked kernel.
    if backend == "dense" or (backend == "auto" and anchors.device.type != "cpu"):
        return DenseBlockAttention(anchors, starts, num_rows=num_rows, row_length=row_length, block_size=block_size)
    return GroupedBlockAttention(anchors, starts, block_size=block_size)


class GroupedBlockAttention:
    """Neighbouring blocks of a document attend together to its context up to the last one's anchor, and to themselves.

    What is masked is computed only between the first and the last anchor of a group.

    Args:
        anchors: [N] int64, ascending within a document.
        starts: [N] int64, ascending.
        block_size: K.
    """

    def __init__(self, anchors: Tensor, starts: Tensor, *, block_size: int) -> None:
        self.groups: list[tuple[int, int, int, int, Tensor]] = []  # first block, end, context begin, end, mask
        blocks_in_group = max(GROUP_SLOTS // block_size, 1)
        anchor_list, start_list = anchors.tolist(), starts.tolist()
        first = 0
        while first < len(anchor_list):
            end = first + 1
            while end < min(first + blocks_in_group, len(anchor_list)) and start_list[end] == start_list[first]:
                end += 1
            start, reach = start_list[first], anchor_list[end - 1]
            # Strictly before the anchor: its own hidden state does not exist yet when decoding drafts from it.
            sees = torch.arange(reach, device=anchors.device) < anchors[first:end, None]  # [G, P]
            hidden_from = torch.zeros(sees.shape, device=anchors.device).masked_fill_(~sees, float("-inf"))
            self.groups.append((first, end, start, start + reach, hidden_from))
            first = end

    def __call__(
        self, query: Tensor, block_key: Tensor, block_value: Tensor, context_key: Tensor, context_value: Tensor
    ) -> Tensor:
        """Attend; shapes as in `DenseBlockAttention.__call__`."""
        _, block_size, num_heads, head_dim = query.shape
        num_key_heads = context_key.shape[2]
        repeats = num_heads // num_key_heads
        # By key head, its query heads side by side: key heads need not be repeated. R stands for repeats.
        query = query.unflatten(2, (num_key_heads, repeats)) * head_dim**-0.5  # [N, K, heads, R, D]
        keys, values = context_key.flatten(0, 1).transpose(0, 1), context_value.flatten(0, 1).transpose(0, 1)
        attended = []
        for first, end, begin, until, mask in self.groups:
            size = end - first
            of_group = query[first:end].permute(2, 0, 3, 1, 4)  # [heads, G, R, K, D]
            own_key = block_key[first:end].permute(2, 0, 3, 1)  # [heads, G, D, K]
            own_value = block_value[first:end].permute(2, 0, 1, 3)  # [heads, G, K, D]
            by_block = of_group.reshape(num_key_heads, size, repeats * block_size, head_dim)
            own_scores = by_block @ own_key  # [heads, G, R * K, K]
            rows = by_block.reshape(num_key_heads, size * repeats * block_size, head_dim)
            scores = (rows @ keys[:, begin:until].transpose(1, 2)).view(*own_scores.shape[:3], until - begin)
            scores = scores + mask[:, None].to(scores.dtype)
            # The softmax itself in float32 or wider: in bfloat16 sums of many small shares lose what is left of them.
            wide = torch.promote_types(scores.dtype, torch.float32)
            shares = torch.cat([scores, own_scores], dim=-1).softmax(dim=-1, dtype=wide).to(query.dtype)
            context_shares, own_shares = shares.split([until - begin, block_size], dim=-1)
            result = own_shares @ own_value
            result = result + (context_shares.flatten(1, 2) @ values[:, begin:until]).view_as(result)
            result = result.view(num_key_heads, size, repeats, block_size, head_dim).permute(1, 3, 0, 2, 4)
            attended.append(result.reshape(size, block_size, num_heads, head_dim))
        return torch.cat(attended)


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
