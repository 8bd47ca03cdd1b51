"""The frozen target against transformers' own account of itself, on random models of several architectures."""

import pytest
import torch
from transformers import GPT2Config

from dflash.target.ends import target_ends
from dflash.target.frozen import FrozenTarget, resolve_mask_token_id
from dflash.target.layers import spaced_layer_ids
from dflash.target.tiny import build_tiny_model, build_tiny_tokenizer
from tests.models import ARCHITECTURES, random_model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_captured_layer_is_the_next_entry_of_transformers_hidden_states(name: str) -> None:
    model = random_model(ARCHITECTURES[name])
    input_ids = torch.randint(3, 97, (2, 9))
    theirs = model(input_ids, output_hidden_states=True).hidden_states
    ours = FrozenTarget(model, [2, 0]).hidden_states(input_ids)
    torch.testing.assert_close(ours, torch.cat([theirs[3], theirs[1]], dim=-1))


def test_the_last_layer_is_captured_before_the_final_norm() -> None:
    model = random_model(ARCHITECTURES["llama"])
    input_ids = torch.randint(3, 97, (1, 9))
    ours = FrozenTarget(model, [3]).hidden_states(input_ids)
    normed = model(input_ids, output_hidden_states=True).hidden_states[4]
    assert not torch.allclose(ours, normed)
    torch.testing.assert_close(model.model.norm(ours), normed)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_padding_on_the_right_changes_no_real_position(name: str) -> None:
    target = FrozenTarget(random_model(ARCHITECTURES[name]), [0, 2])
    ids = torch.randint(3, 97, (2, 12))
    padded = torch.cat([ids[:1, :7], torch.zeros(1, 5, dtype=torch.long)], dim=1)
    together = target.hidden_states(torch.cat([padded, ids[1:]]))
    torch.testing.assert_close(together[:1, :7], target.hidden_states(ids[:1, :7]), rtol=1e-5, atol=1e-5)


def test_nothing_above_the_last_captured_layer_runs() -> None:
    model = random_model(ARCHITECTURES["llama"])
    ran = []
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *_, i=i: ran.append(i))
    model.lm_head.register_forward_pre_hook(lambda *_: ran.append("head"))
    FrozenTarget(model, [1]).hidden_states(torch.randint(3, 97, (1, 5)))
    assert ran == [0, 1]


def test_the_target_is_in_eval_mode_without_gradients_and_leaves_no_hooks() -> None:
    model = random_model(ARCHITECTURES["qwen3"]).train().requires_grad_(True)
    target = FrozenTarget(model, [1])
    states = target.hidden_states(torch.randint(3, 97, (1, 5)))
    assert not isinstance(target, torch.nn.Module)
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not states.requires_grad
    assert not states.is_inference(), "inference tensors can not be saved for backward"
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_ends_embed_and_predict_as_the_model_does(name: str) -> None:
    model = random_model(ARCHITECTURES[name])
    input_ids = torch.randint(3, 97, (2, 9))
    ends = target_ends(model)
    outputs = model(input_ids, output_hidden_states=True)
    torch.testing.assert_close(ends.embed(input_ids), outputs.hidden_states[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ends.logits(outputs.hidden_states[-1]), outputs.logits, rtol=1e-4, atol=1e-4)


def test_scales_and_soft_cap_are_found() -> None:
    gemma, granite = (target_ends(random_model(ARCHITECTURES[n])) for n in ("gemma2 with soft-cap", "granite"))
    assert gemma.embedding_scale == pytest.approx(32**0.5, rel=1e-3)
    assert gemma.logit_softcap == 0.5
    assert granite.embedding_scale == pytest.approx(12.0)
    assert granite.logit_scale == pytest.approx(1 / 8)
    llama = target_ends(random_model(ARCHITECTURES["llama"]))
    assert (llama.embedding_scale, llama.logit_scale, llama.logit_softcap) == (1.0, 1.0, None)


def test_a_target_that_adds_learned_positions_is_refused() -> None:
    gpt2 = random_model(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4))
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel does more to its token embedding"):
        target_ends(gpt2)


def test_evenly_spaced_layers_run_from_1_to_the_third_last() -> None:
    assert spaced_layer_ids(5, 36) == [1, 9, 17, 25, 33]  # the published drafter of Qwen3-8B
    assert spaced_layer_ids(5, 30)[0] == 1
    assert spaced_layer_ids(5, 30)[-1] == 27
    assert spaced_layer_ids(1, 30) == [15]
    with pytest.raises(ValueError, match=r"num_captured=5.*target's 4 layers.*target_layer_ids"):
        spaced_layer_ids(5, 4)


@pytest.mark.parametrize("ids", [[], [4], [-1], [1, 1]])
def test_layer_ids_out_of_range_or_repeated_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"target_layer_ids=.*distinct ids in 0\.\.3"):
        FrozenTarget(random_model(ARCHITECTURES["llama"]), ids)


def test_the_mask_token_is_explicit_else_the_tokenizers_else_an_unused_row_else_an_error() -> None:
    tokenizer = build_tiny_tokenizer()
    size = len(tokenizer)
    assert resolve_mask_token_id(7, tokenizer, size) == 7
    assert resolve_mask_token_id(None, tokenizer, size) == tokenizer.convert_tokens_to_ids("<|mask|>")
    with pytest.raises(ValueError, match=rf"target\.mask_token_id={size}: expected an id in 0\.\.{size - 1}"):
        resolve_mask_token_id(size, tokenizer, size)
    tokenizer.mask_token = None
    assert resolve_mask_token_id(None, tokenizer, size + 24) == size
    with pytest.raises(ValueError, match=r"target\.mask_token_id is null.*reserved token"):
        resolve_mask_token_id(None, tokenizer, size)


def test_the_tiny_target_is_the_same_at_every_call_and_spares_the_global_generator() -> None:
    torch.manual_seed(5)
    first = build_tiny_model()
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))
    for a, b in zip(first.parameters(), build_tiny_model().parameters(), strict=True):
        assert torch.equal(a, b)
