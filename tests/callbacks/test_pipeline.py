"""What is said of the pipeline; and that nothing is while queues drain that filled unseen, or that nothing follows."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash.callbacks.pipeline import PipelineMetrics
from dflash.placement.pipeline import PipelineFigures, PoolState
from tests.training.test_objective import module_for
from tests.training.tiny import tiny_drafter, tiny_ends


class Run:
    """A run of 100 optimizer steps as the callback sees it, one step an interval; on one of `world_size` ranks."""

    def __init__(self) -> None:
        self.state = PoolState(figures=PipelineFigures())
        self.callback = PipelineMetrics(self.state, 1, 100)
        self.module = module_for(tiny_drafter(), tiny_ends())
        self.reduced: list[torch.Tensor] = []
        self.trainer: Any = SimpleNamespace(
            accumulate_grad_batches=1, log_every_n_steps=1, max_steps=100, global_step=0, world_size=1, loggers=[],
            is_global_zero=True, strategy=SimpleNamespace(root_device=torch.device("cpu"), reduce=self.reduce),
        )  # fmt: skip
        self.callback.on_train_start(self.trainer, self.module)

    def reduce(self, values: torch.Tensor, reduce_op: str) -> torch.Tensor:
        self.reduced.append(values)
        return values

    def step(self, brought: int, drafter_waits: bool) -> None:
        """One interval, in which the drafter takes a batch and the loader has brought so many in all."""
        self.trainer.global_step += 1
        self.state.figures.delivered += 1
        self.state.figures.brought = brought
        self.state.figures.drafter_wait_seconds += 1e6 if drafter_waits else 0.0
        self.callback.on_train_batch_end(self.trainer, self.module, {}, None, self.trainer.global_step - 1)  # type: ignore[arg-type]


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.split(".")[0] for line in capsys.readouterr().out.splitlines()]


def test_nothing_is_said_while_batches_are_taken_that_were_read_during_a_validation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Run()
    run.step(brought=2, drafter_waits=True)
    assert said(capsys) == ["pipeline: the targets are the bottleneck"]
    run.state.figures.brought = 5  # while it validates
    run.callback.on_validation_end(run.trainer, run.module)
    for brought in (6, 7, 8, 9):  # the four that are there
        run.step(brought, drafter_waits=False)
        assert "pipeline/drafter_wait" in run.module.latest_metrics
    assert said(capsys) == []
    run.step(10, drafter_waits=False)
    assert said(capsys) == ["pipeline: targets and drafter keep up with each other"]


def test_nothing_is_said_when_the_loader_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run()
    for _ in range(97):
        run.step(run.state.figures.delivered + 2, drafter_waits=False)
    assert said(capsys) == ["pipeline: targets and drafter keep up with each other"]
    for _ in range(3):  # all have been brought
        run.step(100, drafter_waits=True)
    assert said(capsys) == []


def test_every_rank_reduces_also_behind_a_decoding_and_nothing_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run()
    run.step(1, drafter_waits=True)
    run.module.latest_metrics.clear()
    run.module.decoding_seconds += 3.0
    run.step(4, drafter_waits=True)
    assert len(run.reduced) == 2
    assert run.module.latest_metrics == {}
    run.step(5, drafter_waits=False)
    assert "pipeline/drafter_wait" in run.module.latest_metrics
    assert len(said(capsys)) == 1
