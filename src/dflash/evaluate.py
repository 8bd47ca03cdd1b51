"""Decode with a trained drafter, and without it: acceptance length, speed-up, and whether the text is the same.

    python -m dflash.evaluate run=outputs/train/2026-01-31/12-00-00-000000
    python -m dflash.evaluate run=exported/drafter target=hf target.name=Qwen/Qwen3-8B prompts=chats.jsonl

Without `prompts` the run's own held-out samples are decoded. Both ways run the same prompts in the same process, in
turns. Writes `evaluate.json` and `evaluate.png`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig

from dflash.config import CONF_DIR, check_evaluation_options, config_of_run, instantiate

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from dflash.decoding.comparison import Prompt
    from dflash.drafter.network import DFlashDrafter


@hydra.main(version_base=None, config_path=CONF_DIR, config_name="evaluate")
def main(config: DictConfig) -> None:
    """Compose, decode, report."""
    from hydra.core.hydra_config import HydraConfig

    evaluate(config, Path(HydraConfig.get().runtime.output_dir))


def evaluate(config: DictConfig, out_folder: Path) -> None:
    """Decode the prompts that `config` names both ways, and write the result below `out_folder`.

    Raises:
        ValueError: something in the configuration can not be; the message names it.
    """
    import torch
    from tqdm import tqdm

    from dflash.decoding.block_drafter import BlockDrafter
    from dflash.decoding.comparison import compare_decoding
    from dflash.decoding.transcript import DecodingOptions
    from dflash.drafter.checkpoint import check_target, load_drafter
    from dflash.memory import keep_freed_memory
    from dflash.precision import resolve_dtype
    from dflash.report.evaluation import evaluation_text
    from dflash.report.plots import plot_evaluation
    from dflash.target.ends import target_ends
    from dflash.target.frozen import FrozenTarget
    from dflash.target.loading import end_of_turn_ids, load_causal_lm, load_config, load_tokenizer

    keep_freed_memory()
    run_config = config_of_run(config.run) if config.run else None
    check_evaluation_options(config, run_config)
    options = DecodingOptions((), config.max_new_tokens, config.temperature, config.seed)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    # The drafter, and the target it was trained for.
    drafter = load_drafter(config.run, "run")
    target_config = config.get("target") or (run_config.target if run_config else None)
    assert target_config is not None, "check_evaluation_options asks for a target where there is no run"
    target_options = instantiate(target_config)
    cache_dir = config.cache_dir or (run_config.cache_dir if run_config else "outputs/cache")
    check_target(drafter, load_config(target_options, cache_dir), f"run={config.run}", target_options.name)
    tokenizer = load_tokenizer(target_options, cache_dir)
    prompts = find_prompts(config, run_config, drafter, tokenizer, device, cache_dir)
    dtype = resolve_dtype(config.dtype or target_options.dtype, device)
    model = load_causal_lm(target_options, cache_dir, dtype, device)

    # The same prompts both ways.
    options = replace(options, stop_ids=tuple(end_of_turn_ids(model, tokenizer)))
    block_drafter = BlockDrafter(drafter.to(device, dtype).eval(), target_ends(model), config.block_size)
    print(
        f"{len(prompts)} prompts, at most {options.max_new_tokens} new tokens each, blocks of "
        f"{block_drafter.block_size}, {dtype} on {device}, {torch.get_num_threads()} threads",
        flush=True,
    )
    target = FrozenTarget(model, drafter.target_layer_ids, device)
    with tqdm(total=len(prompts), desc="decoding", unit="prompt", smoothing=0.1) as bar:
        comparison = compare_decoding(
            target,
            block_drafter,
            prompts,
            options,
            block_size=block_drafter.block_size,
            on_prompt=lambda outcome: bar.update(),
        )

    figures = {
        "run": str(config.run),
        "target": target_options.name,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "num_threads": torch.get_num_threads(),
        "block_size": block_drafter.block_size,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
        **comparison.figures(),
    }
    (out_folder / "evaluate.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    plot_evaluation(figures, out_folder / "evaluate.png")
    print(f"\n{evaluation_text(figures)}\n\n{out_folder / 'evaluate.json'}\n{out_folder / 'evaluate.png'}")


def find_prompts(
    config: DictConfig,
    run_config: DictConfig | None,
    drafter: "DFlashDrafter",
    tokenizer: "PreTrainedTokenizerBase",
    device: "torch.device",
    cache_dir: str,
) -> "list[Prompt]":
    """The prompts of the file `prompts`, or of the run's held-out samples, at most `num_prompts` of them.

    Raises:
        ValueError: there is none.
    """
    from dflash.data.prompts import prompts_of_file, prompts_of_samples
    from dflash.data.stdlib_chat import with_answers
    from dflash.data.tokens import build_token_datasets
    from dflash.decoding.comparison import Prompt
    from dflash.precision import resolve_dtype
    from dflash.target.loading import load_causal_lm

    if config.prompts:
        template_kwargs = dict(run_config.data.template_kwargs) if run_config else {}
        found = list(prompts_of_file(config.prompts, tokenizer, {**template_kwargs, **config.template_kwargs}))
    else:
        assert run_config is not None, "check_evaluation_options asks for prompts where there is no run"
        # As training found them: its answers are in the cache, under the dtype that it ran in.
        target_options = instantiate(run_config.target)
        dtype = resolve_dtype(target_options.dtype, device)
        data = with_answers(
            instantiate(run_config.data),
            lambda: load_causal_lm(target_options, cache_dir, dtype, device),
            tokenizer,
            target_options.fingerprint(dtype),
            instantiate(run_config.regenerate),
            cache_dir,
        )
        vocab_size: int = drafter.config.vocab_size
        _, samples = build_token_datasets(
            data, tokenizer, vocab_size=vocab_size, mask_token_id=drafter.mask_token_id, cache_dir=cache_dir
        )
        found = prompts_of_samples(samples)
    prompts = [Prompt(source, token_ids) for source, token_ids in found]
    if not prompts:
        raise ValueError(
            f"prompts={config.prompts}: found nothing to decode from. Expected conversations with at least one turn "
            "before the assistant's, or a run whose held-out samples have one."
        )
    if config.num_prompts is not None and len(prompts) > config.num_prompts:
        print(f"The first {config.num_prompts} of {len(prompts)} prompts (num_prompts=null decodes all).", flush=True)
    return prompts[: config.num_prompts]


if __name__ == "__main__":
    main()
