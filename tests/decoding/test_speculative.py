"""Greedy speculative text is the target's own, whatever drafts it."""

import pytest
import torch
from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen3Config

from dflash.decoding.speculative import decode
from dflash.decoding.transcript import DecodingOptions, Transcript
from dflash.target.frozen import FrozenTarget
from tests.decoding.drafters import ScriptedDrafter, greedy_text, scripts
from tests.models import GROUPED, SIZES, random_model

VOCAB = SIZES["vocab_size"]
# A window of 8 tokens slides many times within the texts below.
_GEMMA = {**GROUPED, "query_pre_attn_scalar": 8, "sliding_window": 8}
_HYBRID = ["sliding_attention", "full_attention"] * 2
TARGETS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "llama tied": LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**GROUPED),
    "qwen3 tied": Qwen3Config(**GROUPED, tie_word_embeddings=True),
    "gemma2 soft-cap": Gemma2Config(**_GEMMA, final_logit_softcapping=5.0, layer_types=_HYBRID),
    "gemma3": Gemma3TextConfig(**_GEMMA, layer_types=_HYBRID),
    "gemma3 untied": Gemma3TextConfig(**_GEMMA, layer_types=["sliding_attention"] * 4, tie_word_embeddings=False),
}  # fmt: skip
STOP = 2
NEW_TOKENS = 24


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (1, 5, 20)]


def same_up_to_near_ties(target: FrozenTarget, prompt: list[int], ours: list[int], theirs: list[int]) -> bool:
    """Equal, or parted where the target's two best logits lie within 1e-4: asked of the model without any cache."""
    if ours == theirs:
        return True
    index = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    logits = target.model(torch.tensor([prompt + theirs[:index]]), use_cache=False).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    print(f"near-tie after {index} tokens: {best - second:.1e}")
    return best - second <= 1e-4


@pytest.mark.parametrize("name", TARGETS)
def test_greedy_text_is_the_targets_own_whatever_drafts_it(name: str) -> None:
    target = FrozenTarget(random_model(TARGETS[name]), [0, 2])
    options = DecodingOptions([STOP], NEW_TOKENS)
    rounds: dict[str, int] = {}
    for prompt in prompts():
        theirs = greedy_text(target, prompt, NEW_TOKENS, [STOP])
        for script, drafter in scripts(prompt + theirs, 4, VOCAB, STOP).items():
            transcript = decode(target, drafter, prompt, options)
            assert same_up_to_near_ties(target, prompt, transcript.token_ids, theirs), script
            rounds[script] = rounds.get(script, 0) + transcript.num_rounds
        assert same_up_to_near_ties(target, prompt, decode(target, None, prompt, options).token_ids, theirs)
    assert rounds["always right"] < rounds["right for a while"] < rounds["always wrong"]


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_drafter_reads_the_targets_states_of_the_whole_text_in_order(name: str) -> None:
    target = FrozenTarget(random_model(TARGETS[name]), [0, 2])
    prompt = prompts()[1]
    theirs = greedy_text(target, prompt, NEW_TOKENS, [STOP])
    drafter = scripts(prompt + theirs, 4, VOCAB, STOP)["right for a while"]
    transcript = decode(target, drafter, prompt, DecodingOptions([STOP], NEW_TOKENS))
    read = torch.cat(drafter.pieces, dim=1)
    # In one pass without a cache; the last round's tokens are never read.
    whole = target.hidden_states(torch.tensor([prompt + transcript.token_ids]))
    assert read.shape[1] == len(prompt) + len(transcript.token_ids) - 1 - transcript.emitted[-1]
    torch.testing.assert_close(read, whole[:, : read.shape[1]], atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def llama() -> FrozenTarget:
    return FrozenTarget(random_model(TARGETS["llama"]), [1])


def right_drafter(target: FrozenTarget, prompt: list[int], block_size: int) -> tuple[ScriptedDrafter, list[int]]:
    text = greedy_text(target, prompt, 60, [VOCAB - 1])  # a stop token that does not come
    return scripts(prompt + text, block_size, VOCAB, STOP)["always right"], text


@pytest.mark.parametrize("block_size", [2, 3, 8])
def test_a_right_drafter_fills_every_round_and_a_wrong_one_none(llama: FrozenTarget, block_size: int) -> None:
    prompt = prompts()[2]
    drafter, text = right_drafter(llama, prompt, block_size)
    transcript = decode(llama, drafter, prompt, DecodingOptions([VOCAB - 1], 41))
    full, rest = divmod(40, block_size)
    assert transcript.emitted == [block_size] * full + [rest] * (rest > 0)
    assert transcript.matched == [block_size - 1] * full + [rest] * (rest > 0)
    wrong = scripts(prompt + text, block_size, VOCAB, STOP)["always wrong"]
    transcript = decode(llama, wrong, prompt, DecodingOptions([VOCAB - 1], 41))
    assert (transcript.emitted, transcript.matched) == ([1] * 40, [0] * 40)


def test_text_ends_with_the_first_stop_token_wherever_in_a_block_it_lies(llama: FrozenTarget) -> None:
    prompt = prompts()[2]
    drafter, text = right_drafter(llama, prompt, 4)
    seen: set[int] = set()
    for index in range(1, 30):
        if text[index] in text[:index]:
            continue
        transcript = decode(llama, drafter, prompt, DecodingOptions([text[index]], 60))
        assert transcript.token_ids == text[: index + 1]
        assert sum(transcript.emitted) == index
        seen.add(index % 4)
    assert len(seen) > 1, "the stop tokens lie at several places of a block"


def test_a_text_of_one_token_has_no_round(llama: FrozenTarget) -> None:
    prompt = prompts()[2]
    drafter, text = right_drafter(llama, prompt, 4)
    for options in (DecodingOptions([VOCAB - 1], 1), DecodingOptions([text[0]], 30)):
        transcript = decode(llama, drafter, prompt, options)
        assert transcript.token_ids == text[:1]
        assert (transcript.num_rounds, transcript.emitted) == (0, [])


def test_a_prompt_that_leaves_too_few_positions_is_refused(llama: FrozenTarget) -> None:
    with pytest.raises(ValueError, match=r"prompt of 2040 tokens and max_new_tokens=20 exceed the target's 2048"):
        decode(llama, None, [5] * 2040, DecodingOptions([STOP], 20))
    with pytest.raises(ValueError, match="no token"):
        decode(llama, None, [], DecodingOptions([STOP], 20))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"temperature": float("nan")}, "temperature=nan"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecodingOptions([STOP], **options)  # type: ignore[arg-type]


def test_a_round_is_cut_at_limit_and_stop() -> None:
    options = DecodingOptions([9], max_new_tokens=6)
    transcript = Transcript(token_ids=[1])
    transcript.add([2, 3], 1, options)
    assert not transcript.is_complete(options)
    transcript.add([4, 5, 6, 7], 3, options)  # room for three
    assert (transcript.token_ids, transcript.emitted, transcript.matched) == ([1, 2, 3, 4, 5, 6], [2, 3], [1, 3])
    assert transcript.is_complete(options)
    transcript = Transcript(token_ids=[1])
    transcript.add([2, 9, 9, 4], 3, options)
    assert (transcript.token_ids, transcript.emitted, transcript.matched) == ([1, 2, 9], [2], [2])
    assert transcript.is_complete(options)
