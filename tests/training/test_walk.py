"""The walk against a loop that drafts one block at a time, as decoding would, from what is known by then."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash.batch import Batch
from dflash.drafter.network import DFlashDrafter
from dflash.target.ends import TargetEnds
from dflash.training.walk import walk, walk_batch
from tests.training.tiny import MASK_ID, make_batch, tiny_drafter, tiny_ends


def decode_on_known_text(drafter: DFlashDrafter, ends: TargetEnds, batch: Batch, doc: int) -> tuple[int, int]:
    """Follow every response of one sample: draft, accept what agrees with the text, add the text's next token."""
    assert batch.hidden is not None
    length = int(batch.lengths[doc])
    text, mask = batch.input_ids[doc, :length].tolist(), batch.loss_mask[doc, :length].tolist()
    emitted = rounds = 0
    response_starts = [t for t in range(length) if mask[t] and (t == 0 or not mask[t - 1])]
    for at in response_starts:
        end = at
        while end + 1 < length and mask[end + 1]:
            end += 1
        while at < end:
            block = torch.tensor([[text[at]] + [MASK_ID] * (drafter.block_size - 1)])
            states = drafter(
                batch.hidden[doc : doc + 1, :at],  # nothing later exists
                ends.embedding[block],
                torch.tensor([at]),
                torch.tensor([0]),
            )
            drafted = (states[0] @ ends.head.T).argmax(dim=-1).tolist()
            accepted = 0
            for k in range(1, drafter.block_size):
                if at + k > end or drafted[k] != text[at + k]:
                    break
                accepted += 1
            produced = min(accepted + 1, end - at)  # the last round may need no token of the target's own
            emitted, rounds, at = emitted + produced, rounds + 1, at + accepted + 1
    return emitted, rounds


def test_the_walk_is_what_decoding_one_block_at_a_time_finds() -> None:
    torch.manual_seed(0)
    drafter, ends = tiny_drafter(), tiny_ends()
    masks = ["..xxxxxxxxxxxxxx", "...xxxx..xxxxxx.", "xxxxx", "....", "....x..xx"]
    batch = make_batch(masks, [[]] * 5, pad_to=20)
    # Let the drafter be right often: replace text by what it drafts, left to right, at two of three places.
    for doc, mask in enumerate(masks):
        for t in range(1, len(mask)):
            if mask[t] == "x" and t % 3:
                block = torch.tensor([[int(batch.input_ids[doc, t - 1])] + [MASK_ID] * 3])
                assert batch.hidden is not None
                states = drafter(
                    batch.hidden[doc : doc + 1, : t - 1],
                    ends.embedding[block],
                    torch.tensor([t - 1]),
                    torch.tensor([0]),
                )
                batch.input_ids[doc, t] = (states[0, 1] @ ends.head.T).argmax()
    expected = [decode_on_known_text(drafter, ends, batch, doc) for doc in range(5)]
    assert sum(rounds for _, rounds in expected) < 0.9 * sum(tokens for tokens, _ in expected), "too few accepted"
    for blocks_at_a_time in (1, 3, 100):
        tokens, rounds = walk_batch(drafter, ends, batch, blocks_at_a_time)
        assert list(zip(tokens.tolist(), rounds.tolist(), strict=True)) == expected


@given(st.lists(st.booleans(), max_size=40), st.randoms(use_true_random=False))
def test_a_walk_produces_every_response_token_but_the_first_of_each_run(mask: list[bool], random: object) -> None:
    left_in_run = [0] * len(mask)
    for t in reversed(range(len(mask) - 1)):
        left_in_run[t] = left_in_run[t + 1] + 1 if mask[t] and mask[t + 1] else 0
    matched = [random.randint(0, min(3, left)) for left in left_in_run]  # type: ignore[attr-defined]
    tokens, rounds = walk(matched, mask)
    runs = "".join("x" if m else "." for m in mask).split(".")
    assert tokens == sum(max(len(run) - 1, 0) for run in runs)
    assert tokens <= 4 * rounds
    assert rounds <= tokens
