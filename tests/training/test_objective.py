"""The objective against the element-by-element reference, in loss and in every gradient."""

import dataclasses
import functools

import pytest
import torch

from dflash.batch import Batch
from dflash.drafter.network import DFlashDrafter
from dflash.target.ends import TargetEnds
from dflash.training.lightning_module import DFlashModule
from dflash.training.objective import CrossEntropyObjective, block_labels, matched_prefix
from tests.training.reference import ReferenceDrafter, block_terms
from tests.training.tiny import BLOCK, MASK_ID, make_batch, rows_of, tiny_drafter, tiny_ends

GAMMA = 2.5

# masks and anchors of each sample of a batch
CASES = {
    "one response": (["...xxxxxxx"], [[3, 5]]),
    "padded batch": (["..xxxxx", "....xxxxxxxxx"], [[2, 4], [4, 7, 11]]),
    "tail block, cut by the end of the sample": (["..xxxx"], [[4, 3]]),
    "several turns, a block stops at the end of its turn": (["..xxx...xxxx.", ".xx..xxx"], [[2, 3, 8, 10], [1, 5, 6]]),
    "anchor at position 0, without any context": (["xxxxxx"], [[0, 1]]),
    "a sample without anchors": (["..xxxx", "...", "..xxx"], [[2], [], [2, 3]]),
}


def module_for(drafter: DFlashDrafter, ends: TargetEnds, chunk_slots: int = 3) -> DFlashModule:
    objective = CrossEntropyObjective(drafter.block_size, GAMMA, chunk_slots)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    return DFlashModule(drafter, ends, objective, sgd, warmup_fraction=0.0, max_steps=10)


def reference_terms(drafter: DFlashDrafter, ends: TargetEnds, batch: Batch) -> tuple[torch.Tensor, float]:
    tensors = dict(drafter.named_parameters())
    reference = ReferenceDrafter(tensors, heads=2, key_heads=1, eps=1e-5, theta=100.0)
    assert batch.hidden is not None
    loss, weights = torch.zeros((), dtype=torch.float64), 0.0
    for anchor, doc in zip(batch.anchors.tolist(), batch.anchor_doc.tolist(), strict=True):
        length = int(batch.lengths[doc])
        block_loss, block_weights = block_terms(
            reference,
            token_ids=batch.input_ids[doc, :length].tolist(),
            mask=batch.loss_mask[doc, :length].tolist(),
            captured=batch.hidden[doc],
            anchor=anchor,
            block_size=BLOCK,
            mask_token_id=MASK_ID,
            gamma=GAMMA,
            embedding=ends.embedding,
            head=ends.head,
            softcap=ends.logit_softcap,
        )
        loss, weights = loss + block_loss, weights + block_weights
    return loss, weights


