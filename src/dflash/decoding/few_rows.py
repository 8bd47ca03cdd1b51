"""Matrix products with as many rows as a block has slots, laid out the way that this CPU does fastest.

A verify forward multiplies K rows with every weight. BLAS libraries are made for one row or for many: with 4 rows in
float32, MKL on an AMD CPU takes 2.5 times as long for `rows @ weight.T` as for the same product written
`(weight @ rows.T).T`, and on other CPUs, types and K it is the other way round. So it is measured.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_TRIALS = 7
_WORTHWHILE = 0.9  # the mode itself costs some time in every call


class TransposedFewRows(TorchFunctionMode):
    """While it lasts, `F.linear` of 2 to `max_rows` rows is computed as `(weight @ rows.T).T`."""

    def __init__(self, max_rows: int) -> None:
        super().__init__()
        self.max_rows = max_rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute `F.linear` of few rows here, leave everything else alone."""
        if func is F.linear and not kwargs:
            rows = args[0].numel() // args[0].shape[-1]
            if 2 <= rows <= self.max_rows:
                return _transposed_linear(*args)
        return func(*args, **(kwargs or {}))


def _transposed_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = (weight @ rows.reshape(-1, rows.shape[-1]).T).T.contiguous().view(*rows.shape[:-1], -1)
    return product if bias is None else product + bias.to(product.dtype)  # as F.linear under autocast


@torch.no_grad()
def fastest_layout(head: Tensor, num_rows: int) -> AbstractContextManager[Any]:
    """The context in which products of up to `num_rows` rows are fastest on the head's device.

    Args:
        head: the LM head, [V, H]: large enough that it is read from memory, as all weights are in decoding.
        num_rows: slots of a block.
    """
    if head.device.type != "cpu":
        return nullcontext()
    rows = torch.ones(num_rows, head.shape[1], dtype=head.dtype)  # no random numbers: training may be going on
    usual, transposed = [], []
    for _ in range(_TRIALS):
        usual.append(_seconds(F.linear, rows, head))
        transposed.append(_seconds(_transposed_linear, rows, head))
    return TransposedFewRows(num_rows) if min(transposed) < _WORTHWHILE * min(usual) else nullcontext()


def _seconds(product: Any, rows: Tensor, weight: Tensor) -> float:
    start = time.perf_counter()
    product(rows, weight)
    return time.perf_counter() - start
