"""Whether an exported drafter still says what the trained one says."""

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dflash.drafter.network import DFlashDrafter
from dflash.target.ends import target_ends
from dflash.target.frozen import FrozenTarget

_PROBE_TOKENS = 64


@dataclass(frozen=True)
class LogitAgreement:
    """Of two drafters that agree to the bit once both are rounded alike."""

    num_slots: int
    num_changed: int  # slots whose most likely token the rounding has changed


@torch.no_grad()
def compare_logits(
    trained: DFlashDrafter, dtype: torch.dtype, exported: DFlashDrafter, target: PreTrainedModel
) -> LogitAgreement:
    """Draft behind every position of a probe text with both, in float32 arithmetic.

    Args:
        trained: its parameters unrounded.
        dtype: the export's.
        exported: read back.
        target: whose states they read.

    Raises:
        ValueError: the logits differ, by how much and where.
    """
    vocab_size = trained.config.vocab_size
    probe = torch.linspace(1, vocab_size - 1, _PROBE_TOKENS, device=target.device).long()[None]  # the same every time
    hidden = FrozenTarget(target, trained.target_layer_ids, target.device).hidden_states(probe).float()
    rounded = deepcopy(trained).to(dtype).float()
    expected, found, unrounded = (
        _logits(drafter.float().to(target.device), target, probe, hidden) for drafter in (rounded, exported, trained)
    )
    if not torch.equal(expected, found):
        difference = (expected - found).abs().amax(dim=-1)  # [anchors, K - 1]
        raise ValueError(
            "The exported drafter does not give the trained one's logits: they differ by up to "
            f"{float(difference.max()):.3g} in {int((difference > 0).sum())} of {difference.numel()} slots."
        )
    return LogitAgreement(
        num_slots=found.shape[0] * found.shape[1],
        num_changed=int((found.argmax(dim=-1) != unrounded.argmax(dim=-1)).sum()),
    )


def _logits(drafter: DFlashDrafter, target: PreTrainedModel, probe: Tensor, hidden: Tensor) -> Tensor:
    """[anchors, K - 1, V] of a block behind each position of the probe."""
    ends = target_ends(target)
    anchors = torch.arange(1, probe.shape[1], device=probe.device)
    blocks = probe.new_full((len(anchors), drafter.block_size), drafter.mask_token_id)
    blocks[:, 0] = probe[0, anchors]
    states = drafter(hidden, ends.embed(blocks), anchors, torch.zeros_like(anchors))
    return ends.logits(states[:, 1:])
