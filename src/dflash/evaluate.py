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

from omegaconf import DictConfig

from dflash.command import command
from dflash.config import check_evaluation_options, config_of_run, instantiate

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from dflash.data.tokens import TokenDataset
    from dflash.drafter.network import DFlashDrafter


@command("evaluate")
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

    from dflash.data.prompts import left_out_text, prompts_of_file, prompts_of_samples, take_prompts
    from dflash.decoding.block_drafter import BlockDrafter, check_block_size
    from dflash.decoding.comparison import Prompt, compare_decoding
    from dflash.decoding.speculative import max_prompt_tokens
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
    block_size = check_block_size(config.block_size, drafter)
    target_node = config.get("target") or (run_config.target if run_config else None)
    assert target_node is not None, "check_evaluation_options asks for a target where there is no run"
    target_options = instantiate(target_node)
    dtype = resolve_dtype(config.dtype or target_options.dtype, device, key="dtype")
    cache_dir = config.cache_dir or (run_config.cache_dir if run_config else "outputs/cache")
    target_config = load_config(target_options, cache_dir)
    check_target(drafter, target_config, f"run={config.run}", target_options.name)
    tokenizer = load_tokenizer(target_options, cache_dir)

    # Prompts that it has not seen.
    if config.prompts:
        template_kwargs = {**(run_config.data.template_kwargs if run_config else {}), **config.template_kwargs}
        found = prompts_of_file(config.prompts, tokenizer, template_kwargs)
    else:
        assert run_config is not None, "check_evaluation_options asks for prompts where there is no run"
        found = prompts_of_samples(held_out_samples(run_config, drafter, tokenizer, device, cache_dir))
    longest = max_prompt_tokens(target_config, options.max_new_tokens)
    taken, left_out = take_prompts(found, config.num_prompts, longest)
    if left_out:
        print(left_out_text(left_out), flush=True)
    if not taken:
        raise ValueError(f"prompts={config.prompts}: none of {config.prompts or config.run} can be decoded.")
    model = load_causal_lm(target_options, cache_dir, dtype, device)

    # The same prompts both ways.
    options = replace(options, stop_ids=tuple(end_of_turn_ids(model, tokenizer)))
    block_drafter = BlockDrafter(drafter.to(device, dtype).eval(), target_ends(model), block_size)
    print(
        f"{len(taken)} prompts, at most {options.max_new_tokens} new tokens each, blocks of {block_size}, "
        f"{dtype} on {device}, {torch.get_num_threads()} threads",
        flush=True,
    )
    target = FrozenTarget(model, drafter.target_layer_ids, device)
    with tqdm(total=len(taken), desc="decoding", unit="prompt", smoothing=0.1) as bar:
        comparison = compare_decoding(
            target,
            block_drafter,
            [Prompt(*prompt) for prompt in taken],
            options,
            block_size=block_size,
            on_prompt=lambda outcome: bar.update(),
        )

    figures = {
        "run": str(config.run),
        "target": target_options.name,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "num_threads": torch.get_num_threads(),
        "block_size": block_size,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
        **comparison.figures(),
    }
    (out_folder / "evaluate.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    plot_evaluation(figures, out_folder / "evaluate.png")
    print(f"\n{evaluation_text(figures)}\n\n{out_folder / 'evaluate.json'}\n{out_folder / 'evaluate.png'}")


def held_out_samples(
    run_config: DictConfig,
    drafter: "DFlashDrafter",
    tokenizer: "PreTrainedTokenizerBase",
    device: "torch.device",
    cache_dir: str,
) -> "TokenDataset":
    """The validation samples of a run, as its training found them: from the cache, else made anew."""
    from dflash.data.stdlib_chat import with_answers
    from dflash.data.tokens import build_token_datasets
    from dflash.precision import resolve_dtype
    from dflash.target.loading import load_causal_lm

    target_options = instantiate(run_config.target)
    dtype = resolve_dtype(target_options.dtype, device)  # which names the answers in the cache
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
    return samples


if __name__ == "__main__":
    main()
