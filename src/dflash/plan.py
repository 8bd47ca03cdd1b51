"""What each sampler would cost and how well it would mix, before any training.

    python -m dflash.plan                                         # 902,000 samples of lognormal lengths on 8 ranks
    python -m dflash.plan data=jsonl data.path=answers.jsonl target=hf target.name=Qwen/Qwen3-8B
    python -m dflash.plan data=sized_text batch.token_budget=4096 profile=true world_size=1 accumulate=4
    python -m dflash.plan topology=6+1                            # and what six targets and a drafter would make of it
    python -m dflash.plan experiment=eight_gpus

Writes `plan.csv` and `plan.png`, and names the fastest sampler that mixes as well as wanted, with the command line that
trains with it. With a topology (targets+drafters), `topology.csv` and `topology.png` follow: devices and queues are
simulated over the same plans.
"""

import csv
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from dflash.checks import check_fraction, check_integer, check_not_negative, check_positive
from dflash.command import command
from dflash.config import CONF_DIR, instantiate, named_options

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dflash.cost import CostModel
    from dflash.samplers.base import LengthBatchSampler
    from dflash.samplers.limits import BatchLimits
    from dflash.simulation.topologies import Scenario

# Column of plan.csv -> its shorter name on the screen, and how a figure is shown there.
COLUMNS = {
    "sampler": ("sampler", "{}"),
    "real_over_padded": ("real/padded", "{:.3f}"),
    "fill": ("fill", "{:.3f}"),
    "steps": ("steps", "{:,}"),
    "lost_padding": ("lost: padding", "{:.3f}"),
    "lost_attention": ("attention", "{:.3f}"),
    "lost_stragglers": ("stragglers", "{:.3f}"),
    "lost_anchors": ("anchors", "{:.3f}"),
    "rank_imbalance": ("imbalance", "{:.3f}"),
    "eta2_ratio": ("eta2", "{:.2f}"),
    "reuse": ("reuse", "{:.4f}"),
    "longest_gap_steps": ("gap", "{}"),
    "plan_seconds": ("plan s", "{:.2f}"),
    "relative_throughput": ("throughput", "{:.3f}"),
}


@command("plan")
def main(config: DictConfig) -> None:
    """Compose, plan, report."""
    from hydra.core.hydra_config import HydraConfig

    plan(config, Path(HydraConfig.get().runtime.output_dir), list(HydraConfig.get().overrides.task))


