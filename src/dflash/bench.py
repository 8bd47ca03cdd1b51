"""How fast training goes under every sampler: the target's part, the drafter's, the whole step.

    python -m dflash.bench
    python -m dflash.bench data=jsonl data.path=answers.jsonl target=hf target.name=Qwen/Qwen3-8B
    python -m dflash.bench samplers=[]
    python -m dflash.bench samplers=[] kernels=null 'placements=[inline,"pool targets=[cpu]"]'

Rounds are interleaved in one process, figures are medians of them, ratios are to the sorted sampler. Writes `bench.csv`
and `bench.png`; and, unless `kernels=null`, `kernels.csv`: block attention and loss against what they replace, and the
drafter's step, on inputs of one size. With `placements`, `placements.csv`: whole steps under each, and beside it what
the simulation of `dflash.plan` says of them with a cost model that is fitted to this machine first.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from dflash.checks import check_integer
from dflash.command import command
from dflash.config import instantiate, named_options

if TYPE_CHECKING:
    from dflash.benchmarks.kernels import KernelSizes
    from dflash.benchmarks.placements import Placement
    from dflash.benchmarks.steps import TrainingSteps
    from dflash.samplers.base import LengthBatchSampler


@command("bench")
def main(config: DictConfig) -> None:
    """Compose, measure, report."""
    from hydra.core.hydra_config import HydraConfig

    bench(config, Path(HydraConfig.get().runtime.output_dir))


def bench(config: DictConfig, out_folder: Path) -> None:
    """Measure as `config` says and write the result below `out_folder`.

    Raises:
        ValueError: something in the configuration or the data can not be; the message names it.
    """
    import torch

    from dflash.benchmarks.setup import training_steps
    from dflash.measuring import matrix_peak
    from dflash.memory import keep_freed_memory

    keep_freed_memory()
    for key in ("rounds", "batches_per_round", "matrix_size"):
        check_integer(key, config[key], 1)
    config.batch.probe_first = True  # peak memory is that of the first batch
    samplers = named_options("samplers", config.samplers, config) if config.samplers else {}
    sizes = instantiate(config.kernels) if config.kernels else None
    placements = named_options("placements", config.placements, config) if config.placements else {}
    if not samplers and not sizes and not placements:
        raise ValueError("samplers=[], kernels=null and placements=[] leave nothing to measure. Give one of them.")
    steps = training_steps(config)
    device = steps.target.device
    peak = matrix_peak(steps.compute_dtype, device, size=config.matrix_size)
    print(
        f"{config.target.name} in {steps.target.model.dtype}, drafter in {steps.compute_dtype}, on {device}, "
        f"{torch.get_num_threads()} threads; matrix peak {peak / 1e9:,.0f} GFLOP/s",
        flush=True,
    )
    if samplers:
        bench_samplers(steps, samplers, config, peak, out_folder)
    if sizes:
        bench_kernels(steps, sizes, config, peak, out_folder)
    if placements:
        bench_placements(steps, placements, config, out_folder)


def bench_samplers(
    steps: "TrainingSteps",
    samplers: dict[str, "LengthBatchSampler"],
    config: DictConfig,
    matrix_peak: float,
    out_folder: Path,
) -> None:
    """Training steps under every sampler: `bench.csv`, `bench.png`."""
    import numpy as np

    from dflash.benchmarks.steps import BenchRow, bench_cases, measure_samplers
    from dflash.data.schedule import plan_samples
    from dflash.report.plots import plot_bench

    plans = {
        name: plan_samples(sampler, steps.dataset, steps.limits, seed=config.seed, epoch=0, world_size=1, accumulate=1)
        for name, sampler in samplers.items()
    }
    if any(plan.packed for plan in plans.values()):
        steps.target.check_packing()
    lengths = steps.dataset.lengths
    print(
        f"{len(lengths):,} samples of {lengths.min():,} to {lengths.max():,} tokens, median {np.median(lengths):,.0f}; "
        "batches an epoch: " + ", ".join(f"{name} {plan.num_batches}" for name, plan in plans.items()),
        flush=True,
    )
    cases = bench_cases(plans)
    with _progress(len(cases) * (config.rounds + 1)) as on_turn:
        rows = measure_samplers(
            steps,
            cases,
            rounds=config.rounds,
            batches_per_round=config.batches_per_round,
            matrix_peak=matrix_peak,
            on_turn=on_turn,
        )
    _write_table(BenchRow, rows, out_folder / "bench.csv")
    plot_bench([asdict(row) for row in rows], out_folder / "bench.png")
    print(out_folder / "bench.png")


def bench_kernels(
    steps: "TrainingSteps", sizes: "KernelSizes", config: DictConfig, matrix_peak: float, out_folder: Path
) -> None:
    """Block attention, loss and the drafter's step: `kernels.csv`."""
    from dflash.benchmarks.kernels import KernelRow, kernel_cases, measure_kernels

    kinds = kernel_cases(steps, sizes)
    with _progress(sum(map(len, kinds)) * (config.rounds + 1)) as on_turn:
        rows = measure_kernels(
            kinds, steps.target.device, rounds=config.rounds, matrix_peak=matrix_peak, on_turn=on_turn
        )
    _write_table(KernelRow, rows, out_folder / "kernels.csv")


def bench_placements(
    steps: "TrainingSteps", placements: "dict[str, Placement]", config: DictConfig, out_folder: Path
) -> None:
    """Whole steps under every placement, measured and simulated: `placements.csv`."""
    from dflash.benchmarks.fit import show_fitted_cost
    from dflash.benchmarks.placements import PlacementRow, measure_placements
    from dflash.data.schedule import plan_samples

    (sampler,) = named_options("samplers", OmegaConf.create([config.placement_sampler]), config).values()
    plan = plan_samples(
        sampler, steps.dataset, steps.limits, seed=config.seed, epoch=0, world_size=1, accumulate=1
    )  # fmt: skip
    cost = show_fitted_cost(steps)
    with _progress(len(placements) * (config.rounds + 1)) as on_turn:
        rows = measure_placements(
            steps,
            placements,
            plan,
            cost,
            rounds=config.rounds,
            batches_per_round=config.batches_per_round,
            on_turn=on_turn,
        )
    _write_table(PlacementRow, rows, out_folder / "placements.csv")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    from tqdm import tqdm

    with tqdm(total=total, desc="measuring", unit="turn") as bar:

        def on_turn(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        yield on_turn


def _write_table(kind: type, rows: Sequence[Any], path: Path) -> None:
    """The rows as a table, in the file and on the screen."""
    from dflash.report.tables import text_table

    columns = [field.name for field in fields(kind)]
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, columns)
        table.writeheader()
        table.writerows(asdict(row) for row in rows)
    print(f"\n{text_table(columns, [list(asdict(row).values()) for row in rows])}\n\n{path}")


if __name__ == "__main__":
    main()
