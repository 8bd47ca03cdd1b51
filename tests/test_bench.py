"""`python -m dflash.bench`: the table, the picture, and that batches are measured as planned."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash.benchmarks.fit import fit_cost, non_negative_least_squares
from dflash.benchmarks.kernels import KernelSizes, attention_cases, loss_cases
from dflash.benchmarks.steps import Work, ratio_of, spread_batches, with_equal_lengths
from dflash.data.collate import collate
from dflash.samplers.full_shuffle import FullShuffleSampler
from dflash.samplers.limits import BatchLimits
from tests.commands import run_module
from tests.data.make import random_rows, token_datasets
from tests.training.test_objective import module_for
from tests.training.tiny import tiny_drafter, tiny_ends

TINY = [
    "target=tiny", "data.max_samples=80", "data.val_fraction=0.2", "data.median_tokens=30", "data.longest_tokens=200",
    "drafter.num_layers=1", "drafter.target_layer_ids=[0,1]", "batch.token_budget=1024", "num_threads=1",
    "matrix_size=512",
]  # fmt: skip

TINY_KERNELS = ["kernels.documents=4", "kernels.document_tokens=64", "kernels.anchors_per_document=16",
                "kernels.loss_slots=512", "objective.chunk_slots=64"]  # fmt: skip


def test_it_writes_a_row_for_every_part_and_sampler(tmp_path: Path) -> None:
    options = ["rounds=2", "batches_per_round=1", "samplers=[sorted,random,packed]", *TINY_KERNELS]
    result = run_module("bench", *TINY, *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (table,) = tmp_path.glob("outputs/bench/*/*/bench.csv")
    rows = list(csv.DictReader(table.open()))
    assert list(rows[0]) == ["case", "real_tokens_per_s", "ratio_to_sorted", "peak_mib", "share_of_peak"]
    cases = [
        f"{part}/{sampler}"
        for part in ("target", "drafter", "step")
        for sampler in ("sorted", "random", "packed", "packed_equal")
    ]
    assert [row["case"] for row in rows] == cases
    for row in rows:
        assert float(row["real_tokens_per_s"]) > 0
        assert float(row["peak_mib"]) > 0
        assert 0 < float(row["share_of_peak"]) < 1
        if row["case"].endswith("/sorted"):
            assert float(row["ratio_to_sorted"]) == 1.0
    of = {row["case"]: float(row["real_tokens_per_s"]) for row in rows}
    assert of["step/sorted"] < min(of["target/sorted"], of["drafter/sorted"])
    assert (table.parent / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "step/random" in result.stdout
    assert "profiler" not in result.stdout + result.stderr

    kernels = list(csv.DictReader((table.parent / "kernels.csv").open()))
    assert list(kernels[0]) == ["case", "seconds", "speed_ratio", "peak_mib", "memory_ratio", "share_of_peak"]
    assert [row["case"] for row in kernels] == [
        "attention/dense_padded", "attention/dense_packed", "attention/grouped",
        "loss/full_logits", "loss/chunked", "drafter_step/long", "drafter_step/short",
    ]  # fmt: skip
    assert all(float(row["seconds"]) > 0 and float(row["peak_mib"]) > 0 for row in kernels)
    memory = {row["case"]: float(row["memory_ratio"]) for row in kernels}
    assert memory["attention/dense_packed"] > memory["attention/dense_padded"] == 1.0
    assert memory["loss/chunked"] < 0.5  # 64 of 512 slots at a time
    assert 0 < float(kernels[-1]["share_of_peak"]) < 1


def test_an_unknown_sampler_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    result = run_module("bench", "samplers=[sorted,bucketd]", cwd=tmp_path)
    assert result.returncode == 1
    assert "Error: samplers: 'bucketd' is unknown. Allowed: bucketed, " in result.stderr
    assert "Did you mean bucketed?" in result.stderr


def test_rounds_measure_different_batches_from_every_stratum(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(4, 100, 200).tolist()
    dataset, _ = token_datasets(tmp_path, random_rows(lengths), random_rows([9]))
    limits = BatchLimits(400, 4, 4)
    plan = FullShuffleSampler().plan(
        dataset.lengths, dataset.num_anchorable, limits, seed=0, epoch=0, world_size=1, accumulate=1
    )
    rounds = spread_batches(limits, dataset, plan, rounds=3, batches_per_round=4)
    chosen = [number for of_round in rounds for number in of_round]
    assert len(set(chosen)) == 12
    longest = [max(dataset.lengths[plan.batch(n, 0, 0)]) for n in range(plan.num_batches)]
    quarters = np.quantile(longest, [0.25, 0.5, 0.75])
    for of_round in rounds:
        assert all(abs(np.searchsorted(quarters, longest[n]) - k) <= 1 for k, n in enumerate(of_round))
    with pytest.raises(ValueError, match=r"batches_per_round=999 is more than the \d+ batches"):
        spread_batches(limits, dataset, plan, rounds=1, batches_per_round=999)


def test_kernels_compute_the_same_in_every_way() -> None:
    module, sizes = (
        module_for(tiny_drafter(), tiny_ends(), chunk_slots=8),
        KernelSizes(documents=3, document_tokens=20, anchors_per_document=7, loss_slots=33),
    )
    for cases in (attention_cases(module, sizes, torch.float32), loss_cases(module, sizes)):
        (first, *others) = [case.run() for case in cases.values()]
        assert others
        for other in others:
            torch.testing.assert_close(other, first, rtol=1e-4, atol=1e-5)


def test_what_a_kernel_may_be_given_is_checked() -> None:
    with pytest.raises(ValueError, match=r"kernels\.documents=0"):
        KernelSizes(documents=0)
    with pytest.raises(ValueError, match=r"kernels\.anchors_per_document=8 must be below kernels\.document_tokens=8"):
        KernelSizes(document_tokens=8, anchors_per_document=8)
    sizes = KernelSizes(documents=3, document_tokens=64, anchors_per_document=16)
    short = sizes.shorter(8)
    assert (short.documents, short.document_tokens, short.anchors_per_document) == (24, 8, 2)


def test_equal_lengths_keep_tokens_and_anchors_where_they_were(tmp_path: Path) -> None:
    dataset, _ = token_datasets(tmp_path, random_rows([9, 40, 23, 15]), random_rows([9]))
    batch = collate(dataset, range(len(dataset)), BatchLimits(400, 16, 5), packed=True, seed=0, epoch=0)
    equal = with_equal_lengths(batch)
    length = batch.num_real_tokens // len(batch.lengths)
    assert equal.input_ids.shape == (len(batch.lengths), length)
    assert equal.lengths.tolist() == [length] * len(batch.lengths)
    total = equal.input_ids.numel()
    assert equal.input_ids.flatten().tolist() == batch.input_ids[0, :total].tolist()
    assert equal.loss_mask.flatten().tolist() == batch.loss_mask[0, :total].tolist()
    flat = (batch.cu_seqlens[:-1][batch.anchor_doc] + batch.anchors).tolist()
    assert (equal.anchor_doc * length + equal.anchors).tolist() == [place for place in flat if place < total]


def test_the_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    fast = [Work(flops=10.0, seconds=s) for s in (1.0, 2.0, 10.0)]
    slow = [Work(flops=10.0, seconds=s) for s in (2.0, 4.0, 10.0)]
    assert ratio_of(slow, fast) == 0.5
    assert ratio_of(slow, None) is None


def test_least_squares_finds_the_coefficients_and_never_a_negative_one() -> None:
    rng = np.random.default_rng(0)
    factors = rng.uniform(1, 10, (30, 3))
    assert non_negative_least_squares(factors, factors @ [2.0, 0.0, 0.5]) == pytest.approx([2.0, 0.0, 0.5], abs=1e-9)
    values = factors @ [2.0, -0.3, 0.5]
    assert min(non_negative_least_squares(factors, values)) >= 0


def test_the_cost_model_is_found_again_from_steps_that_follow_it(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(4, 400, 300).tolist()
    dataset, _ = token_datasets(tmp_path, random_rows(lengths), random_rows([9]))

    class Steps:
        """Takes exactly as long as a known model says."""

        limits = BatchLimits(2000, 4, 4)

        def __init__(self) -> None:
            self.dataset = dataset

        def measure(self, batch: np.ndarray, work: dict[str, Work]) -> None:
            padded = -(-int(dataset.lengths[batch].max()) // 4) * 4
            work["target"].seconds += 1e-4 * padded * len(batch) + 1e-7 * padded**2 * len(batch) + 0.01
            work["drafter"].seconds += 0.03 + 2e-3 * float(np.minimum(dataset.num_anchorable[batch], 4).sum())

    cost, explained = fit_cost(Steps())  # type: ignore[arg-type]
    assert cost.target_per_token == pytest.approx(1e-4, rel=1e-6)
    assert cost.target_per_token_squared == pytest.approx(1e-7, rel=1e-6)
    assert cost.drafter_per_anchor == pytest.approx(2e-3, rel=1e-6)
    assert cost.per_batch == pytest.approx(0.01, rel=1e-6)
    assert cost.drafter_per_batch == pytest.approx(0.03, rel=1e-6)
    assert explained == pytest.approx(1.0)
