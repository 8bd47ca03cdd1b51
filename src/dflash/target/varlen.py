"""Packed rows through the target: causal attention that never crosses from one sample into another, without a mask.

transformers lets a model's attention be replaced by name; while a packed row runs, ours takes its place. On a CPU it is
a loop of causal attention over the samples, on recent GPUs torch's variable-length kernel.
"""

import inspect
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

_NAME = "dflash_packed"
_running = threading.local()  # .cu_seqlens of the row that runs in this thread: replicas run in threads of their own

# What an attention may be asked for beside plain causal attention, and which we do not compute.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


@contextmanager
def packed_attention(model: PreTrainedModel, cu_seqlens: Tensor) -> Iterator[None]:
    """While it lasts, `model` reads one row of samples behind each other.

    Args:
        model: its attention goes through transformers' attention interface.
        cu_seqlens: [D + 1] int32, where samples begin, and where the last one ends; padding may follow.
    """
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = _NAME
    _running.cu_seqlens = cu_seqlens
    try:
        yield
    finally:
        config._attn_implementation = before
        del _running.cu_seqlens


def packed_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one packed row, as transformers calls it.

    Args:
        module: the attention layer.
        query: [1, heads, T, head_dim].
        key: [1, key heads, T, head_dim], likewise `value`.
        value: see `key`.
        attention_mask: None; transformers makes none for an attention that it does not know.
        scaling: of the scores; None for head_dim ** -0.5.
        dropout: the target is frozen: 0.
        sliding_window: how many positions a token sees, its own included; None for all before it.
        kwargs: whatever else the architecture asks for.

    Returns:
        [1, T, heads, head_dim], and no attention weights.

    Raises:
        NotImplementedError: the architecture asks for something that is not computed here.
    """
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    unsupported += ["attention_mask"] if attention_mask is not None else []
    # Some architectures express a window by their mask alone, and there is none here.
    unsupported += ["a mask for its window"] if sliding_window is None and _has_window(module) else []
    if unsupported:
        raise NotImplementedError(", ".join(unsupported))
    cu_seqlens: Tensor = _running.cu_seqlens
    if _has_kernel(query):
        attended = _by_kernel(query, key, value, cu_seqlens, scaling, sliding_window)
    else:
        attended = query.new_zeros(*query.shape[:3], value.shape[-1])
        bounds = cu_seqlens.tolist()
        repeats = query.shape[1] // key.shape[1]
        for begin, end in itertools.pairwise(bounds):
            window = sliding_window if sliding_window is not None and sliding_window < end - begin else None
            attended[:, :, begin:end] = F.scaled_dot_product_attention(
                query[:, :, begin:end],
                key[:, :, begin:end].repeat_interleave(repeats, dim=1),
                value[:, :, begin:end].repeat_interleave(repeats, dim=1),
                attn_mask=None if window is None else _band(end - begin, window, query.device),
                is_causal=window is None,
                scale=scaling,
            )
    return attended.transpose(1, 2).contiguous(), None


def _has_window(module: nn.Module) -> bool:
    """Whether the configuration says that this layer sees less than all positions before a token."""
    config = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return bool(layer_types[module.layer_idx] != "full_attention")
    return getattr(config, "sliding_window", None) is not None


@cache
def _kernel_arguments() -> frozenset[str]:
    """What torch's variable-length attention takes; nothing where this torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def _has_kernel(query: Tensor) -> bool:
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16) or query.shape[-1] > 256:
        return False
    is_recent = torch.cuda.get_device_capability(query.device) >= (8, 0)
    return is_recent and {"scale", "window_size", "enable_gqa"} <= _kernel_arguments()


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scaling: float | None, sliding_window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # What follows the last sample is padding: a sample of its own, so that the kernel leaves nothing undefined.
    total = query.shape[2]
    bounds = cu_seqlens
    if int(bounds[-1]) < total:
        bounds = torch.cat([bounds, bounds.new_tensor([total])])
    longest = int(bounds.diff().max())
    left = -1 if sliding_window is None else sliding_window - 1
    # The kernel reads [T, heads, head_dim].
    query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    attended = varlen_attn(
        query, key, value, bounds, bounds, longest, longest,
        scale=scaling, window_size=(left, 0), enable_gqa=True,
    )  # fmt: skip
    assert isinstance(attended, Tensor)
    return attended.transpose(0, 1)[None]


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """[length, length] bool: a token sees itself and the window - 1 before it."""
    place = torch.arange(length, device=device)
    distance = place[:, None] - place
    return (distance >= 0) & (distance < window)


AttentionInterface.register(_NAME, packed_attention_forward)
