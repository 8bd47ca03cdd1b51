"""How fast training goes under every sampler: the target's part, the drafter's, the whole step.

    python -m dflash.bench
    python -m dflash.bench data=jsonl data.path=answers.jsonl target=hf target.name=Qwen/Qwen3-8B

Rounds are interleaved in one process, figures are medians of them, ratios are to the sorted sampler. Writes `bench.csv`
and `bench.png`.
"""

import csv
from dataclasses import asdict, fields
from pathlib import Path

from omegaconf import DictConfig

from dflash.checks import check_integer
from dflash.command import command


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
    import numpy as np
    import torch
    from tqdm import tqdm

    from dflash.benchmarks.setup import training_steps
    from dflash.benchmarks.steps import BenchRow, measure_samplers
    from dflash.data.schedule import plan_samples
    from dflash.measuring import matrix_peak
    from dflash.memory import keep_freed_memory
    from dflash.report.plots import plot_bench
    from dflash.report.tables import text_table
    from dflash.samplers.choice import named_samplers

    keep_freed_memory()
    for key in ("rounds", "batches_per_round"):
        check_integer(key, config[key], 1)
    config.batch.probe_first = True  # peak memory is that of the first batch
    samplers = named_samplers(config.samplers, config.cost)
    steps = training_steps(config)
    plans = {
        name: plan_samples(sampler, steps.dataset, steps.limits, seed=config.seed, epoch=0, world_size=1, accumulate=1)
        for name, sampler in samplers.items()
    }
    if any(plan.packed for plan in plans.values()):
        steps.target.check_packing()
    device, lengths = steps.target.device, steps.dataset.lengths
    peak = matrix_peak(steps.compute_dtype, device)
    print(
        f"{config.target.name} in {steps.target.model.dtype}, drafter in {steps.compute_dtype}, on {device}, "
        f"{torch.get_num_threads()} threads; matrix peak {peak / 1e9:,.0f} GFLOP/s\n{len(lengths):,} samples of "
        f"{lengths.min():,} to {lengths.max():,} tokens, median {np.median(lengths):,.0f}; batches an epoch: "
        + ", ".join(f"{name} {plan.num_batches}" for name, plan in plans.items()),
        flush=True,
    )
    with tqdm(total=len(plans) * (config.rounds + 1), desc="measuring", unit="turn") as bar:

        def on_turn(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        rows = measure_samplers(
            steps,
            plans,
            rounds=config.rounds,
            batches_per_round=config.batches_per_round,
            matrix_peak=peak,
            on_turn=on_turn,
        )
    columns = [field.name for field in fields(BenchRow)]
    with (out_folder / "bench.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, columns)
        table.writeheader()
        table.writerows(asdict(row) for row in rows)
    plot_bench([asdict(row) for row in rows], out_folder / "bench.png")
    print(f"\n{text_table(columns, [list(asdict(row).values()) for row in rows])}")
    print(f"\n{out_folder / 'bench.csv'}\n{out_folder / 'bench.png'}")


if __name__ == "__main__":
    main()
