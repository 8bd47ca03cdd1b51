"""Packed and padded training are the same: losses and gradients of the same samples, in any company and order."""

import itertools

import pytest
import torch
from torch import Tensor

from dflash.batch import Batch
from dflash.drafter.network import DFlashDrafter
from dflash.target.ends import TargetEnds
from tests.training.test_objective import gradients, module_for
from tests.training.tiny import make_batch, rows_of, tiny_drafter, tiny_ends

MASKS = ["..xxxxxx", "xxx", "....xxxxxxxxxxx", ".x.xx...xxxx"]
ANCHORS = [[2, 3, 6], [0, 1], [4, 9, 13], [3, 8, 10]]


def packed(batch: Batch, order: list[int], padding: int = 0) -> Batch:
    """The samples of a padded batch behind each other, in this order."""
    assert batch.hidden is not None
    lengths = [int(batch.lengths[i]) for i in order]

    def row(values: Tensor) -> Tensor:
        parts = [values[i, :length] for i, length in zip(order, lengths, strict=True)]
        return torch.cat([*parts, torch.zeros_like(values[0, :padding])])[None]

    of_doc = [torch.nonzero(batch.anchor_doc == i).flatten() for i in order]
    return Batch(
        input_ids=row(batch.input_ids),
        loss_mask=row(batch.loss_mask),
        lengths=torch.tensor(lengths),
        sample_ids=batch.sample_ids[order],
        anchors=torch.cat([batch.anchors[which] for which in of_doc]),
        anchor_doc=torch.cat([torch.full_like(which, doc) for doc, which in enumerate(of_doc)]),
        cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        hidden=row(batch.hidden),
    )


def make(backend: str, dtype: torch.dtype) -> tuple[Batch, DFlashDrafter, TargetEnds]:
    torch.manual_seed(0)
    batch, drafter, ends = make_batch(MASKS, ANCHORS, pad_to=18), tiny_drafter(), tiny_ends()
    drafter.attention_backend = backend
    assert batch.hidden is not None
    batch.hidden = batch.hidden.to(dtype)
    ends = TargetEnds(ends.embedding.to(dtype), 1.0, ends.head.to(dtype), None, 1.0, None)
    return batch, drafter.to(dtype), ends


@pytest.mark.parametrize("backend", ["grouped", "dense"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_losses_and_gradients_are_those_of_the_padded_batch(
    backend: str, dtype: torch.dtype, tolerance: float, order: list[int]
) -> None:
    batch, drafter, ends = make(backend, dtype)
    module = module_for(drafter, ends)
    reference = module.draft(batch)
    expected = gradients(drafter, reference.loss_sum)
    together = module.draft(packed(batch, order, padding=3))
    got = gradients(drafter, together.loss_sum)
    torch.testing.assert_close(together.loss_sum, reference.loss_sum, rtol=tolerance, atol=0)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(got[name], gradient, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("backend", ["grouped", "dense"])
def test_every_document_alone_is_what_it_is_in_company(backend: str) -> None:
    batch, drafter, ends = make(backend, torch.float64)
    module = module_for(drafter, ends)
    for order in ([2, 0], [1, 3, 2], [3]):
        together = module.draft(packed(batch, order))
        alone = [module.draft(rows_of(batch, [i])) for i in order]
        for name in ("cross_entropy", "weights", "supervised", "correct"):
            torch.testing.assert_close(getattr(together, name), torch.cat([getattr(o, name) for o in alone]))


def test_a_block_at_the_end_of_a_document_is_not_supervised_by_the_next_one() -> None:
    batch, drafter, ends = make("grouped", torch.float64)
    outcome = module_for(drafter, ends).draft(packed(batch, [1, 2]))
    assert outcome.supervised[1].tolist() == [True, False, False], "anchor 1 of a document of 3 tokens"
