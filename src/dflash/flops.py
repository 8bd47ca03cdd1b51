"""What a training step has to compute: floating-point operations without padding and without recomputation.

A product of [m, k] and [k, n] counts 2 m k n. Norms, softmax and activations are left out, as is usual. The figures are
held against what a device reaches on plain matrix products (`dflash.measuring.matrix_peak`).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TargetShape:
    """What the frozen target computes a token.

    Attributes:
        layer_parameters: elements of the weight matrices of all layers that run, up to the last captured one.
        num_layers: how many that are.
        num_heads: query heads.
        head_dim: of each.
    """

    layer_parameters: int
    num_layers: int
    num_heads: int
    head_dim: int

    def flops(self, lengths: Sequence[int]) -> float:
        """Of one pass over samples of these lengths, tokens; causal attention counts the pairs that are visible."""
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        matrices = 2.0 * self.layer_parameters * sum(lengths)
        return matrices + 4.0 * pairs * self.num_heads * self.head_dim * self.num_layers


@dataclass(frozen=True)
class DrafterShape:
    """What the drafter computes a slot, a context token and a pair of them.

    Attributes:
        layer_parameters: elements of all layers' weight matrices, key and value projections included.
        fc_parameters: elements of the projection of the captured states.
        key_value_parameters: elements of all layers' key and value projections, which read the context too.
        hidden_size: H.
        vocab_size: V.
        num_layers: how many.
        num_heads: query heads.
        head_dim: of each.
    """

    layer_parameters: int
    fc_parameters: int
    key_value_parameters: int
    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    head_dim: int

    def flops(self, *, slots: int, supervised_slots: int, context_tokens: int, visible_pairs: int) -> float:
        """Of forward, loss and backward.

        Weights cost one product forward and two backward (towards input and weight). The frozen LM head has no
        gradient, and the captured states need none: two products each.

        Args:
            slots: N * K.
            supervised_slots: those that the LM head reads.
            context_tokens: real tokens of the samples.
            visible_pairs: of a slot with a context position or a slot of its own block.
        """
        return (
            6.0 * slots * self.layer_parameters
            + 4.0 * supervised_slots * self.hidden_size * self.vocab_size
            + 4.0 * context_tokens * self.fc_parameters
            + 6.0 * context_tokens * self.key_value_parameters
            + 12.0 * visible_pairs * self.num_heads * self.head_dim * self.num_layers
        )
