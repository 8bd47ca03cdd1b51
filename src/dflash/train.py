"""Train a DFlash drafter.

    python -m dflash.train                                        # SmolLM2-135M on embedded prompts, bucketed batches
    python -m dflash.train data=jsonl data.path=answers.jsonl target=hf target.name=Qwen/Qwen3-8B
    python -m dflash.train resume_from=outputs/train/2026-01-31/12-00-00-000000
    python -m dflash.train experiment=smoke                       # the whole line in under a minute

`run` reads from top to bottom: conversations become a token dataset, a sampler plans its batches, the placement adds
the frozen target's hidden states, the module trains the drafter, callbacks measure.
"""

import logging
import signal
import sys
import warnings
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from dflash.command import command
from dflash.config import check_run_options, check_sweep, config_of_resumed_run, instantiate, save_run_config

if TYPE_CHECKING:  # lightning and torch take seconds to import: --help and a mistyped override need not wait for them
    from lightning.pytorch import Callback, Trainer
    from transformers import PreTrainedModel

    from dflash.data.schedule import TrainingSchedule


@command("train")
def main(config: DictConfig) -> None:
    """Compose the configuration, train, exit."""
    from hydra.core.hydra_config import HydraConfig

    # Until the first step there is nothing to save: end at once, with the exit code that shells expect.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit_by_signal)
    run_folder = Path(HydraConfig.get().runtime.output_dir)
    if config.resume_from:
        config = config_of_resumed_run(config, list(HydraConfig.get().overrides.task))
    if exit_code := run(config, run_folder):
        sys.exit(exit_code)


