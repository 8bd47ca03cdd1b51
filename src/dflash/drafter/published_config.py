"""`config.json` of the published layout: what it says, and whether a drafter of this package computes that."""

import math
from typing import Any, TypeGuard

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import Qwen3Config

# Fields that the shapes of the tensors do not tell. The weights file keeps them too, so that a config.json which was
# changed afterwards is noticed.
_SEALED_FIELDS = ("rope_theta", "rms_norm_eps", "block_size", "num_target_layers", "dflash_config")
_FIELDS = (
    "architectures", "model_type", "block_size", "num_target_layers", "dflash_config", "layer_types", "vocab_size",
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "rope_parameters", "attention_bias",
    "attention_dropout", "use_sliding_window", "sliding_window", "max_window_layers", "tie_word_embeddings",
    "use_cache", "bos_token_id", "eos_token_id",
)  # fmt: skip
_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_target_layers", "max_position_embeddings", "block_size",
)  # fmt: skip


def published_config(config: Qwen3Config, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of `config.json`; the RoPE base in both ways that servers read it."""
    values = config.to_dict()
    fields = {name: values[name] for name in _FIELDS}
    return fields | {
        "rope_theta": values["rope_parameters"]["rope_theta"],
        "rope_scaling": None,
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def checked_config(values: dict[str, Any], where: str) -> Qwen3Config:
    """The config, if a drafter of this package computes what it says.

    Raises:
        ValueError: all that is wrong with it.
    """
    dflash, rope, scaling = (
        value if isinstance(value := values.get(name), dict) else {}
        for name in ("dflash_config", "rope_parameters", "rope_scaling")
    )
    theta: Any = values.get("rope_theta", rope.get("rope_theta"))
    eps: Any = values.get("rms_norm_eps")
    layer_ids, num_target_layers = dflash.get("target_layer_ids"), values.get("num_target_layers")
    heads, key_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    num_layers: Any = values.get("num_hidden_layers")
    layer_types: Any = values.get("layer_types") or ["full_attention"] * (num_layers if _is_count(num_layers) else 0)
    mask_token_id, vocab_size = dflash.get("mask_token_id"), values.get("vocab_size")
    rope_options = {k: v for part in (rope, scaling) for k, v in part.items() if k != "rope_theta" and v is not None}
    unknown = {
        k: v
        for k, v in dflash.items()
        if k not in ("mask_token_id", "target_layer_ids")
        and v not in (None, False)
        and (k, v) != ("block_size", values.get("block_size"))
    }

    # What does not hold, each with what was expected.
    wrong = [
        f"{name}={values.get(name)!r}, expected a whole number of 1 or more"
        for name in _COUNTS
        if not _is_count(values.get(name))
    ]
    if values.get("architectures") != ["DFlashDraftModel"]:
        wrong.append(f"architectures={values.get('architectures')!r}, expected ['DFlashDraftModel']")
    if values.get("model_type") != "qwen3":
        wrong.append(f"model_type={values.get('model_type')!r}, expected 'qwen3'")
    if values.get("block_size") == 1:
        wrong.append("block_size=1, expected 2 or more")
    if not _are_layer_ids(layer_ids, num_target_layers):
        wrong.append(
            f"dflash_config.target_layer_ids={layer_ids!r}, expected distinct layers of a target with "
            f"num_target_layers={num_target_layers!r}, counted from 0"
        )
    if type(mask_token_id) is not int or type(vocab_size) is not int or not 0 <= mask_token_id < vocab_size:
        wrong.append(f"dflash_config.mask_token_id={mask_token_id!r}, expected an id below vocab_size={vocab_size!r}")
    if unknown:
        wrong.append(f"dflash_config has {unknown}, which this drafter does not know")
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        wrong.append("it has sliding layers: servers differ on what a block sees there, so only full_attention is read")
    elif len(layer_types) != num_layers:
        wrong.append(f"layer_types has {len(layer_types)} entries, num_hidden_layers={num_layers!r}")
    if values.get("use_sliding_window"):
        wrong.append("use_sliding_window is true: sliding layers are not read")
    if _is_count(heads) and _is_count(key_heads) and heads % key_heads:
        wrong.append(f"num_attention_heads={heads} is no multiple of num_key_value_heads={key_heads}")
    if values.get("attention_bias"):
        wrong.append("attention_bias is true, this drafter has none")
    if values.get("hidden_act", "silu") != "silu":
        wrong.append(f"hidden_act={values['hidden_act']!r}, expected 'silu'")
    if type(theta) not in (int, float) or not 0 < theta < math.inf:
        wrong.append(f"rope_theta={theta!r}, expected the base of the rotary embedding")
    if rope.get("rope_theta", theta) != theta:
        wrong.append(f"rope_theta={theta!r}, but rope_parameters.rope_theta={rope['rope_theta']!r}")
    if any(option not in (("rope_type", "default"), ("type", "default")) for option in rope_options.items()):
        wrong.append(f"its rotary embedding has {rope_options}, of which only rope_type=default is supported")
    if values.get("rope_scaling") is not None and not isinstance(values["rope_scaling"], dict):
        wrong.append(f"rope_scaling={values['rope_scaling']!r}, expected null")
    if type(eps) is not float or not 0 < eps < 1:
        wrong.append(f"rms_norm_eps={eps!r}, expected a small number above 0")
    if wrong:
        raise ValueError(f"{where}: {'; '.join(wrong)}.")
    understood = {k: v for k, v in values.items() if k in _FIELDS}
    rope_parameters = {"rope_type": "default", "rope_theta": float(theta)}
    try:
        return Qwen3Config.from_dict(understood | {"layer_types": layer_types, "rope_parameters": rope_parameters})
    except StrictDataclassError as error:
        raise ValueError(f"{where}: {error}") from error


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 1


def _are_layer_ids(ids: object, num_target_layers: object) -> bool:
    if not isinstance(ids, list) or not ids or not isinstance(num_target_layers, int):
        return False
    return all(type(i) is int and 0 <= i < num_target_layers for i in ids) and len(set(ids)) == len(ids)


def seal(config: dict[str, Any]) -> dict[str, Any]:
    """The sealed fields of a config, which the metadata of its weights file repeats."""
    return {name: config.get(name) for name in _SEALED_FIELDS}
