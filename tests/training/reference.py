"""The method in words: every slot, key, head and label one by one, in float64, from the design's rules alone.

Shares no code with the package. It reads a drafter's tensors by their published names.
"""

import math

import torch
from torch import Tensor


def rms_norm(vector: Tensor, weight: Tensor, eps: float) -> Tensor:
    return vector / torch.sqrt((vector * vector).mean() + eps) * weight


def rotate(vector: Tensor, position: int, theta: float) -> Tensor:
    half = len(vector) // 2
    out = [torch.zeros(())] * len(vector)
    for i in range(half):
        angle = position / theta ** (2 * i / len(vector))
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = vector[i] * cos - vector[i + half] * sin
        out[i + half] = vector[i + half] * cos + vector[i] * sin
    return torch.stack(out)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


class ReferenceDrafter:
    """One block at a time, one slot at a time, one head at a time."""

    def __init__(self, tensors: dict[str, Tensor], *, heads: int, key_heads: int, eps: float, theta: float) -> None:
        self.t = tensors
        self.heads, self.key_heads, self.eps, self.theta = heads, key_heads, eps, theta
        self.num_layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))

    def head_vectors(self, layer: int, kind: str, state: Tensor, position: int) -> list[Tensor]:
        projected = self.t[f"layers.{layer}.self_attn.{kind}_proj.weight"] @ state
        vectors = list(projected.chunk(self.heads if kind == "q" else self.key_heads))
        if kind == "v":
            return vectors
        norm = self.t[f"layers.{layer}.self_attn.{kind}_norm.weight"]
        return [rotate(rms_norm(vector, norm, self.eps), position, self.theta) for vector in vectors]

    def block_states(self, captured: Tensor, embeddings: list[Tensor], anchor: int) -> list[Tensor]:
        """States of one block's slots. `captured` [S, L * H] are the document's; only those before the anchor count."""
        context = [
            rms_norm(self.t["fc.weight"] @ captured[t], self.t["hidden_norm.weight"], self.eps) for t in range(anchor)
        ]
        states = list(embeddings)
        for layer in range(self.num_layers):
            pre = f"layers.{layer}."
            normed = [rms_norm(s, self.t[pre + "input_layernorm.weight"], self.eps) for s in states]
            # What a slot may look at: context strictly before the anchor, then every slot of its own block.
            seen = [(state, t) for t, state in enumerate(context)]
            seen += [(state, anchor + k) for k, state in enumerate(normed)]
            keys = [self.head_vectors(layer, "k", state, position) for state, position in seen]
            values = [self.head_vectors(layer, "v", state, position) for state, position in seen]
            updated = []
            for k, state in enumerate(states):
                queries = self.head_vectors(layer, "q", normed[k], anchor + k)
                gathered = []
                for head in range(self.heads):
                    key_head = head // (self.heads // self.key_heads)
                    scores = torch.stack([queries[head] @ key[key_head] for key in keys])
                    shares = torch.exp(scores / math.sqrt(len(queries[head])))
                    shares = shares / shares.sum()
                    gathered.append(sum(share * value[key_head] for share, value in zip(shares, values, strict=True)))
                state = state + self.t[pre + "self_attn.o_proj.weight"] @ torch.cat(gathered)
                inner = rms_norm(state, self.t[pre + "post_attention_layernorm.weight"], self.eps)
                gate = silu(self.t[pre + "mlp.gate_proj.weight"] @ inner)
                up = self.t[pre + "mlp.up_proj.weight"] @ inner
                updated.append(state + self.t[pre + "mlp.down_proj.weight"] @ (gate * up))
            states = updated
        return [rms_norm(state, self.t["norm.weight"], self.eps) for state in states]


def block_terms(
    drafter: ReferenceDrafter,
    *,
    token_ids: list[int],
    mask: list[bool],
    captured: Tensor,
    anchor: int,
    block_size: int,
    mask_token_id: int,
    gamma: float,
    embedding: Tensor,
    head: Tensor,
    softcap: float | None = None,
) -> tuple[Tensor, float]:
    """Sum of weight * cross-entropy of one block, and the sum of its weights."""
    embeddings = [embedding[token_ids[anchor]]] + [embedding[mask_token_id]] * (block_size - 1)
    states = drafter.block_states(captured, embeddings, anchor)
    loss, weights = torch.zeros((), dtype=torch.float64), 0.0
    for k in range(1, block_size):
        position = anchor + k
        if position >= len(token_ids) or not mask[position]:
            break
        logits = [head[v] @ states[k] for v in range(len(head))]
        if softcap is not None:
            logits = [softcap * torch.tanh(x / softcap) for x in logits]
        probability = torch.exp(logits[token_ids[position]]) / sum(torch.exp(x) for x in logits)
        weight = math.exp(-(k - 1) / gamma)
        loss = loss - weight * torch.log(probability)
        weights += weight
    return loss, weights
