"""Long samples read in pieces: the states are those of one pass."""

import pytest
import torch
from transformers import FalconH1Config, LlamaConfig, MistralConfig, Phi3Config, PretrainedConfig

from dflash.target.frozen import FrozenTarget
from tests.models import ARCHITECTURES, GROUPED, random_model

TARGETS: dict[str, PretrainedConfig] = {
    **ARCHITECTURES,
    "mistral, sliding window": MistralConfig(**GROUPED, sliding_window=4),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("chunk", [1, 4, 5, 7, 19, 20, 50])
def test_chunks_give_the_states_of_one_pass(name: str, chunk: int) -> None:
    model = random_model(TARGETS[name])
    ids = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(0))
    in_one_pass = FrozenTarget(model, [0, 2]).hidden_states(ids)
    passes = count_passes(model)
    in_chunks = FrozenTarget(model, [0, 2], prefill_chunk=chunk).hidden_states(ids)
    assert len(passes) == -(-20 // chunk)
    torch.testing.assert_close(in_chunks, in_one_pass, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [[3, 17, 2, 2], [17], [3, 4, 9, 30], [12, 12], [5, 8]])
def test_a_long_sample_of_a_packed_row_is_read_by_itself(lengths: list[int]) -> None:
    model = random_model(ARCHITECTURES["qwen3"])
    ids = torch.randint(3, 97, (1, sum(lengths) + 5), generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    whole = FrozenTarget(model, [0, 2]).hidden_states(ids, bounds)
    passes = count_passes(model)
    chunked = FrozenTarget(model, [0, 2], prefill_chunk=8).hidden_states(ids, bounds)
    assert chunked.shape == whole.shape
    total = sum(lengths)  # nobody reads what follows
    torch.testing.assert_close(chunked[:, :total], whole[:, :total], rtol=1e-5, atol=1e-5)
    # What is no longer than a chunk stays together with its neighbours.
    of_one_pass = "".join("L" if n > 8 else "s" for n in lengths).replace("L", " L ").split()
    of_long_ones = sum(-(-n // 8) for n in lengths if n > 8)
    assert len(passes) == of_long_ones + sum(1 for piece in of_one_pass if piece != "L")


_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
         "original_max_position_embeddings": 16}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name", "reason"),
    [
        (FalconH1Config(**GROUPED, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8), "falcon_h1", "it keeps a state"),
        (Phi3Config(**GROUPED, rope_parameters=_LONG), "phi3", "its rotary embedding changes with the longest"),
    ],
)
def test_a_target_that_can_not_be_read_in_pieces_is_refused(config: PretrainedConfig, name: str, reason: str) -> None:
    model = random_model(config)
    expected = rf"target\.prefill_chunk=8 is not exact for targets of the architecture {name}: {reason}.*chunk=null"
    with pytest.raises(ValueError, match=expected):
        FrozenTarget(model, [0, 2], prefill_chunk=8)
    with pytest.raises(ValueError, match=rf"sampler=packed is not exact for targets of the architecture {name}"):
        FrozenTarget(model, [0, 2]).check_packing()


def test_rows_that_would_change_a_shorter_samples_rotary_embedding_are_refused() -> None:
    config = Phi3Config(**GROUPED, rope_parameters=_LONG, original_max_position_embeddings=16)
    target = FrozenTarget(random_model(config), [0, 2])
    ids = torch.arange(3, 11)[None]
    alone, in_16, in_17 = (
        target.hidden_states(torch.nn.functional.pad(ids, (0, width - 8)))[:, :8] for width in (8, 16, 17)
    )
    torch.testing.assert_close(in_16, alone, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(in_17, alone, rtol=1e-2)
    target.check_padding(16, 1, is_alone=False)
    target.check_padding(17, 1, is_alone=True)
    with pytest.raises(ValueError, match=r"phi3 .*longrope.* more than 16 tokens, and rows of up to 18 .*_tokens=12:"):
        target.check_padding(18, 6, is_alone=False)
    FrozenTarget(random_model(ARCHITECTURES["qwen3"]), [0, 2]).check_padding(10**6, 16, is_alone=False)


def test_a_rotary_embedding_that_depends_on_earlier_passes_is_refused_also_for_samples_alone() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    target = FrozenTarget(
        random_model(LlamaConfig(**GROUPED, max_position_embeddings=16, rope_parameters=dynamic)), [2]
    )
    ids = torch.arange(3, 23)[None]
    before = target.hidden_states(ids)
    target.hidden_states(torch.arange(3, 63)[None])
    assert (target.hidden_states(ids) - before).abs().max() > 1e-6
    with pytest.raises(ValueError, match=r"llama .*dynamic.* more than 16 tokens, and rows of up to 20"):
        target.check_padding(20, 1, is_alone=True)


def test_packing_is_checked_in_one_pass_whatever_the_chunk() -> None:
    model = random_model(ARCHITECTURES["gemma2 with soft-cap"])
    with pytest.raises(ValueError, match="architecture gemma2"):
        FrozenTarget(model, [0, 2], prefill_chunk=2).check_packing()


def count_passes(model: torch.nn.Module) -> list[object]:
    """Grows by one with every forward pass of the model's body."""
    passes: list[object] = []
    model.base_model.register_forward_pre_hook(lambda *_: passes.append(None))
    return passes