def plan(config: DictConfig, out_folder: Path, overrides: list[str]) -> None:
    """Plan as `config` says and write the result below `out_folder`.

    Args:
        config: composed.
        out_folder: exists.
        overrides: of the command line, those that training shares are part of the advice.

    Raises:
        ValueError: something in the configuration or the data can not be; the message names it.
    """
    from dflash.report.plots import plot_plan
    from dflash.report.tables import text_table
    from dflash.samplers.bucketed import BucketedSampler
    from dflash.simulation.study import measured_of, study
    from dflash.simulation.topologies import Topology, calibrate

    _check_options(config)
    limits, cost = instantiate(config.batch), instantiate(config.cost)
    if config.profile:
        cost = _fitted(config)
        config.cost = {**config.cost, **asdict(cost)}
    samplers = named_options("samplers", config.samplers, config)
    lengths, num_anchorable = _lengths(config)
    print(
        f"{len(lengths):,} samples of {lengths.min():,} to {lengths.max():,} tokens, {lengths.sum():,} in all; "
        f"{config.world_size} ranks x {config.accumulate} batches to an optimizer step",
        flush=True,
    )
    scenario = _simulated_scenario(config, samplers, lengths, num_anchorable, limits) if config.topology else None
    if scenario and (measured := measured_of(config)):
        cost = calibrate(scenario, cost, measured)
        config.cost = {**config.cost, **asdict(cost)}  # samplers go by it, and so would the run that is advised
        samplers = named_options("samplers", config.samplers, config)
        scenario = _simulated_scenario(config, samplers, lengths, num_anchorable, limits)
        print(f"calibrated, in seconds:  {cost}", flush=True)
    rows = []
    for name, sampler in samplers.items():
        rows.append(_row(config, name, sampler, lengths, num_anchorable, limits, cost))
    reference = next((row["tokens_per_cost"] for row in rows if row["sampler"] == "sorted"), None)
    for row in rows:
        row["relative_throughput"] = row["tokens_per_cost"] / reference if reference else None
    with (out_folder / "plan.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(COLUMNS), extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)
    bounds = {
        name: sampler.bounds(limits.planned_lengths(lengths), limits).tolist()
        for name, sampler in samplers.items()
        if isinstance(sampler, BucketedSampler)
    }
    plot_plan(rows, lengths, bounds, out_folder / "plan.png")

    shown = [["-" if row[c] is None else form.format(row[c]) for c, (_, form) in COLUMNS.items()] for row in rows]
    print(f"\n{text_table([title for title, _ in COLUMNS.values()], shown)}")
    mixed = [row for row in rows if row["eta2_ratio"] is not None and row["eta2_ratio"] <= config.wanted_eta2_ratio]
    if mixed:
        best = max(mixed, key=lambda row: row["tokens_per_cost"])
        print(f"\nThe fastest with eta2_ratio <= {config.wanted_eta2_ratio:g}: {best['sampler']}.")
        if not scenario:
            of_ranks = [f"trainer.devices={config.world_size}", f"trainer.accumulate_grad_batches={config.accumulate}"]
            _show_command(train_overrides(best["sampler"], config, overrides) + of_ranks)
    else:
        print(f"\nNone of them mixes as well as eta2_ratio <= {config.wanted_eta2_ratio:g} (wanted_eta2_ratio).")
    print(f"\n{out_folder / 'plan.csv'}\n{out_folder / 'plan.png'}", flush=True)
    if scenario:
        fastest = study(scenario, config, cost, out_folder, {row["sampler"] for row in mixed})
        topology = Topology.parse(fastest.topology)
        planned = train_overrides(fastest.sampler, config, overrides, with_cost=topology.targets > 0)
        _show_command(planned + topology.train_overrides(fastest.routing, scenario.batches_per_step))


def _show_command(overrides: list[str]) -> None:
    print(f"To train so:\n  python -m dflash.train {' '.join(overrides)}", flush=True)


# Groups and keys that mean the same to training; `batch` and `cost` are written out, since plans have other defaults.
_SHARED_WITH_TRAINING = ("data", "target", "regenerate", "drafter", "objective", "optimizer", "cache_dir", "seed")


def train_overrides(sampler: str, config: DictConfig, overrides: list[str], *, with_cost: bool = False) -> list[str]:
    """The overrides of `dflash.train` that train as planned, but for devices.

    Args:
        sampler: its name, `bucketed width=1.5`.
        config: of the plan; its cost model is the one that was planned with.
        overrides: of the plan's command line.
        with_cost: also where the sampler does not go by it: the routing of a pool does.
    """
    option, *of_sampler = sampler.split()
    chosen = [f"sampler={option}", *(f"sampler.{override}" for override in of_sampler)]
    chosen += [o for o in overrides if re.split(r"[.=@]", o.lstrip("+~"))[0] in _SHARED_WITH_TRAINING]
    groups = ["batch"]
    if with_cost or "cost" in OmegaConf.load(Path(CONF_DIR, "sampler", f"{option}.yaml")):
        groups.append("cost")
    for group in groups:
        default = OmegaConf.load(Path(CONF_DIR, group, "default.yaml"))
        for key, value in config[group].items():
            if value != default[key]:
                shown = f"{value:.6g}" if isinstance(value, float) else "null" if value is None else value
                chosen.append(f"{group}.{key}={shown}")
    return chosen


def _check_options(config: DictConfig) -> None:
    scenario = {f"scenario.{key}": config.scenario[key] for key in ("num_samples", "shortest_tokens", "longest_tokens")}
    for key, value in {"world_size": config.world_size, "accumulate": config.accumulate, **scenario}.items():
        check_integer(key, value, 1)
    check_integer("seed", config.seed, 0)
    check_positive("scenario.median_tokens", config.scenario.median_tokens)
    check_not_negative("scenario.log_sigma", config.scenario.log_sigma)
    check_fraction("scenario.anchorable_fraction", config.scenario.anchorable_fraction)
    check_positive("wanted_eta2_ratio", config.wanted_eta2_ratio)
    if config.lengths not in (None, "lognormal"):
        raise ValueError(f"lengths={config.lengths!r} is unknown: lognormal, or null for those of data.")
    if config.topology:
        from dflash.simulation.study import measured_of, topologies_of

        topologies_of(config)
        measured_of(config)
    elif config.calibration:
        raise ValueError("calibration fits what is simulated: add a topology, for example topology=6+1.")
    if config.profile and not config.get("data"):
        raise ValueError(
            "profile=true runs the target and the drafter, so it needs samples: add data=sized_text, or your own with "
            "data=jsonl data.path=..."
        )


def _simulated_scenario(
    config: DictConfig,
    samplers: "dict[str, LengthBatchSampler]",
    lengths: "NDArray[Any]",
    num_anchorable: "NDArray[Any]",
    limits: "BatchLimits",
) -> "Scenario":
    """What is simulated on every topology."""
    from dflash.simulation.pipeline import Machine
    from dflash.simulation.topologies import Scenario

    options = config.simulation
    machine = Machine(
        targets_of_ranks=(1,),
        cost=instantiate(config.cost),
        token_budget=limits.token_budget,
        pad_multiple=limits.pad_multiple,
        queued_batches=options.queued_batches,
        max_groups=options.max_groups,
        device_share=options.device_share,
    )
    return Scenario(
        samplers,
        lengths,
        num_anchorable,
        limits,
        machine,
        batches_per_step=config.world_size * config.accumulate,
        max_batches=options.max_batches,
        seed=config.seed,
    )


def _lengths(config: DictConfig) -> "tuple[NDArray[Any], NDArray[Any]]":
    """Tokens and valid anchors of every sample, each [N] int64: of the scenario, or of `data`'s training samples."""
    import numpy as np

    from dflash.lengths import lognormal_lengths

    if config.lengths == "lognormal" or not config.get("data"):
        scenario = config.scenario
        lengths = lognormal_lengths(
            scenario.num_samples,
            median_tokens=scenario.median_tokens,
            log_sigma=scenario.log_sigma,
            shortest_tokens=scenario.shortest_tokens,
            longest_tokens=scenario.longest_tokens,
            seed=config.seed,
        )
        return lengths, (lengths * scenario.anchorable_fraction).astype(np.int64)

    from dflash.benchmarks.setup import token_samples

    samples = token_samples(config)
    return samples.lengths, samples.num_anchorable


def _fitted(config: DictConfig) -> "CostModel":
    """The cost model of this machine, from a short run."""
    from dflash.benchmarks.fit import show_fitted_cost
    from dflash.benchmarks.setup import training_steps
    from dflash.memory import keep_freed_memory

    keep_freed_memory()
    return show_fitted_cost(training_steps(config))


def _row(
    config: DictConfig,
    name: str,
    sampler: "LengthBatchSampler",
    lengths: "NDArray[Any]",
    num_anchorable: "NDArray[Any]",
    limits: "BatchLimits",
    cost: "CostModel",
) -> dict[str, Any]:
    """A line of `plan.csv`, and the `tokens_per_cost` that throughputs are compared by."""
    from dflash.samplers.figures import plan_figures

    begin = time.perf_counter()
    plan_now, plan_next = (
        sampler.plan(
            lengths,
            num_anchorable,
            limits,
            seed=config.seed,
            epoch=epoch,
            world_size=config.world_size,
            accumulate=config.accumulate,
        )
        for epoch in (0, 1)
    )
    seconds = (time.perf_counter() - begin) / 2
    figures = plan_figures(sampler, plan_now, plan_next, lengths, num_anchorable, limits, cost)
    return {"sampler": name, "plan_seconds": seconds, **asdict(figures)}


if __name__ == "__main__":
    main()
