"""How the module normalises, measures, clips and skips, seen from outside: the drafter's weights after real steps."""

from collections.abc import Iterable

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from dflash.batch import Batch
from dflash.drafter.network import DFlashDrafter
from dflash.target.ends import TargetEnds
from dflash.training.lightning_module import DFlashModule
from tests.training.test_objective import module_for, reference_terms
from tests.training.tiny import make_batch, rows_of, tiny_drafter, tiny_ends

MASKS = ["..xxxxxx", "....xxxxxxxxx", ".xxx", "...xxxxxx"]
ANCHORS = [[2, 3, 6], [4, 8], [1], []]


def fit(module: DFlashModule, batches: Iterable[Batch], accumulate: int, *, clip: float | None = None) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(list(batches), batch_size=None))
    return trainer


def copy_of(drafter: DFlashDrafter) -> DFlashDrafter:
    twin = tiny_drafter()
    twin.load_state_dict(drafter.state_dict())
    return twin


@pytest.fixture
def setup() -> tuple[DFlashDrafter, TargetEnds, Batch]:
    torch.manual_seed(0)
    return tiny_drafter(), tiny_ends(), make_batch(MASKS, ANCHORS, pad_to=16)


def test_four_accumulated_batches_are_one_large_batch(setup: tuple[DFlashDrafter, TargetEnds, Batch]) -> None:
    drafter, ends, batch = setup
    accumulated, whole = copy_of(drafter), copy_of(drafter)
    singles = [rows_of(batch, [row]) for row in range(4)]
    assert len(singles[3].anchors) == 0, "one of the four must be without any anchor"
    fit(module_for(accumulated, ends), singles, accumulate=4)
    fit(module_for(whole, ends), [batch], accumulate=1)
    for name, weight in whole.state_dict().items():
        assert not torch.equal(weight, drafter.state_dict()[name]), f"{name} did not move"
        torch.testing.assert_close(accumulated.state_dict()[name], weight, rtol=1e-12, atol=1e-13)


def test_a_step_follows_the_gradient_of_the_reference_loss(setup: tuple[DFlashDrafter, TargetEnds, Batch]) -> None:
    drafter, ends, batch = setup
    trained = copy_of(drafter)
    module = module_for(trained, ends)
    fit(module, [rows_of(batch, [0, 1]), rows_of(batch, [2, 3])], accumulate=2)
    loss, weights = reference_terms(drafter, ends, batch)
    (loss / weights).backward()
    squares = sum(float((p.grad**2).sum()) for p in drafter.parameters() if p.grad is not None)
    assert module.step is not None
    assert module.step.gradient.value == pytest.approx(squares**0.5, rel=1e-10)
    for (name, before), after in zip(drafter.named_parameters(), trained.parameters(), strict=True):
        assert before.grad is not None
        torch.testing.assert_close(after, before - 0.1 * before.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_clipping_shortens_the_step_to_the_given_norm(setup: tuple[DFlashDrafter, TargetEnds, Batch]) -> None:
    drafter, ends, batch = setup
    trained = copy_of(drafter)
    module = module_for(trained, ends)
    fit(module, [batch], accumulate=1, clip=0.01)
    assert module.step is not None
    assert module.step.gradient.value > 0.01, "what is published is the norm before clipping"
    squares = sum(
        float(((after - before) ** 2).sum())
        for after, before in zip(trained.parameters(), drafter.parameters(), strict=True)
    )
    assert squares**0.5 == pytest.approx(0.1 * 0.01, rel=1e-5)


def test_a_step_without_any_anchor_changes_nothing_and_is_counted(
    setup: tuple[DFlashDrafter, TargetEnds, Batch],
) -> None:
    drafter, ends, batch = setup
    trained = copy_of(drafter)
    module = module_for(trained, ends)
    nothing = rows_of(batch, [3])
    trainer = fit(module, [nothing, nothing], accumulate=2)
    assert trainer.global_step == 1
    assert module.num_empty_steps == 1
    for name, weight in trained.state_dict().items():
        assert torch.equal(weight, drafter.state_dict()[name])


def test_state_dict_and_optimizer_hold_the_drafter_alone(setup: tuple[DFlashDrafter, TargetEnds, Batch]) -> None:
    drafter, ends, _ = setup
    module = module_for(drafter, ends)
    assert set(module.state_dict()) == {f"drafter.{name}" for name in drafter.state_dict()}
    optimizer = module.configure_optimizers()["optimizer"]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in drafter.parameters()}


def test_weight_decay_spares_the_norms(setup: tuple[DFlashDrafter, TargetEnds, Batch]) -> None:
    import functools

    drafter, ends, _ = setup
    module = module_for(drafter, ends)
    module.make_optimizer = functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    groups = module.configure_optimizers()["optimizer"].param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, parameter in drafter.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name else 0.5), name
