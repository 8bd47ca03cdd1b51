"""Floating-point operations, against those that torch counts in the real modules."""

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from dflash.batch import Batch
from dflash.benchmarks.steps import drafter_shape, target_shape
from dflash.flops import TargetShape
from dflash.target.ends import target_ends
from dflash.target.frozen import FrozenTarget
from dflash.training.lightning_module import DFlashModule
from dflash.training.objective import CrossEntropyObjective
from tests.drafter.test_published import TARGET, make_drafter


def test_the_targets_matrices_cost_what_torch_counts() -> None:
    model = AutoModelForCausalLM.from_config(TARGET, attn_implementation="eager")
    target = FrozenTarget(model, [0, 2])
    with FlopCounterMode(display=False) as counter:
        target.hidden_states(torch.randint(0, 90, (1, 40)))
    shape = target_shape(target)
    assert shape.num_layers == 3, "the fourth layer does not run"
    # torch counts the square of scores, of which causal attention needs the lower half and the diagonal.
    square = 4 * 40 * 40 * shape.num_heads * shape.head_dim * shape.num_layers
    triangle = 4 * (40 * 41 // 2) * shape.num_heads * shape.head_dim * shape.num_layers
    assert counter.get_total_flops() == shape.flops([40]) - triangle + square


def test_the_drafters_products_cost_what_torch_counts() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(TARGET)
    module = DFlashModule(
        make_drafter(),
        target_ends(model),
        CrossEntropyObjective(4, 2.0),
        torch.optim.SGD,
        warmup_fraction=0,
        max_steps=1,
    )
    ids = torch.randint(0, 90, (1, 30))
    batch = Batch(
        input_ids=ids,
        loss_mask=torch.ones(1, 30, dtype=torch.bool),
        lengths=torch.tensor([30]),
        sample_ids=torch.tensor([0]),
        anchors=torch.tensor([3, 9, 20]),
        anchor_doc=torch.zeros(3, dtype=torch.long),
        hidden=FrozenTarget(model, [0, 2]).hidden_states(ids),
    )
    with FlopCounterMode(display=False) as counter:
        module.draft(batch).loss_sum.backward()
    # The three blocks attend as one group: to what is before the last one's anchor, and each to itself. The backward
    # pass computes the scores once more, a seventh product where six are needed.
    computed_pairs = 12 * (20 + 4) * 7 // 6
    expected = drafter_shape(module).flops(
        slots=12, supervised_slots=9, context_tokens=30, visible_pairs=computed_pairs
    )
    assert counter.get_total_flops() == expected


def test_causal_pairs_are_counted_one_by_one() -> None:
    shape = TargetShape(layer_parameters=0, num_layers=2, num_heads=3, head_dim=5)
    pairs = sum(1 for length in (4, 7) for query in range(length) for key in range(length) if key <= query)
    assert shape.flops([4, 7]) == pairs * 2 * 2 * 3 * 5 * 2  # two products, two operations each
