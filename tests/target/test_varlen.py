"""A packed row through the target: every sample is read as if it were alone."""

from contextlib import AbstractContextManager

import pytest
import torch
from transformers import FalconH1Config, MistralConfig, PretrainedConfig, PreTrainedModel

from dflash.target.frozen import FrozenTarget
from dflash.target.varlen import packed_attention
from tests.models import ARCHITECTURES, GROUPED, random_model

PACKABLE: dict[str, PretrainedConfig] = {
    **{name: config for name, config in ARCHITECTURES.items() if name != "gemma2 with soft-cap"},
    "mistral, sliding window": MistralConfig(**GROUPED, sliding_window=4),
}


@pytest.mark.parametrize("name", PACKABLE)
@pytest.mark.parametrize("lengths", [[9], [1, 7, 3, 12], [5, 5]])
def test_states_are_those_of_each_sample_alone(name: str, lengths: list[int]) -> None:
    model = random_model(PACKABLE[name]).double()
    target = FrozenTarget(model, [0, 2])
    torch.manual_seed(1)
    ids = torch.randint(3, 97, (1, sum(lengths) + 3))  # three of padding at the end
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    together = target.hidden_states(ids, cu_seqlens)
    for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        torch.testing.assert_close(together[:, begin:end], target.hidden_states(ids[:, begin:end]))
    target.check_packing()


def test_the_model_is_left_as_it_was() -> None:
    model = random_model(ARCHITECTURES["llama"])
    target = FrozenTarget(model, [0, 2])
    ids = torch.randint(3, 97, (2, 9))
    before, implementation = target.hidden_states(ids), model.config._attn_implementation
    target.hidden_states(ids[:1], torch.tensor([0, 4, 9], dtype=torch.int32))
    assert model.config._attn_implementation == implementation
    torch.testing.assert_close(target.hidden_states(ids), before, rtol=0, atol=0)


def test_no_mask_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    target = FrozenTarget(random_model(ARCHITECTURES["llama"]), [0, 2])
    seen: list[object] = []
    for layer in target.model.model.layers:
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
    target.hidden_states(torch.randint(3, 97, (1, 9)), torch.tensor([0, 4, 9], dtype=torch.int32))
    assert seen == [None] * 3


@pytest.mark.parametrize(
    ("config", "name", "reason"),
    [
        (ARCHITECTURES["gemma2 with soft-cap"], "gemma2", "its attention needs softcap"),
        (
            FalconH1Config(**GROUPED, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8),
            "falcon_h1",
            "a state that crosses",
        ),
    ],
)
def test_an_architecture_for_which_packing_is_not_exact_is_refused_by_name(
    config: PretrainedConfig, name: str, reason: str
) -> None:
    target = FrozenTarget(random_model(config), [0, 2])
    with pytest.raises(
        ValueError, match=rf"sampler=packed is not exact for targets of the architecture {name}: .*{reason}"
    ):
        target.check_packing()


def test_a_target_that_reads_across_samples_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(model: PreTrainedModel, cu_seqlens: torch.Tensor) -> AbstractContextManager[None]:
        """As an attention would be that takes the row for one sample."""
        return packed_attention(model, cu_seqlens[[0, -1]])

    target = FrozenTarget(random_model(ARCHITECTURES["llama"]), [0, 2])
    monkeypatch.setattr("dflash.target.frozen.packed_attention", blind)
    with pytest.raises(ValueError, match=r"architecture llama: its samples are not read as if each were alone"):
        target.check_packing()
