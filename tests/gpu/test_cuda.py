"""The CUDA paths against the same references as on the CPU. Skipped where there is no GPU: `make test-gpu`."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from dflash.decoding.block_drafter import BlockDrafter
from dflash.decoding.comparison import Prompt, compare_decoding, find_divergence
from dflash.decoding.speculative import decode
from dflash.decoding.transcript import DecodingOptions, Transcript
from dflash.drafter.config import DrafterOptions, drafter_config
from dflash.drafter.network import DFlashDrafter
from dflash.target.ends import TargetEnds, target_ends
from dflash.target.frozen import FrozenTarget
from dflash.target.tiny import build_tiny_model
from dflash.training.objective import WeightedHeadCrossEntropy
from tests.commands import train_here
from tests.decoding.drafters import greedy_text, scripts
from tests.training.test_objective import module_for
from tests.training.tiny import make_batch, tiny_drafter, tiny_ends

pytestmark = pytest.mark.gpu


def on_cuda(ends: TargetEnds) -> TargetEnds:
    return dataclasses.replace(ends, embedding=ends.embedding.cuda(), head=ends.head.cuda())


def test_the_drafters_loss_and_gradients_equal_the_cpus() -> None:
    torch.manual_seed(0)
    batch, drafter, ends = make_batch(["..xxxxx", "....xxxxxxxxx"], [[2, 4], [4, 7, 11]]), tiny_drafter(), tiny_ends()
    outcome = module_for(drafter, ends).draft(batch)
    outcome.loss_sum.backward()
    expected = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    on_gpu = module_for(drafter.cuda(), on_cuda(ends)).draft(batch.to(torch.device("cuda")))
    torch.testing.assert_close(on_gpu.loss_sum.cpu(), outcome.loss_sum, rtol=1e-10, atol=0)
    on_gpu.loss_sum.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.cpu(), expected[name], rtol=1e-9, atol=1e-11)


def test_the_targets_states_equal_the_cpus() -> None:
    input_ids = torch.randint(4, 100, (2, 33))
    expected = FrozenTarget(build_tiny_model(), [0, 1]).hidden_states(input_ids)
    states = FrozenTarget(build_tiny_model(), [0, 1], "cuda").hidden_states(input_ids)
    assert states.device.type == "cuda"
    torch.testing.assert_close(states.cpu(), expected, rtol=1e-3, atol=1e-3)


def test_a_bf16_head_under_autocast_gives_the_float32_loss_within_rounding() -> None:
    torch.manual_seed(0)
    ends = on_cuda(tiny_ends())
    states = torch.randn(64, 8, device="cuda", dtype=torch.float64)
    labels = torch.randint(0, 11, (64,), device="cuda")
    weights = torch.rand(64, device="cuda", dtype=torch.float64)
    expected = WeightedHeadCrossEntropy.apply(states, labels, weights, ends, 16)[0]
    coarse = type(ends)(ends.embedding.bfloat16(), 1.0, ends.head.bfloat16(), None, 1.0, None)
    leaf = states.float().requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = WeightedHeadCrossEntropy.apply(leaf, labels, weights.float(), coarse, 16)[0]
    loss.backward()
    assert float(loss) == pytest.approx(float(expected), rel=2e-2)
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_decoding_on_the_gpu_withstands_every_drafter(temperature: float) -> None:
    target = FrozenTarget(build_tiny_model(), [0, 1], "cuda")
    prompt = list(range(5, 30))
    theirs = greedy_text(target, prompt, 40, [2])
    for script, drafter in scripts(prompt + theirs, 4, 104, 2).items():
        transcript = decode(target, drafter, prompt, DecodingOptions([2], 40, temperature))
        assert 1 <= len(transcript.token_ids) <= 40
        if temperature == 0:
            assert find_divergence(target, Prompt(script, prompt), transcript, Transcript(theirs)) is None


def test_a_drafter_under_autocast_leaves_a_float32_targets_text_alone() -> None:
    model = build_tiny_model()
    target = FrozenTarget(model, [0, 1], "cuda")
    options = DrafterOptions(block_size=4, num_layers=2, num_captured=2, target_layer_ids=[0, 1])
    drafter = DFlashDrafter(drafter_config(options, model.config, 3)).cuda()
    block_drafter = BlockDrafter(
        drafter, target_ends(model), precision=lambda: torch.autocast("cuda", dtype=torch.bfloat16)
    )
    prompts = [Prompt(str(n), list(range(5, n))) for n in (9, 20, 50)]
    comparison = compare_decoding(target, block_drafter, prompts, DecodingOptions([2], 30), block_size=4)
    assert comparison.lossless is True
    assert comparison.num_rounds > 0


def test_smoke_trains_on_the_gpu(tmp_path: Path) -> None:
    assert train_here(tmp_path, tmp_path / "cache", "trainer.accelerator=gpu", "epochs=1") == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["validation"]["trained"]["loss"] < summary["validation"]["untrained"]["loss"]