def gradients(drafter: DFlashDrafter, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    drafter.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("case", "softcap"), [*((case, None) for case in CASES), ("padded batch", 1.5)])
def test_loss_and_every_gradient_equal_the_reference(case: str, softcap: float | None) -> None:
    torch.manual_seed(1)
    masks, anchors = CASES[case]
    anchors = [sorted(row) for row in anchors]
    batch, drafter, ends = make_batch(masks, anchors, pad_to=16), tiny_drafter(), tiny_ends(softcap)
    outcome = module_for(drafter, ends).draft(batch)
    expected_loss, expected_weights = reference_terms(drafter, ends, batch)
    torch.testing.assert_close(outcome.loss_sum, expected_loss, rtol=1e-12, atol=1e-12)
    assert float(outcome.weights.sum()) == pytest.approx(expected_weights, rel=1e-12)
    ours, theirs = gradients(drafter, outcome.loss_sum), gradients(drafter, expected_loss)
    assert ours.keys() == theirs.keys() == dict(drafter.named_parameters()).keys()
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 1e-9 or case.startswith("anchor at position 0"), f"{name} is not exercised"
        torch.testing.assert_close(ours[name], gradient, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_a_batch_of_two_is_two_batches_of_one_with_the_weighted_mean() -> None:
    torch.manual_seed(2)
    both = make_batch(["..xxxxxx", ".....xxxxxxxx"], [[2, 3, 6], [5, 8]])
    drafter, ends = tiny_drafter(), tiny_ends()
    module = module_for(drafter, ends)
    together = module.draft(both)
    alone = [module.draft(rows_of(both, [row])) for row in (0, 1)]
    mean = sum(o.loss_sum for o in alone) / sum(o.weights.sum() for o in alone)
    torch.testing.assert_close(together.loss_sum / together.weights.sum(), mean, rtol=1e-12, atol=0)


def test_what_stands_at_or_after_the_anchor_in_the_context_changes_nothing() -> None:
    torch.manual_seed(3)
    batch, drafter, ends = make_batch(["...xxxxxxx"], [[5]]), tiny_drafter(), tiny_ends()
    before = module_for(drafter, ends).draft(batch).cross_entropy
    assert batch.hidden is not None
    batch.hidden[0, 5:] = torch.randn_like(batch.hidden[0, 5:])  # the anchor's own state, and all later ones
    torch.testing.assert_close(module_for(drafter, ends).draft(batch).cross_entropy, before, rtol=0, atol=0)
    batch.hidden[0, 4] += 1.0  # the last state that exists when decoding drafts from the anchor
    assert not torch.allclose(module_for(drafter, ends).draft(batch).cross_entropy, before)


def test_blocks_do_not_see_each_other() -> None:
    torch.manual_seed(4)
    drafter, ends = tiny_drafter(), tiny_ends()
    batch = make_batch(["..xxxxxxxx"], [[2, 4, 7]])
    together = module_for(drafter, ends).draft(batch).cross_entropy
    for n, anchor in enumerate([2, 4, 7]):
        batch.anchors, batch.anchor_doc = torch.tensor([anchor]), torch.tensor([0])
        alone = module_for(drafter, ends).draft(batch).cross_entropy
        torch.testing.assert_close(alone[0], together[n], rtol=1e-12, atol=1e-12)


def test_the_chunk_size_of_the_head_changes_nothing() -> None:
    torch.manual_seed(5)
    batch, drafter, ends = make_batch(["..xxxxxxxxxx"], [[2, 3, 5, 8]]), tiny_drafter(), tiny_ends()
    outcomes = []
    for chunk_slots in (1, 2, 1000):
        outcome = module_for(drafter, ends, chunk_slots).draft(batch)
        outcomes.append((outcome.loss_sum.detach(), gradients(drafter, outcome.loss_sum)["fc.weight"]))
    for loss, gradient in outcomes[1:]:
        torch.testing.assert_close(loss, outcomes[0][0], rtol=1e-13, atol=0)
        torch.testing.assert_close(gradient, outcomes[0][1], rtol=1e-11, atol=1e-14)


def test_the_gradient_formed_in_the_forward_pass_is_the_numerical_one() -> None:
    from dflash.training.objective import WeightedHeadCrossEntropy

    torch.manual_seed(6)
    ends = dataclasses.replace(
        tiny_ends(softcap=2.0), logit_scale=0.7, head_bias=torch.randn(11, dtype=torch.float64), embedding_scale=3.0
    )
    states = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    labels, weights = torch.randint(0, 11, (5,)), torch.rand(5, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda s: WeightedHeadCrossEntropy.apply(s, labels, weights, ends, 2)[0], (states,), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("mask", "anchor", "expected"),
    [
        ("..xxxxxx", 2, [True, True, True]),
        ("..xxxx", 4, [True, False, False]),  # out of range after one
        ("..xx.xx", 2, [True, False, False]),  # the turn ends; the next turn is not this block's
        ("xxxxxxxx", 0, [True, True, True]),
    ],
)
def test_supervision_stops_at_the_first_unsupervised_or_out_of_range_position(
    mask: str, anchor: int, expected: list[bool]
) -> None:
    batch = make_batch([mask], [[anchor]])
    labels, supervised = block_labels(batch, batch.anchors, batch.anchor_doc, 4)
    assert supervised[0].tolist() == expected
    for k in range(1, 4):
        if expected[k - 1]:
            assert labels[0, k - 1] == batch.input_ids[0, anchor + k]


def test_the_matched_prefix_ends_at_the_first_mistake() -> None:
    correct = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    assert matched_prefix(correct).tolist() == [2, 0, 4, 0]


def test_gamma_is_published_for_three_block_sizes_and_asked_for_otherwise() -> None:
    for block_size, gamma in ((16, 7.0), (10, 5.0), (8, 4.0)):
        assert CrossEntropyObjective(block_size).slot_weights == CrossEntropyObjective(block_size, gamma).slot_weights
    with pytest.raises(ValueError, match=r"objective\.gamma=null.*block_size=4"):
        CrossEntropyObjective(4)
    with pytest.raises(ValueError, match=r"objective\.gamma='wide'"):
        CrossEntropyObjective(8, "wide")  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["checkpointed", "compiled", "checkpointed and compiled"])
def test_how_layers_run_changes_no_gradient(how: str) -> None:
    torch.manual_seed(0)
    drafter, ends = tiny_drafter(num_layers=2), tiny_ends()
    batches = [make_batch(["..xxxxx", "....xxxxxxxxx"], [[2, 4], [4, 7, 11]]), make_batch(["..xxxxx"], [[3]])]
    module = module_for(drafter, ends)
    expected = [gradients(drafter, module.draft(batch).loss_sum) for batch in batches]
    drafter.checkpoint_activations = "checkpointed" in how
    if "compiled" in how:
        drafter.compile_layers(backend="eager")  # the graphs without the compiler, which takes a minute
    for batch, of_batch in zip(batches, expected, strict=True):
        got = gradients(drafter, module.draft(batch).loss_sum)
        torch.testing.assert_close(got, of_batch, rtol=1e-10, atol=1e-12)
    assert set(drafter.state_dict()) == set(tiny_drafter(num_layers=2).state_dict())


def test_checkpointing_keeps_less_for_the_backward_pass() -> None:
    kept = {}
    for checkpoint_activations in (False, True):
        torch.manual_seed(0)
        drafter, ends = tiny_drafter(num_layers=2), tiny_ends()
        drafter.checkpoint_activations = checkpoint_activations
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.numel()) or t, lambda t: t):
            module_for(drafter, ends).draft(make_batch(["....xxxxxxxxx"], [[4, 7, 11]]))
        kept[checkpoint_activations] = sum(sizes)
    assert kept[True] < kept[False] / 2
