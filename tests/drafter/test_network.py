"""The drafter in decoding is the drafter in training."""

import pytest
import torch

from tests.training.tiny import MASK_ID, make_batch, tiny_drafter, tiny_ends


def test_a_block_in_training_is_the_block_of_step_by_step_decoding_with_a_kv_cache() -> None:
    torch.manual_seed(0)
    drafter, ends = tiny_drafter(), tiny_ends()
    text_length = 15
    batch = make_batch(["." * 3 + "x" * 12, "." * 5 + "x" * 6], [[3, 4, 9, 13], [5, 8]], pad_to=18)
    assert batch.hidden is not None
    token_ids = torch.full((6, 4), MASK_ID)
    token_ids[:, 0] = batch.input_ids[batch.anchor_doc, batch.anchors]
    trained = drafter(
        batch.hidden, ends.embed(token_ids), batch.anchors, batch.starts[batch.anchor_doc], batch.position_ids
    )

    # Decode the first text: the prefill's states first, then a few new positions a round, each projected once and kept.
    cache: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    known = 0
    for n, anchor in enumerate([3, 4, 9, 13]):
        fresh = drafter.project_context(batch.hidden[:1, known:anchor], torch.arange(known, anchor)[None])
        if cache is None:
            cache = fresh
        else:
            cache = [
                (torch.cat([old_k, new_k], dim=1), torch.cat([old_v, new_v], dim=1))
                for (old_k, old_v), (new_k, new_v) in zip(cache, fresh, strict=True)
            ]
        known = anchor
        decoded = drafter.denoise(ends.embed(token_ids[n : n + 1]), cache, torch.tensor([anchor]), torch.tensor([0]))
        torch.testing.assert_close(decoded[0], trained[n], rtol=1e-12, atol=1e-12)
    assert known < text_length


def test_the_tensors_bear_the_published_names() -> None:
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for i in range(2):
        expected |= {f"layers.{i}.{name}_layernorm.weight" for name in ("input", "post_attention")}
        expected |= {f"layers.{i}.self_attn.{name}_proj.weight" for name in "qkvo"}
        expected |= {f"layers.{i}.self_attn.{name}_norm.weight" for name in "qk"}
        expected |= {f"layers.{i}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert set(tiny_drafter(num_layers=2).state_dict()) == expected


def test_a_drafter_layer_is_the_servers_qwen3_layer_when_there_is_no_context() -> None:
    """Qwen3's own code, run on a block alone without a causal mask, is an independent statement of the layer."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

    torch.manual_seed(0)
    drafter = tiny_drafter(num_layers=1).float()
    config = drafter.config
    config._attn_implementation = "eager"
    theirs = Qwen3DecoderLayer(config, layer_idx=0).eval()
    theirs.load_state_dict(drafter.layers[0].state_dict())
    block = torch.randn(1, 4, 8)
    positions = torch.arange(4)[None]
    rotation = Qwen3RotaryEmbedding(config)(block, positions)
    expected = theirs(block, attention_mask=None, position_embeddings=rotation)
    expected = expected[0] if isinstance(expected, tuple) else expected
    hidden = torch.randn(1, 1, 16)  # at position 0, so not before anchor 0: never seen
    ours = drafter(hidden, block, torch.tensor([0]), torch.tensor([0]))
    torch.testing.assert_close(ours, torch.nn.functional.rms_norm(expected, (8,), drafter.norm.weight, 1e-5))


def test_an_untrained_drafters_logits_have_unit_variance_whatever_the_heads_scale() -> None:
    torch.manual_seed(0)
    drafter, head = tiny_drafter(), 5.0 * torch.randn(4000, 8, dtype=torch.float64)
    drafter.scale_initial_logits(head)
    states = drafter.norm(torch.randn(500, 8, dtype=torch.float64))
    assert float((states @ head.T).var()) == pytest.approx(1.0, rel=0.05)
