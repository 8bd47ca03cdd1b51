"""Attention on CUDA, of the target's packed rows and of draft blocks, against what the CPU computes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import Tensor

from dflash.drafter.block_attention import block_attention
from dflash.target.frozen import FrozenTarget
from dflash.target.tiny import build_tiny_model
from tests.commands import train_here
from tests.models import ARCHITECTURES, random_model

pytestmark = pytest.mark.gpu

HEADS, KEY_HEADS, DIM = 6, 2, 64
LENGTHS = [300, 1, 170, 513]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("prefill_chunk", [None, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_rows_are_read_as_each_sample_alone(name: str, prefill_chunk: int | None, dtype: torch.dtype) -> None:
    model = random_model(ARCHITECTURES[name]).to(dtype)
    ids = torch.randint(3, 97, (1, sum(LENGTHS) + 8))
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    target = FrozenTarget(model, [0, 2], "cuda", prefill_chunk)
    target.check_packing()
    in_one_pass = FrozenTarget(model, [0, 2], "cuda")
    together = target.hidden_states(ids, bounds)
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        alone = in_one_pass.hidden_states(ids[:, begin:end])
        error = (together[:, begin:end] - alone).float().norm() / alone.float().norm()
        assert float(error) < 64 * torch.finfo(dtype).eps


@pytest.fixture(scope="module")
def blocks() -> tuple[Tensor, Tensor, list[Tensor]]:
    """Anchors, starts, and float64 inputs of their attention, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randperm(n, generator=generator)[:60].sort().values for n in LENGTHS]
    anchors = torch.cat(drawn)
    starts = torch.tensor([sum(LENGTHS[:i]) for i, of_doc in enumerate(drawn) for _ in of_doc])
    shapes = [(len(anchors), 16, n, DIM) for n in (HEADS, KEY_HEADS, KEY_HEADS)]
    shapes += [(1, sum(LENGTHS) + 8, KEY_HEADS, DIM)] * 2  # type: ignore[list-item]
    return anchors, starts, [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def attended(
    backend: str, anchors: Tensor, starts: Tensor, inputs: list[Tensor], upstream: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """What blocks attend to, and the gradients towards all inputs."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    shape = {"num_rows": 1, "row_length": inputs[3].shape[1], "block_size": 16}
    result = block_attention(backend, anchors, starts, **shape)(*leaves)
    return [result, *torch.autograd.grad(result, leaves, upstream(result))]


@pytest.mark.parametrize("backend", ["flex", "grouped", "dense"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 3e-2)])
def test_blocks_attend_as_on_the_cpu(
    backend: str, dtype: torch.dtype, tolerance: float, blocks: tuple[Tensor, Tensor, list[Tensor]]
) -> None:
    anchors, starts, inputs = blocks
    inputs = [t.to(dtype) for t in inputs]
    expected = attended("dense", anchors, starts, [t.double() for t in inputs], torch.cos)
    got = attended(backend, anchors.cuda(), starts.cuda(), [t.cuda() for t in inputs], torch.cos)
    for ours, theirs in zip(got, expected, strict=True):
        error = (ours.cpu().double() - theirs).norm() / theirs.norm()
        assert float(error) < tolerance


def test_flex_is_the_same_for_batches_of_other_sizes(blocks: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    anchors, starts, inputs = blocks
    for number, count in enumerate((1, 7, 61, 62, 63, 90, 91, 100, 110, 120, 130, len(anchors))):
        padding = torch.zeros(1, number, KEY_HEADS, DIM)
        first = [t[:count].float() for t in inputs[:3]] + [torch.cat([t.float(), padding], dim=1) for t in inputs[3:]]
        on_gpu = [t.cuda() for t in first]
        # More sizes than torch compiles for: it has to find out that they vary.
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            got = attended("flex", anchors[:count].cuda(), starts[:count].cuda(), on_gpu, torch.cos)
        expected = attended("dense", anchors[:count], starts[:count], first, torch.cos)
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "options", [["drafter.attention=flex"], ["drafter.compile=true"], ["trainer.precision=bf16-mixed"]]
)
def test_packed_smoke_trains_on_the_gpu(options: list[str], tmp_path: Path) -> None:
    # flex wants heads of 16 or more; the tiny target's are smaller.
    heads = ["drafter.head_dim=16"]
    assert (
        train_here(
            tmp_path, tmp_path / "cache", "trainer.accelerator=gpu", "sampler=packed", "epochs=1", *heads, *options
        )
        == 0
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["validation"]["trained"]["loss"] < summary["validation"]["untrained"]["loss"]


def test_a_tiny_target_packs_on_the_gpu() -> None:
    FrozenTarget(build_tiny_model(), [0, 1], "cuda").check_packing()
