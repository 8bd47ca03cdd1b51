"""The drafter's cached blocks against its training forward, and decoding against the walk."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from dflash.batch import Batch
from dflash.decoding.block_drafter import BlockDrafter
from dflash.decoding.speculative import decode
from dflash.decoding.transcript import DecodingOptions
from dflash.drafter.config import DrafterOptions, drafter_config
from dflash.drafter.network import DFlashDrafter
from dflash.target.ends import target_ends
from dflash.target.frozen import FrozenTarget
from dflash.training.walk import walk_batch
from tests.models import GROUPED, random_model
from tests.training.tiny import CAPTURED, MASK_ID, WIDTH, tiny_drafter, tiny_ends


@given(pieces=st.lists(st.integers(1, 5), min_size=1, max_size=6), block_size=st.integers(2, 4))
@settings(deadline=None, max_examples=30)
def test_a_block_behind_cached_pieces_is_the_block_behind_the_whole_context(pieces: list[int], block_size: int) -> None:
    torch.manual_seed(0)
    drafter, ends = tiny_drafter(), tiny_ends()
    hidden = torch.randn(1, sum(pieces) + 3, CAPTURED * WIDTH, dtype=torch.float64)
    cached = BlockDrafter(drafter, ends, block_size)
    cached.read(hidden[:, :7])  # of another sequence
    cached.start()
    for piece in hidden[:, : sum(pieces)].split(pieces, dim=1):
        cached.read(piece)
    block = torch.tensor([[3] + [MASK_ID] * (block_size - 1)])
    # In training the context goes on behind the anchor, and must not be seen.
    states = drafter(hidden, ends.embed(block), torch.tensor([sum(pieces)]), torch.tensor([0]))
    torch.testing.assert_close(cached.logits(3), ends.logits(states[0, 1:]))


def test_only_the_drafters_forwards_run_in_its_precision() -> None:
    """Training runs the target outside autocast, and the drafter has learned from such states."""
    target = FrozenTarget(random_model(LlamaConfig(**GROUPED)), [0, 2])
    drafter = fitted_drafter(target, list(range(3, 40)), 4)
    entered = 0

    def refuse(*_: object) -> None:
        pytest.fail("the target ran in the drafter's precision")

    @contextmanager
    def precision() -> Iterator[None]:
        nonlocal entered
        entered += 1
        handle = target.model.register_forward_pre_hook(refuse)
        yield
        handle.remove()

    block_drafter = BlockDrafter(drafter, target_ends(target.model), precision=precision)
    transcript = decode(target, block_drafter, [5, 6, 7], DecodingOptions([96], 9))
    assert entered == 2 * transcript.num_rounds


@pytest.mark.parametrize("block_size", [1, 5, 0, True, 2.5])
def test_a_block_size_beyond_training_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=r"block_size=.*from 2 to 4"):
        BlockDrafter(tiny_drafter(), tiny_ends(), block_size)


def fitted_drafter(target: FrozenTarget, text: list[int], num_prompt: int) -> DFlashDrafter:
    """A drafter that has half learned one text by heart: sometimes right, sometimes wrong."""
    ends = target_ends(target.model)
    options = DrafterOptions(block_size=4, num_layers=1, num_captured=2, target_layer_ids=[0, 2])
    drafter = DFlashDrafter(drafter_config(options, target.model.config, mask_token_id=96))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    ids = torch.tensor(text)
    hidden = target.hidden_states(ids[None])
    anchors = torch.arange(num_prompt, len(text) - 4)[::2]  # every other one: what lies between stays unlearned
    blocks = torch.full((len(anchors), 4), 96)
    blocks[:, 0] = ids[anchors]
    labels = torch.stack([ids[anchors + k] for k in range(1, 4)], dim=1)
    for _ in range(25):
        states = drafter(hidden, ends.embed(blocks), anchors, torch.zeros_like(anchors))
        loss = torch.nn.functional.cross_entropy(ends.logits(states[:, 1:]).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.requires_grad_(False)


def test_on_the_greedy_text_the_walk_finds_what_decoding_accepts_block_for_block() -> None:
    target = FrozenTarget(random_model(LlamaConfig(**GROUPED)), [0, 2])
    ends = target_ends(target.model)
    prompt, options = [5, 17, 40, 8], DecodingOptions([96], max_new_tokens=90)
    text = prompt + decode(target, None, prompt, options).token_ids
    drafter = fitted_drafter(target, text, len(prompt))
    transcript = decode(target, BlockDrafter(drafter, ends), prompt, options)
    assert prompt + transcript.token_ids == text
    assert len(set(transcript.matched)) > 2, "blocks of several lengths were accepted"

    ids = torch.tensor([text])
    batch = Batch(
        input_ids=ids,
        loss_mask=torch.tensor([[t >= len(prompt) for t in range(len(text))]]),
        lengths=torch.tensor([len(text)]),
        sample_ids=torch.tensor([0]),
        anchors=torch.empty(0, dtype=torch.long),
        anchor_doc=torch.empty(0, dtype=torch.long),
        hidden=target.hidden_states(ids),
    )
    # Block for block: each round's anchor, drafted by the training forward on the known text.
    anchor = len(prompt)
    for matched in transcript.matched[:-1]:
        block = torch.tensor([[text[anchor], 96, 96, 96]])
        states = drafter(batch.hidden, ends.embed(block), torch.tensor([anchor]), torch.tensor([0]))
        drafted = ends.logits(states[0, 1:]).argmax(dim=-1).tolist()
        right = [a == b for a, b in zip(drafted, text[anchor + 1 : anchor + 4], strict=True)]
        assert matched == (right.index(False) if False in right else 3)
        anchor += matched + 1
    # And the walk's own sums.
    tokens, rounds = walk_batch(drafter, ends, batch, blocks_at_a_time_per_doc=16)
    assert (int(tokens[0]), int(rounds[0])) == (sum(transcript.emitted), transcript.num_rounds)
