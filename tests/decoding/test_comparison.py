"""Figures of an evaluation, from transcripts written by hand and from a target whose text is known."""

import pytest
import torch
from transformers import LlamaConfig

from dflash.decoding.comparison import (
    Comparison,
    Divergence,
    Prompt,
    PromptOutcome,
    compare_decoding,
    find_divergence,
)
from dflash.decoding.transcript import DecodingOptions, Transcript
from dflash.target.frozen import FrozenTarget
from tests.decoding.drafters import greedy_text, scripts
from tests.models import GROUPED, random_model


def outcome(
    emitted: list[int], matched: list[int], *, prompt_tokens: int, divergence: Divergence | None = None
) -> PromptOutcome:
    text = list(range(1 + sum(emitted)))
    ours = Transcript(text, emitted, matched, drafter_seconds=1.0, target_seconds=2.5, other_seconds=0.5)
    plain = Transcript(text, [1] * sum(emitted), [0] * sum(emitted), target_seconds=6.0)
    return PromptOutcome(Prompt("a.jsonl:1", [0] * prompt_tokens), ours, plain, divergence)


def test_figures_are_sums_over_sums() -> None:
    outcomes = [
        outcome([1, 3, 2], [0, 2, 2], prompt_tokens=50),  # the limit cut the last block behind two right drafts
        outcome([3], [2], prompt_tokens=70),
        outcome([], [], prompt_tokens=200),  # ended with its first token
    ]
    figures = Comparison(outcomes, block_size=3, greedy=True).figures()
    assert figures["acceptance_length"] == (6 + 3) / 4
    assert figures["acceptance_by_slot"] == [3 / 4, 3 / 4]
    assert figures["acceptance_histogram"] == [1, 1, 2]
    assert figures["tokens_per_s"] == 9 / 12
    assert figures["baseline_tokens_per_s"] == 9 / 18
    assert figures["speedup"] == pytest.approx(1.5)
    assert (figures["lossless"], figures["prompts"], figures["rounds"]) == (True, 3, 4)
    # By length of prompt and text: 57, 74 and 201 tokens.
    assert {name: part["prompts"] for name, part in figures["by_length"].items()} == {
        "0032-0063": 1, "0064-0127": 1, "0128-0255": 1,
    }  # fmt: skip
    assert figures["by_length"]["0064-0127"]["acceptance_length"] == 3.0
    assert figures["by_length"]["0128-0255"]["acceptance_length"] is None
    assert [row["acceptance_length"] for row in figures["by_prompt"]] == [2.0, 3.0, None]


@pytest.mark.parametrize(
    ("gap", "word", "lossless"),
    [(0.0, "near-tie", True), (9e-5, "near-tie", True), (1.1e-4, "no", False), (None, "no", False)],
)
def test_only_a_near_tie_leaves_a_parted_text_lossless(gap: float | None, word: str, lossless: bool) -> None:
    parted = outcome([2], [1], prompt_tokens=5, divergence=Divergence(1, gap))
    figures = Comparison([outcome([2], [1], prompt_tokens=5), parted], block_size=2, greedy=True).figures()
    assert figures["lossless"] is lossless
    assert [row["lossless"] for row in figures["by_prompt"]] == ["yes", word]
    assert figures["by_prompt"][1]["divergence"] == {"index": 1, "gap": gap}


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(random_model(LlamaConfig(**GROUPED)), [0])


def test_a_divergence_is_found_with_how_far_the_target_prefers_one_of_the_tokens(target: FrozenTarget) -> None:
    prompt = Prompt("p", [4, 9, 30])
    text = greedy_text(target, prompt.token_ids, 12, [96])
    wrong = [*text[:7], (text[7] + 1) % 97, *text[8:]]
    assert find_divergence(target, prompt, Transcript(text), Transcript(text)) is None
    found = find_divergence(target, prompt, Transcript(wrong), Transcript(text))
    logits = target.model(torch.tensor([prompt.token_ids + text[:7]])).logits[0, -1]
    assert found is not None
    assert found.index == 7
    assert found.gap == pytest.approx(float(logits.max() - logits[wrong[7]]), rel=1e-4)


def test_a_text_that_is_the_beginning_of_the_other_is_no_near_tie(target: FrozenTarget) -> None:
    prompt = Prompt("p", [4, 9, 30])
    text = greedy_text(target, prompt.token_ids, 12, [96])
    shorter = find_divergence(target, prompt, Transcript(text[:5]), Transcript(text))
    assert shorter == Divergence(5, None)
    assert not shorter.is_near_tie


def test_both_ways_decode_the_same_prompts_in_turns(target: FrozenTarget) -> None:
    prompts = [Prompt(f"p{i}", [3 + i, 50, 7]) for i in range(3)]
    texts = {p.source: greedy_text(target, p.token_ids, 20, [96]) for p in prompts}
    # One script for all: right for the first prompt, whatever for the others.
    drafter = scripts(prompts[0].token_ids + texts["p0"], 4, 97, 96)["always right"]
    seen: list[str] = []
    options = DecodingOptions([96], 20)

    def note(done: PromptOutcome) -> None:
        seen.append(done.prompt.source)

    comparison = compare_decoding(target, drafter, prompts, options, block_size=4, on_prompt=note)
    assert seen == ["p0", "p1", "p2"]
    assert comparison.lossless is True
    for one in comparison.outcomes:
        assert one.speculative.token_ids == one.plain.token_ids == texts[one.prompt.source]
        assert one.plain.emitted == [1] * 19
    assert comparison.outcomes[0].speculative.emitted == [4, 4, 4, 4, 3]
    assert all(one.speculative.seconds > 0 and one.plain.seconds > 0 for one in comparison.outcomes)


def test_sampled_texts_are_not_called_lossless_or_lossy(target: FrozenTarget) -> None:
    drafter = scripts([3, 50, 7] + [1] * 20, 4, 97, 96)["repeating"]
    options = DecodingOptions([96], 10, temperature=1.0)
    figures = compare_decoding(target, drafter, [Prompt("p", [3, 50, 7])], options, block_size=4).figures()
    assert figures["lossless"] is None
    assert figures["by_prompt"][0]["lossless"] is None
