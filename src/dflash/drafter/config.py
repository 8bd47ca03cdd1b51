"""The drafter's shape: what the config group `drafter` says, and the published config.json it becomes."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from transformers import PretrainedConfig, Qwen3Config

from dflash.checks import check_integer, check_positive
from dflash.drafter.block_attention import check_backend
from dflash.target.layers import check_layer_ids, spaced_layer_ids


@dataclass(frozen=True)
class DrafterOptions:
    """The config group `drafter`. Where a size is null, it is the target's.

    Args:
        block_size: slots of a block, the anchor's included.
        num_layers: decoder layers of the drafter.
        num_captured: how many target layers it reads, evenly spaced; not used where `target_layer_ids` is given.
        target_layer_ids: which target layers it reads, counted from 0.
        intermediate_size: hidden width of the MLPs.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: width of a head.
        rope_theta: base of the rotary embedding.
        attention: how blocks attend in training, see `dflash.drafter.block_attention`; as the next two, no part of what
            is trained.
        checkpoint_activations: compute layers again in the backward pass instead of keeping their activations.
        compile: have torch.compile fuse what a layer does before and after attention.
    """

    block_size: int
    num_layers: int
    num_captured: int
    target_layer_ids: Sequence[int] | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float | None = None
    attention: str = "auto"
    checkpoint_activations: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        minimum = {"block_size": 2, "num_layers": 1, "num_captured": 1}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("target_layer_ids", "attention") or (value is None and field.name not in minimum):
                continue
            if field.name in ("checkpoint_activations", "compile"):
                if not isinstance(value, bool):
                    raise ValueError(f"drafter.{field.name}={value!r} must be true or false.")
                continue
            if field.name != "rope_theta":
                check_integer(f"drafter.{field.name}", value, minimum.get(field.name, 1))
            else:
                check_positive("drafter.rope_theta", value)
        check_backend(self.attention)


def drafter_config(options: DrafterOptions, target: PretrainedConfig, mask_token_id: int) -> Qwen3Config:
    """The drafter's config.json, in the published layout that servers load.

    Args:
        options: the config group `drafter`.
        target: config of the target.
        mask_token_id: id whose embedding fills the slots to be predicted.

    Raises:
        ValueError: layer ids that the target does not have.
    """
    target = target.get_text_config()
    num_target_layers = target.num_hidden_layers
    if options.target_layer_ids is None:
        layer_ids = spaced_layer_ids(options.num_captured, num_target_layers)
    else:
        layer_ids = list(options.target_layer_ids)
        check_layer_ids(layer_ids, num_target_layers)
    num_heads: int = options.num_attention_heads or target.num_attention_heads
    num_kv_heads: int = options.num_key_value_heads or getattr(target, "num_key_value_heads", num_heads)  # type: ignore[assignment]
    if num_heads % num_kv_heads:
        raise ValueError(
            f"drafter.num_attention_heads={num_heads} is no multiple of drafter.num_key_value_heads={num_kv_heads}."
        )
    target_rope: dict[str, Any] = getattr(target, "rope_parameters", None) or {}
    rope_theta = options.rope_theta or target_rope.get("rope_theta", 10_000.0)
    return Qwen3Config(  # type: ignore[call-arg]  # it keeps fields that it does not know, as the layout needs
        architectures=["DFlashDraftModel"],
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=options.intermediate_size or target.intermediate_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=options.head_dim or getattr(target, "head_dim", None) or target.hidden_size // num_heads,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=getattr(target, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": float(rope_theta)},
        layer_types=["full_attention"] * options.num_layers,
        attention_bias=False,
        tie_word_embeddings=False,
        use_cache=True,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        block_size=options.block_size,
        num_target_layers=num_target_layers,
        dflash_config={"mask_token_id": mask_token_id, "target_layer_ids": layer_ids},
    )
