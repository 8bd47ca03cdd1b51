"""A pool whose drafter is on a GPU: states arrive whole and in order, whatever runs on that GPU meanwhile."""

import json
from pathlib import Path

import pytest
import torch

from dflash.batch import Batch
from dflash.cost import CostModel
from dflash.placement.pool import PoolPlacement
from dflash.target.frozen import FrozenTarget
from dflash.target.tiny import build_tiny_model
from tests.commands import train_here
from tests.placement.test_split_by_length import padded_batches

pytestmark = pytest.mark.gpu

DRAFTER = torch.device("cuda", 0)


def targets() -> list[list[str]]:
    """Of replicas: on the CPU, and on the other GPUs where there are any."""
    others = [f"cuda:{number}" for number in range(1, torch.cuda.device_count())]
    return [["cpu", "cpu"], *([others] if others else [])]


def read_and_disturb(pool: PoolPlacement, made: list[Batch]) -> list[torch.Tensor]:
    """States as the drafter's stream sees them, while it works and takes and frees memory of their size."""
    got, work = [], torch.randn(1024, 1024, device=DRAFTER)
    for batch in pool.feed(made):
        assert batch.hidden is not None
        assert batch.input_ids.device == batch.hidden.device == DRAFTER
        for _ in range(10):
            work = torch.tanh(work @ work)
        got.append(batch.hidden.clone())  # runs behind that work, when the host is batches ahead
        shape, dtype = batch.hidden.shape, batch.hidden.dtype
        del batch
        torch.full(shape, float("nan"), device=DRAFTER, dtype=dtype)  # would take memory that was freed too early
    return got


@pytest.mark.parametrize("routing", ["least_loaded", "split_by_length"])
def test_states_arrive_whole_and_in_order(routing: str) -> None:
    made, model = padded_batches(40), build_tiny_model()
    expected = [FrozenTarget(model, [0, 1]).hidden_states(batch.input_ids) for batch in made]
    for devices in targets():
        pool = PoolPlacement(
            devices, routing=routing, cost=CostModel(), token_budget=160, pad_multiple=8, hang_timeout_seconds=60.0
        )
        first = pool.lay_out(DRAFTER)
        pool.open(FrozenTarget(build_tiny_model(), [0, 1], first))
        got = read_and_disturb(pool, made)
        assert len(got) == len(made)
        for states, theirs, batch in zip(got, expected, made, strict=True):
            for row, length in enumerate(batch.lengths.tolist()):
                ours = states[row, :length].cpu()
                torch.testing.assert_close(ours, theirs[row, :length], rtol=1e-3, atol=1e-3)


def test_smoke_trains_through_a_pool(tmp_path: Path) -> None:
    options = ["trainer.accelerator=gpu", "placement=pool", f"placement.targets=[{','.join(targets()[-1])}]"]
    assert train_here(tmp_path, tmp_path / "cache", "epochs=1", *options) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["validation"]["trained"]["loss"] < summary["validation"]["untrained"]["loss"]
