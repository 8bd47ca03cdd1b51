"""The decoder layers of a causal LM: where they are, which of them the drafter reads, and how their outputs are had."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers of a causal LM.

    Raises:
        ValueError: the model has none under a name that transformers uses.
    """
    decoder = model.get_decoder()
    for name in ("layers", "h"):
        if isinstance(layers := getattr(decoder, name, None), nn.ModuleList):
            return layers
    raise ValueError(f"target {type(model).__name__}: found no list of decoder layers in {type(decoder).__name__}.")


@contextmanager
def layer_hooks(layers: nn.ModuleList, layer_ids: Sequence[int], capture: Callable[[int, Any], None]) -> Iterator[None]:
    """While it lasts, each of these layers gives its id and its output to `capture`."""
    handles = [
        layers[i].register_forward_hook(lambda _module, _args, output, i=i: capture(i, output)) for i in layer_ids
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> None:
    """Refuse layer ids that are repeated or that the target does not have.

    Raises:
        ValueError: with the ids and the range.
    """
    out_of_range = [i for i in layer_ids if not 0 <= i < num_layers]
    if not layer_ids or out_of_range or len(set(layer_ids)) < len(layer_ids):
        raise ValueError(
            f"drafter.target_layer_ids={list(layer_ids)}: expected distinct ids in 0..{num_layers - 1}, the target has "
            f"{num_layers} layers. Name them, for example drafter.target_layer_ids=[0,{num_layers - 1}]."
        )


def spaced_layer_ids(num_captured: int, num_layers: int) -> list[int]:
    """`num_captured` layer ids, evenly spaced from 1 to num_layers - 3; a single one is num_layers // 2.

    Raises:
        ValueError: the target is too small for so many distinct ids.
    """
    if num_captured == 1:
        return [num_layers // 2]
    first, last = 1, num_layers - 3
    ids = [round(first + k * (last - first) / (num_captured - 1)) for k in range(num_captured)]
    if len(set(ids)) < num_captured or last <= first:
        raise ValueError(
            f"drafter.num_captured={num_captured}: the target's {num_layers} layers do not hold so many distinct "
            f"ones between 1 and {num_layers - 3} (evenly spaced: {ids}). Name them: drafter.target_layer_ids=[...], "
            f"each in 0..{num_layers - 1}."
        )
    return ids