def _exit_by_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def run(config: DictConfig, run_folder: Path) -> int:
    """Train as `config` says, everything written below `run_folder`.

    Returns:
        The process's exit code: 0, or 128 + signal where a signal ended the run, its state saved.

    Raises:
        ValueError: something in the configuration or the data can not be; the message names it.
    """
    import torch
    from lightning.pytorch import seed_everything

    from dflash.callbacks.pipeline import PipelineMetrics
    from dflash.callbacks.run_totals import RunTotals
    from dflash.callbacks.stop_and_save import RunInterruptedError
    from dflash.data.datamodule import DFlashDataModule, ValidationBatches
    from dflash.data.prompts import prompts_of_samples, take_prompts
    from dflash.data.schedule import TrainingSchedule
    from dflash.data.stdlib_chat import with_answers
    from dflash.data.tokens import build_token_datasets, show_sample
    from dflash.decoding.comparison import Prompt
    from dflash.decoding.speculative import max_prompt_tokens
    from dflash.drafter.checkpoint import check_disk_space, find_checkpoint, init_drafter_from
    from dflash.drafter.network import build_drafter
    from dflash.memory import keep_freed_memory
    from dflash.placement.pool import PoolPlacement
    from dflash.placement.ranks import drafter_device, end_started_ranks, local_rank_here
    from dflash.precision import resolve_dtype
    from dflash.report.run_summary import RunSummary
    from dflash.target.frozen import FrozenTarget, resolve_mask_token_id
    from dflash.target.loading import load_causal_lm, load_config, load_tokenizer
    from dflash.training.lightning_module import DFlashModule

    keep_freed_memory()
    # What needs no weights comes first: a mistake in it shows within seconds.
    check_run_options(config)
    check_sweep(config)
    target, data = instantiate(config.target), instantiate(config.data)
    sampler, limits = instantiate(config.sampler), instantiate(config.batch)
    drafter_options, objective = instantiate(config.drafter), instantiate(config.objective)
    make_optimizer, spikes = instantiate(config.optimizer.optimizer), instantiate(config.spikes)
    placement = instantiate(config.placement)
    callbacks = {name: instantiate(callback) for name, callback in config.callbacks.items() if callback}
    callbacks["totals"] = totals = RunTotals()
    resume_checkpoint = find_checkpoint(config.resume_from, "resume_from") if config.resume_from else None
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    seed_everything(config.seed, verbose=False)
    local_rank = local_rank_here()
    device = drafter_device(config.trainer.accelerator, local_rank)
    target_device = placement.lay_out(device, local_rank, config.trainer.devices)

    # The drafter is made in the target's image.
    tokenizer, target_config = load_tokenizer(target, config.cache_dir), load_config(target, config.cache_dir)
    vocab_size = target_config.get_text_config().vocab_size
    mask_token_id = resolve_mask_token_id(target.mask_token_id, tokenizer, vocab_size)
    drafter = build_drafter(drafter_options, target_config, mask_token_id, device)
    if config.init_from:
        init_drafter_from(drafter, config.init_from)
    make_optimizer(drafter.parameters())  # for its errors alone: Lightning asks for the optimizer last of all
    check_disk_space(run_folder, sum(p.numel() for p in drafter.parameters()))

    dtype = resolve_dtype(target.dtype, target_device)

    @cache
    def target_model() -> "PreTrainedModel":
        return load_causal_lm(target, config.cache_dir, dtype, target_device)

    # Conversations become tokens, and the sampler plans the whole run.
    answer_options = instantiate(config.regenerate)
    data = with_answers(data, target_model, tokenizer, target.fingerprint(dtype), answer_options, config.cache_dir)
    train_samples, val_samples = build_token_datasets(
        data, tokenizer, vocab_size=vocab_size, mask_token_id=mask_token_id, cache_dir=config.cache_dir
    )
    print(f"\n{show_sample(train_samples, tokenizer)}\n", flush=True)
    schedule = TrainingSchedule(
        train_samples,
        sampler,
        limits,
        seed=config.seed,
        world_size=config.trainer.devices * config.trainer.num_nodes,
        accumulate=config.trainer.accumulate_grad_batches,
    )
    val_batches = ValidationBatches(val_samples, schedule)
    saved_step = schedule_position(resume_checkpoint, schedule) if resume_checkpoint else None
    max_steps = config.max_steps or schedule.num_steps(config.epochs)
    plan = schedule.plan(0)
    placement.check_plan(plan.packed)
    print(
        f"epoch 0: {plan.num_batches:,} batches, {plan.num_steps:,} optimizer steps; samples: {plan.ledger}", flush=True
    )

    # Batches pass through the target on their way to the drafter.
    frozen_target = FrozenTarget(target_model(), drafter.target_layer_ids, target_device, target.prefill_chunk)
    if plan.packed:
        frozen_target.check_packing()
    else:
        longest = max(limits.longest_row(samples.lengths) for samples in (train_samples, val_samples))
        frozen_target.check_padding(longest, limits.pad_multiple, is_alone=limits.max_samples == 1)
    placement.open(frozen_target)
    if not config.init_from:
        drafter.scale_initial_logits(placement.ends.head)
    datamodule = DFlashDataModule(
        schedule,
        val_batches,
        max_steps=max_steps,
        num_workers=config.num_workers,
        feed=placement.feed,
        pin_memory=device.type == "cuda",
    )
    module = DFlashModule(
        drafter,
        placement.ends,
        objective,
        make_optimizer,
        warmup_fraction=config.optimizer.warmup_fraction,
        max_steps=max_steps,
        spikes=spikes,
        walk_blocks_per_doc=limits.anchors_per_sample,
    )
    if isinstance(placement, PoolPlacement):
        callbacks["pipeline"] = PipelineMetrics(placement.state, len(placement.replicas), placement.capacity_tokens)
    if "decoding" in callbacks:
        decoding = callbacks["decoding"]
        longest = max_prompt_tokens(target_config, decoding.options.max_new_tokens)
        prompts, _ = take_prompts(prompts_of_samples(val_samples), decoding.num_prompts, longest)
        decoding.use(placement.lend_target, [Prompt(*prompt) for prompt in prompts], tokenizer)
    trainer = build_trainer(config, run_folder, max_steps, device, list(callbacks.values()), saved_step)

    summary = RunSummary(run_folder)
    if trainer.is_global_zero:
        save_run_config(config, run_folder)
    print(f"{run_folder}: {max_steps} optimizer steps, {len(train_samples):,} samples, drafter on {device}", flush=True)
    interrupted: RunInterruptedError | None = None
    try:
        if config.validate_untrained and resume_checkpoint is None:
            trainer.validate(module, datamodule, verbose=False)
            if trainer.is_global_zero:
                summary.note_untrained(module.latest_metrics)
        try:
            trainer.fit(module, datamodule, ckpt_path=resume_checkpoint, weights_only=True)
        except RunInterruptedError as error:
            interrupted = error
        counts = totals.over_all_ranks(trainer)
        throughput = callbacks["throughput"].since_warmup(trainer) if "throughput" in callbacks else None
        eta2_ratio = callbacks["mixing"].over_run(trainer) if "mixing" in callbacks else None
    except BaseException:
        end_started_ranks(trainer)
        raise
    finally:
        placement.close()
    if not trainer.is_global_zero:
        return 0  # a rank that ended with another code would make Lightning kill the first one at its summary
    print(
        summary.finish(
            metrics=module.latest_metrics,
            totals=counts,
            steps=trainer.global_step,
            epochs=schedule.fractional_epoch(trainer.global_step),
            num_empty_steps=module.num_empty_steps,
            throughput=throughput,
            spikes=callbacks["spikes"].counts if "spikes" in callbacks else None,
            eta2_ratio=eta2_ratio,
            loss_variance_explained_by_length=callbacks["spikes"].lengths.share if "spikes" in callbacks else None,
            interrupted_by=str(interrupted) if interrupted else None,
        )
    )
    return interrupted.exit_code if interrupted else 0


