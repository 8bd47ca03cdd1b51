"""The two ends of the target that the drafter shares: token embedding at the bottom, LM head at the top."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from dflash.target.layers import decoder_layers

_PROBE_TOKENS = 8


@dataclass(frozen=True)
class TargetEnds:
    """Frozen embedding and LM head. Plain tensors, so that they enter no state dict and no optimizer."""

    embedding: Tensor  # [V, H]
    embedding_scale: float  # Gemma multiplies embeddings by sqrt(H), Granite by a constant
    head: Tensor  # [V, H]
    head_bias: Tensor | None  # [V]
    logit_scale: float  # Cohere and Granite multiply logits by a constant
    logit_softcap: float | None  # Gemma 2: logits = cap * tanh(logits / cap)

    def to(self, device: torch.device) -> "TargetEnds":
        """The same ends with their tensors on `device`."""
        bias = self.head_bias if self.head_bias is None else self.head_bias.to(device)
        embedding = self.embedding.to(device)
        is_tied = self.head.data_ptr() == self.embedding.data_ptr()
        head = embedding if is_tied else self.head.to(device)
        return replace(self, embedding=embedding, head=head, head_bias=bias)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed as the target does.

        Args:
            token_ids: [...] int64.

        Returns:
            [..., H] in the embedding's dtype.
        """
        return F.embedding(token_ids, self.embedding) * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of states that have passed a final norm.

        Args:
            hidden: [..., H]; the product runs in the head's dtype.

        Returns:
            [..., V] in the head's dtype.
        """
        # Autocast would round the logits of a float32 head to bfloat16: the head's own dtype decides.
        with torch.autocast(hidden.device.type, enabled=False):
            logits = F.linear(hidden.to(self.head.dtype), self.head, self.head_bias)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits


@torch.no_grad()
def target_ends(model: PreTrainedModel) -> TargetEnds:
    """Read the ends off a causal LM, and check them against what the model itself computes.

    Architectures scale embeddings and logits in different places. So the scales are measured on a few tokens, and a
    target that does anything else at its ends is refused rather than trained against a wrong head.

    Raises:
        ValueError: the model adds something to the embedding (learned positions, say) or treats logits in a way that
            a scale and a soft-cap do not describe.
    """
    embedding: Tensor = model.get_input_embeddings().weight.detach()  # type: ignore[operator]
    output_layer = model.get_output_embeddings()
    head = output_layer.weight.detach()
    bias = getattr(output_layer, "bias", None)
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    vocab_size = embedding.shape[0]
    probe = torch.linspace(1, vocab_size - 1, _PROBE_TOKENS, device=embedding.device).long()[None]
    first_layer_input: list[Tensor] = []

    def catch_input(_module: object, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        first_layer_input.append(args[0] if args else kwargs["hidden_states"])

    handle = decoder_layers(model)[0].register_forward_pre_hook(catch_input, with_kwargs=True)
    try:
        states = model.base_model(input_ids=probe, use_cache=False).last_hidden_state
    finally:
        handle.remove()
    real_logits = model(input_ids=probe, use_cache=False).logits.double()

    plain_embedding = F.embedding(probe, embedding)
    embedding_scale = _scale_between(plain_embedding.double(), first_layer_input[0].double())
    if embedding_scale is None:
        raise ValueError(
            f"target {type(model).__name__} does more to its token embedding than scale it (learned positions or a "
            "norm, say). The drafter shares the embedding, so such a target is not supported."
        )
    raw_logits = F.linear(states, head, bias).double()
    if softcap is not None:
        capped = real_logits / softcap
        well_inside = capped.abs() < 0.95  # nearer to the cap atanh magnifies rounding
        raw_logits, real_logits = raw_logits[well_inside], torch.atanh(capped[well_inside]) * softcap
    logit_scale = _scale_between(raw_logits, real_logits)
    if logit_scale is None:
        raise ValueError(
            f"target {type(model).__name__} does more to its logits than scale and soft-cap them. The drafter shares "
            "the LM head, so such a target is not supported."
        )
    return TargetEnds(
        embedding=embedding,
        embedding_scale=embedding_scale,
        head=head,
        head_bias=None if bias is None else bias.detach(),
        logit_scale=logit_scale,
        logit_softcap=None if softcap is None else float(softcap),
    )


def _scale_between(plain: Tensor, scaled: Tensor) -> float | None:
    """The factor with scaled = factor * plain, exactly 1.0 where there is none; None where no factor explains it."""
    factor = float((plain * scaled).sum() / (plain * plain).sum())
    # Loose enough for bfloat16 models, tight enough to see anything else than a factor.
    if (plain * factor - scaled).norm() > 2e-2 * scaled.norm():
        return None
    return 1.0 if abs(factor - 1.0) < 1e-3 else factor
