"""Block attention, every backend against the rule asked pair by pair."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash.drafter.block_attention import block_attention, check_backend, choose_backend
from dflash.drafter.flex_block_attention import tiles_seen

HEADS, KEY_HEADS, DIM = 4, 2, 3
Documents = list[tuple[int, list[int]]]  # length and anchors of each

documents = st.lists(
    st.integers(1, 30).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), unique=True, max_size=7).map(sorted))
    ),
    min_size=1,
    max_size=5,
).filter(lambda docs: any(anchors for _, anchors in docs))


def by_the_rule(
    docs: Documents, starts: list[int], query: Tensor, own: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor]
) -> Tensor:
    """Each slot and head asks each key in words: my document before my anchor? my own block?"""
    flat_key, flat_value = (t.flatten(0, 1) for t in context)
    block_size = query.shape[1]
    blocks = [(doc, anchor) for doc, (_, anchors) in enumerate(docs) for anchor in anchors]
    out = torch.zeros_like(query)
    for n, (doc, anchor) in enumerate(blocks):
        for k in range(block_size):
            for head in range(HEADS):
                key_head = head * KEY_HEADS // HEADS
                keys, values = [], []
                for other, (length, _) in enumerate(docs):
                    for t in range(length):
                        if other == doc and t < anchor:
                            keys.append(flat_key[starts[other] + t, key_head])
                            values.append(flat_value[starts[other] + t, key_head])
                for m in range(len(blocks)):
                    for j in range(block_size):
                        if m == n:
                            keys.append(own[0][m, j, key_head])
                            values.append(own[1][m, j, key_head])
                scores = torch.stack([query[n, k, head] @ key for key in keys]) / math.sqrt(DIM)
                shares = torch.exp(scores - scores.max())
                out[n, k, head] = (shares / shares.sum()) @ torch.stack(values)
    return out


def layout(docs: Documents, packed: bool) -> tuple[list[int], int, int]:
    """Where documents begin among the positions; rows; length of a row, a little padding included."""
    lengths = [length for length, _ in docs]
    if packed:
        return [sum(lengths[:i]) for i in range(len(docs))], 1, sum(lengths) + 2
    longest = max(lengths) + 2
    return [i * longest for i in range(len(docs))], len(docs), longest


@pytest.mark.parametrize("backend", ["grouped", "dense"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@settings(max_examples=12, deadline=None)
@given(docs=documents, block_size=st.integers(1, 5), seed=st.integers(0, 100), slots=st.sampled_from([1, 8, 256]))
def test_a_backend_computes_the_rule(
    backend: str, packed: bool, docs: Documents, block_size: int, seed: int, slots: int
) -> None:
    torch.manual_seed(seed)
    starts, rows, row_length = layout(docs, packed)
    num_blocks = sum(len(anchors) for _, anchors in docs)
    query = torch.randn(num_blocks, block_size, HEADS, DIM, dtype=torch.float64)
    own_key, own_value = torch.randn(2, num_blocks, block_size, KEY_HEADS, DIM, dtype=torch.float64).unbind()
    context_key, context_value = torch.randn(2, rows, row_length, KEY_HEADS, DIM, dtype=torch.float64).unbind()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash.drafter.grouped_attention.GROUP_SLOTS", slots)  # so that documents have several groups
        attention = block_attention(
            backend,
            torch.tensor([a for _, anchors in docs for a in anchors]),
            torch.tensor([start for start, (_, anchors) in zip(starts, docs, strict=True) for _ in anchors]),
            num_rows=rows, row_length=row_length, block_size=block_size,
        )  # fmt: skip
    inputs = [t.requires_grad_() for t in (query, own_key, own_value, context_key, context_value)]
    got = attention(*inputs)
    expected = by_the_rule(docs, starts, query, (own_key, own_value), (context_key, context_value))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    upstream = torch.randn_like(got)
    for ours, theirs in zip(
        torch.autograd.grad(got, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_more_blocks_than_a_group_holds_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    anchors, starts = torch.arange(0, 40, 2), torch.zeros(20, dtype=torch.long)
    inputs = [
        torch.randn(20, 4, HEADS, DIM), *torch.randn(2, 20, 4, KEY_HEADS, DIM), *torch.randn(2, 1, 50, KEY_HEADS, DIM),
    ]  # fmt: skip
    results = []
    for slots in (4, 12, 1000):
        monkeypatch.setattr("dflash.drafter.grouped_attention.GROUP_SLOTS", slots)
        attention = block_attention("grouped", anchors, starts, num_rows=1, row_length=50, block_size=4)
        results.append(attention(*inputs))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])


@settings(max_examples=15, deadline=None)
@given(docs=documents, block_size=st.integers(1, 5), tile=st.sampled_from([2, 4, 16]))
def test_tiles_of_keys_that_flex_passes_over_hold_nothing_to_see(docs: Documents, block_size: int, tile: int) -> None:
    starts, rows, row_length = layout(docs, packed=True)
    blocks = [(start, anchor) for start, (_, anchors) in zip(starts, docs, strict=True) for anchor in anchors]
    begin, num_positions = torch.tensor([start for start, _ in blocks]), rows * row_length
    end = begin + torch.tensor([anchor for _, anchor in blocks])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash.drafter.flex_block_attention.TILE", tile)
        tiles = tiles_seen(begin, end, num_positions=num_positions, block_size=block_size)
    num_slots = len(blocks) * block_size
    assert tiles.shape == (-(-num_slots // tile), -(-(num_positions + num_slots) // tile))
    for slot in range(num_slots):
        start, anchor = blocks[slot // block_size]
        own = num_positions + slot // block_size * block_size
        for key in [*range(start, start + anchor), *range(own, own + block_size)]:
            assert tiles[slot // tile, key // tile]
    # Documents are few and short here, but what lies behind all that a tile sees is never taken.
    furthest = max(range(len(blocks)), key=lambda n: int(end[n]))
    assert not tiles[:, int(end[furthest] + tile - 1) // tile : num_positions // tile].any()


@pytest.mark.parametrize("block_size", [8, 16])
def test_flex_attends_as_dense_does(block_size: int) -> None:
    # Without the compiler, and forward alone: on a CPU torch has no backward pass of it. See tests/gpu.
    torch.manual_seed(0)
    anchors, starts = torch.tensor([0, 7, 200, 3, 150, 1]), torch.tensor([0, 0, 0, 240, 240, 400])
    inputs = [
        torch.randn(6, block_size, HEADS, 16),
        *torch.randn(2, 6, block_size, KEY_HEADS, 16), *torch.randn(2, 1, 430, KEY_HEADS, 16),
    ]  # fmt: skip
    shape = {"num_rows": 1, "row_length": 430, "block_size": block_size}
    with torch.no_grad():
        flex, dense = (block_attention(b, anchors, starts, **shape)(*inputs) for b in ("flex", "dense"))
    torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-5)


def test_auto_takes_what_the_device_can() -> None:
    cpu, cuda, mps = torch.device("cpu"), torch.device("cuda"), torch.device("mps")
    assert choose_backend("auto", cpu, torch.float32, 64) == "grouped"
    assert choose_backend("auto", cuda, torch.bfloat16, 64) == "flex"
    assert choose_backend("auto", cuda, torch.float64, 64) == "grouped"
    assert choose_backend("auto", cuda, torch.bfloat16, 8) == "grouped"
    assert choose_backend("auto", mps, torch.bfloat16, 64) == "grouped"
    assert choose_backend("grouped", cuda, torch.bfloat16, 64) == "grouped"
    with pytest.raises(ValueError, match=r"drafter\.attention=flex trains on CUDA only, not on cpu.*attention=auto"):
        choose_backend("flex", cpu, torch.float32, 64)


def test_an_unknown_backend_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"drafter\.attention='gruoped' is unknown: .* Did you mean grouped\?"):
        check_backend("gruoped")