def schedule_position(checkpoint: Path, schedule: "TrainingSchedule") -> int:
    """The optimizer step at which a checkpoint stands.

    Raises:
        ValueError: it was made under another plan than `schedule`'s.
    """
    import torch

    # mmap: of a file that may hold gigabytes, two small entries are read.
    content: dict[str, Any] = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    schedule.check_state(content["DFlashDataModule"])
    return int(content["global_step"])


def build_trainer(
    config: DictConfig,
    run_folder: Path,
    max_steps: int,
    device: Any,
    callbacks: "list[Callback]",
    saved_step: int | None,
) -> "Trainer":
    """The Lightning trainer of a run, with the callbacks that every run has beside `callbacks`.

    A run that resumes gives `saved_step`, the optimizer step of its checkpoint.
    """
    from hydra.utils import get_class
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import TensorBoardLogger

    from dflash.callbacks.best_checkpoint import BestCheckpoint
    from dflash.callbacks.status import StatusBar, StatusLine
    from dflash.callbacks.stop_and_save import StopAndSave
    from dflash.precision import has_fast_bf16

    options = config.trainer
    precision = options.precision
    if precision == "auto":
        precision = "bf16-mixed" if has_fast_bf16(device) else "32-true"
    logger: Any = False
    if config.logger:
        logger_options: dict[str, Any] = {"save_dir": run_folder}
        if saved_step is not None and get_class(config.logger._target_) is TensorBoardLogger:
            # Events written after the checkpoint was made are hidden, or the resumed steps would show twice.
            logger_options["purge_step"] = saved_step + 1
        logger = instantiate(config.logger, **logger_options)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # it tells of every checkpoint, twice
    # The loader continues by itself where the checkpoint stood, see DFlashDataModule.
    warnings.filterwarnings("ignore", ".*resuming from a checkpoint that ended before the epoch ended.*")
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    return Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",  # where the target and its ends are already
        devices=options.devices,
        num_nodes=options.num_nodes,
        precision=precision,
        max_steps=max_steps,
        accumulate_grad_batches=options.accumulate_grad_batches,
        gradient_clip_val=options.gradient_clip_val,
        log_every_n_steps=options.log_every_n_steps,
        val_check_interval=options.validate_every_n_steps * options.accumulate_grad_batches,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # plans are dealt to ranks already
        enable_progress_bar=sys.stdout.isatty(),
        inference_mode=False,  # tensors made in it could not be used in training
        enable_model_summary=False,
        logger=logger,
        callbacks=[
            *callbacks,
            StatusBar() if sys.stdout.isatty() else StatusLine(),
            BestCheckpoint(run_folder),
            StopAndSave(run_folder, options.save_every_n_steps, config.stop_after_steps),
        ],
        default_root_dir=run_folder,
    )


if __name__ == "__main__":
    main()
