"""Sampled speculative text is distributed as the target's."""

from itertools import product

import torch
from torch import Tensor
from transformers import LlamaConfig

from dflash.decoding.acceptance import accept_greedy, accept_sampled
from dflash.decoding.speculative import decode
from dflash.decoding.transcript import DecodingOptions
from dflash.target.frozen import FrozenTarget
from tests.models import random_model

SMALL = LlamaConfig(
    vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8,
    bos_token_id=0, eos_token_id=4, pad_token_id=0,
)  # fmt: skip
# One run in ten thousand of a right sampler would fall below; the seeds are fixed, so it is the same run every time.
LEAST_P_VALUE = 1e-4


def chi_square_p_value(counts: Tensor, expected: Tensor) -> float:
    """Chance of a statistic at least as large. Cells that expect fewer than 5 are joined, as the test requires."""
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum(0, keepdim=True)])
    expected = torch.cat([expected[~rare], expected[rare].sum(0, keepdim=True)])
    keep = expected > 0
    assert counts[~keep].sum() == 0, "something came that can not come"
    statistic = ((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    return float(1 - torch.special.gammainc(torch.tensor((int(keep.sum()) - 1) / 2).double(), statistic.double() / 2))


class FixedDrafter:
    """The same three distributions in every round, unlike the target's."""

    def start(self) -> None: ...

    def read(self, hidden: Tensor) -> None: ...

    def logits(self, anchor_token: int) -> Tensor:
        return torch.tensor([[2.0, 0, 0, 1, 0], [0, 0, 3.0, 0, 0], [0, 1.0, 0, 0, 1]])


def test_sampled_texts_are_distributed_as_the_targets_own() -> None:
    target = FrozenTarget(random_model(SMALL), [0])
    prompt, length, temperature, num_texts, stop = [1, 3], 3, 0.7, 3000, 4
    # The chance of every text, token by token from the model without a cache. A text ends with its first stop token.
    chance: dict[tuple[int, ...], float] = {}
    for text in product(range(5), repeat=length):
        p, ended = 1.0, ()
        for i, token in enumerate(text):
            logits = target.model(torch.tensor([[*prompt, *text[:i]]]), use_cache=False).logits[0, -1].double()
            p *= float(torch.softmax(logits / temperature, dim=-1)[token])
            ended = (*ended, token)
            if token == stop:
                break
        chance[ended] = p
    assert abs(sum(chance.values()) - 1) < 1e-9

    drafter = FixedDrafter()
    seen = dict.fromkeys(chance, 0)
    emitted = []
    for seed in range(num_texts):
        transcript = decode(target, drafter, prompt, DecodingOptions([stop], length, temperature, seed))
        seen[tuple(transcript.token_ids)] += 1
        emitted += transcript.emitted
    assert 1 in emitted, "some drafts were rejected"
    assert 2 in emitted, "and some accepted"
    counts = torch.tensor([seen[text] for text in chance]).double()
    expected = torch.tensor(list(chance.values())).double() * num_texts
    assert chi_square_p_value(counts, expected) > LEAST_P_VALUE
    # The same test does see a sampler that is a little off: the target at another temperature.
    off = torch.tensor([p**0.8 for p in chance.values()]).double()
    assert chi_square_p_value(counts, off / off.sum() * num_texts) < LEAST_P_VALUE


def test_one_round_gives_every_token_its_chance_also_where_drafter_and_target_exclude_tokens() -> None:
    q = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]]).double()
    p = torch.tensor([[0.0, 0.3, 0.6, 0.1], [0.25, 0.25, 0.25, 0.25], [0.7, 0.0, 0.0, 0.3]]).double()
    generator = torch.Generator().manual_seed(0)
    num_rounds = 20_000
    first, second_after_accept, bonus = (torch.zeros(4).double() for _ in range(3))
    num_two = 0
    for _ in range(num_rounds):
        drafted = torch.multinomial(q, 1, generator=generator)[:, 0]
        tokens = accept_sampled(drafted, q, p, generator)
        first[tokens[0]] += 1
        if len(tokens) > 1:
            num_two += 1
            second_after_accept[tokens[1]] += 1
        if len(tokens) > 2:
            bonus[tokens[2]] += 1
    assert chi_square_p_value(first, p[0] * num_rounds) > LEAST_P_VALUE
    assert chi_square_p_value(second_after_accept, p[1] * num_two) > LEAST_P_VALUE
    assert chi_square_p_value(bonus, p[2] * bonus.sum()) > LEAST_P_VALUE
    # A draft is accepted with chance sum min(p, q) = 0.3: Leviathan et al., corollary 3.6.
    assert abs(num_two / num_rounds - 0.3) < 0.02


def test_drafts_like_the_target_are_all_accepted() -> None:
    p = torch.softmax(torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), dim=-1).double()
    generator = torch.Generator().manual_seed(2)
    for _ in range(200):
        drafted = torch.multinomial(p[:3], 1, generator=generator)[:, 0]
        tokens = accept_sampled(drafted, p[:3], p, generator)
        assert tokens[:3] == drafted.tolist()
        assert len(tokens) == 4


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    target = FrozenTarget(random_model(SMALL), [0])

    def text(seed: int) -> list[int]:
        return decode(target, FixedDrafter(), [1, 3], DecodingOptions([9], 20, 1.0, seed)).token_ids

    assert text(0) == text(0)
    assert text(0) != text(1)


def test_greedy_acceptance_is_the_matching_prefix_and_the_targets_next_token() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([3, 1, 4, 1]), 6).float()
    assert accept_greedy(torch.tensor([3, 1, 4]), logits) == [3, 1, 4, 1]
    assert accept_greedy(torch.tensor([3, 0, 4]), logits) == [3, 1]
    assert accept_greedy(torch.tensor([0, 1, 4]), logits) == [3]
    assert accept_greedy(torch.empty(0, dtype=torch.long), logits[:1]) == [3]
