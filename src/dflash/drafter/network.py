"""The DFlash drafter: Qwen3-style layers that denoise blocks of tokens, conditioned on the target's hidden states.

The target's states are fused once (`fc`, `hidden_norm`). Every layer projects keys and values from them and from its
own block; queries come from the block alone. Module names are the published checkpoint's tensor names.
"""

import os
import shutil
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, Qwen3Config

from dflash.drafter.block_attention import (
    BlockAttention,
    attend_to_all,
    block_attention,
    check_backend,
    choose_backend,
)
from dflash.drafter.config import DrafterOptions, drafter_config

ContextKV = list[tuple[Tensor, Tensor]]  # a layer's keys and values, each [B, S, key heads, head_dim]


class DFlashDrafter(nn.Module):
    """Reads captured target states, proposes the tokens of a block in one pass.

    Args:
        config: the published config.json (see `dflash.drafter.config`).
        attention_backend: how blocks attend in training: auto, flex, grouped or dense (see
            `dflash.drafter.block_attention`).
        checkpoint_activations: in training keep of the blocks only what enters a layer, and compute the rest again in
            the backward pass: less memory, more time.
    """

    def __init__(
        self, config: Qwen3Config, attention_backend: str = "auto", checkpoint_activations: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.attention_backend = check_backend(attention_backend)
        self.checkpoint_activations = checkpoint_activations
        self.block_size: int = config.block_size
        dflash_config: dict[str, Any] = config.dflash_config
        self.mask_token_id: int = dflash_config["mask_token_id"]
        self.target_layer_ids: list[int] = list(dflash_config["target_layer_ids"])
        width = config.hidden_size
        self.fc = nn.Linear(len(self.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)

    @torch.no_grad()
    def scale_initial_logits(self, head: Tensor) -> None:
        """Set the final norm's weight so that an untrained drafter's logits have unit variance.

        Norms begin at 1 and the LM head is the target's, of whatever scale that has: with SmolLM2's the first loss
        would be 67 instead of 23, and the first hundred steps would go into undoing it.

        Args:
            head: the target's LM head, [V, H].
        """
        self.norm.weight.fill_(float(head.float().pow(2).sum(dim=1).mean().rsqrt()))

    def forward(
        self,
        hidden: Tensor,
        block_embeddings: Tensor,
        anchors: Tensor,
        starts: Tensor,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """States of every slot of every block.

        Args:
            hidden: captured target states, [B, S, L * H].
            block_embeddings: slot 0 the anchor's token, the rest the mask token, [N, K, H].
            anchors: position of each block's anchor in its document, [N] int64.
            starts: where each block's document begins among the B * S positions, ascending, [N] int64.
            position_ids: of the context in its documents, [1, S] int64; None where every row is a document.

        Returns:
            [N, K, H], final norm applied: what the target's LM head reads.
        """
        return self.denoise(block_embeddings, self.project_context(hidden, position_ids), anchors, starts)

    def project_context(self, hidden: Tensor, position_ids: Tensor | None = None) -> ContextKV:
        """Keys and values of the context, for every layer: what a KV cache holds.

        Args:
            hidden: captured target states, [B, S, L * H].
            position_ids: [1, S] int64; None for 0, 1, 2, ... in every row.

        Returns:
            A pair for every layer, each [B, S, key heads, head_dim].
        """
        context = self.hidden_norm(self.fc(hidden.to(self.fc.weight.dtype)))
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rotation = rotary_angles(position_ids, self.config, context.dtype)
        return [layer.key_value(context, rotation) for layer in self.layers]  # type: ignore[operator]

    def denoise(self, block_embeddings: Tensor, context: ContextKV, anchors: Tensor, starts: Tensor) -> Tensor:
        """States of every slot, the context being projected already.

        Args:
            block_embeddings: [N, K, H]; K may be smaller than in training.
            context: from `project_context`, or several of them joined along the positions.
            anchors: [N] int64; a block sees the positions of its document before its anchor.
            starts: [N] int64, ascending: where its document begins among the B * S positions.

        Returns:
            [N, K, H], final norm applied.
        """
        context_key = context[0][0]
        num_rows, row_length, _, head_dim = context_key.shape
        attention = block_attention(
            choose_backend(self.attention_backend, context_key.device, context_key.dtype, head_dim),
            anchors,
            starts,
            num_rows=num_rows,
            row_length=row_length,
            block_size=block_embeddings.shape[1],
        )
        return self._through_layers(block_embeddings, context, anchors, attention)

    def denoise_next(self, block_embeddings: Tensor, context: ContextKV) -> Tensor:
        """States of the one block that follows the context, as decoding needs it: all of the context is before it.

        Args:
            block_embeddings: [1, K, H]; K may be smaller than in training.
            context: of one document, [1, S, key heads, head_dim] each; the anchor stands at position S.

        Returns:
            [1, K, H], final norm applied.
        """
        anchor = torch.full((1,), context[0][0].shape[1], device=block_embeddings.device)
        return self._through_layers(block_embeddings, context, anchor, attend_to_all)

    def _through_layers(
        self, block_embeddings: Tensor, context: ContextKV, anchors: Tensor, attention: BlockAttention
    ) -> Tensor:
        positions = anchors[:, None] + torch.arange(block_embeddings.shape[1], device=anchors.device)
        states = block_embeddings.to(self.fc.weight.dtype)
        rotation = rotary_angles(positions, self.config, states.dtype)
        for layer, (context_key, context_value) in zip(self.layers, context, strict=True):
            inputs = (states, rotation, context_key, context_value, attention)
            if self.checkpoint_activations and torch.is_grad_enabled():
                states = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                states = layer(*inputs)
        return self.norm(states)

    def compile_layers(self, backend: str = "inductor") -> None:
        """Have torch fuse what a layer does before and after attention, for any number of blocks.

        Attention stays outside: its groups and masks are other ones in every batch.

        Args:
            backend: of torch.compile.
        """
        for layer in self.layers:
            for part in ("before_attention", "after_attention"):
                setattr(layer, part, torch.compile(getattr(layer, part), backend=backend, dynamic=True))


def build_drafter(
    options: DrafterOptions, target: PretrainedConfig, mask_token_id: int, device: torch.device
) -> DFlashDrafter:
    """A drafter in the target's image, on the CPU, not trained.

    Args:
        options: the config group `drafter`.
        target: config of the target.
        mask_token_id: id whose embedding fills the slots to be predicted.
        device: where it will be trained.

    Raises:
        ValueError: a size that can not be; something that this device or this machine does not have.
    """
    config = drafter_config(options, target, mask_token_id)
    assert config.head_dim is not None
    choose_backend(options.attention, device, torch.float32, config.head_dim)
    drafter = DFlashDrafter(config, options.attention, options.checkpoint_activations)
    if options.compile:
        if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
            raise ValueError("drafter.compile=true needs a C++ compiler, and there is none. Set drafter.compile=false.")
        drafter.compile_layers()
    return drafter


class DrafterLayer(nn.Module):
    """Pre-norm attention and gated MLP, as in Qwen3."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DrafterAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def key_value(self, context: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Of the fused context, [B, S, H] -> keys and values, each [B, S, key heads, head_dim]."""
        return self.self_attn.key_value(context, rotation)

    def forward(
        self,
        states: Tensor,
        rotation: tuple[Tensor, Tensor],
        context_key: Tensor,
        context_value: Tensor,
        attention: BlockAttention,
    ) -> Tensor:
        """[N, K, H] -> [N, K, H]."""
        query, block_key, block_value = self.before_attention(states, rotation)
        return self.after_attention(states, attention(query, block_key, block_value, context_key, context_value))

    def before_attention(self, states: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """[N, K, H] -> queries, keys and values of the blocks, each [N, K, heads or key heads, head_dim]."""
        return self.self_attn.query_key_value(self.input_layernorm(states), rotation)

    def after_attention(self, states: Tensor, attended: Tensor) -> Tensor:
        """What entered the layer, [N, K, H], and what its heads attended to, [N, K, heads, head_dim] -> [N, K, H]."""
        states = states + self.self_attn.o_proj(attended.flatten(-2))
        return states + self.mlp(self.post_attention_layernorm(states))


class DrafterAttention(nn.Module):
    """Projections: queries of the block; keys and values of context and block, with one norm and rotation for both."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        assert config.head_dim is not None
        assert config.num_key_value_heads is not None
        width, self.head_dim = config.hidden_size, config.head_dim
        query_width, key_width = (n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(width, query_width, bias=False)
        self.k_proj = nn.Linear(width, key_width, bias=False)
        self.v_proj = nn.Linear(width, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, width, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def key_value(self, states: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[..., H] -> keys and values, each [..., key heads, head_dim]."""
        key = self.k_norm(self.k_proj(states).unflatten(-1, (-1, self.head_dim)))
        value = self.v_proj(states).unflatten(-1, (-1, self.head_dim))
        return rotate(key, rotation).to(value.dtype), value

    def query_key_value(self, states: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """[..., H] -> queries [..., heads, head_dim], keys and values as `key_value`."""
        key, value = self.key_value(states, rotation)
        query = self.q_norm(self.q_proj(states).unflatten(-1, (-1, self.head_dim)))
        return rotate(query, rotation).to(value.dtype), key, value


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=False)
        self.up_proj = nn.Linear(width, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))


def rotary_angles(positions: Tensor, config: Qwen3Config, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (RoFormer, arXiv 2104.09864, halves paired as in Llama).

    Args:
        positions: [..., P] int64.
        config: gives head_dim and rope_theta.
        dtype: what is rotated. The result is float32 or wider whatever this is; the angles are formed in float64, since
            float32 is 5e-4 off at position 8,192.

    Returns:
        cos and sin, each [..., P, 1, head_dim / 2]: the 1 stands for the heads.
    """
    rope: dict[str, Any] = config.rope_parameters  # type: ignore[assignment]
    head_dim: int = config.head_dim
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    angles = positions[..., None].double() * rope["rope_theta"] ** -exponents
    dtype = torch.promote_types(dtype, torch.float32)
    return angles.cos().to(dtype)[..., None, :], angles.sin().to(dtype)[..., None, :]


def rotate(vectors: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate [..., P, heads, head_dim] by the angles of `rotary_angles`."""
    cos, sin = rotation
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
