"""Write a trained drafter in the published layout, which vLLM and SGLang load.

    python -m dflash.export run=outputs/train/2026-01-31/12-00-00-000000 out=exported/drafter check=true

`check=true` reads the folder back, runs both drafters behind the real target and compares their logits.
"""

from pathlib import Path

from omegaconf import DictConfig

from dflash.checks import check_new_folder
from dflash.command import command
from dflash.config import config_of_run, instantiate


@command("export")
def main(config: DictConfig) -> None:
    """Compose, write, report."""
    export(config)


def export(config: DictConfig) -> None:
    """Write the drafter of `config.run` to `config.out`.

    Raises:
        ValueError: something in the configuration can not be, or what was written is not what was trained.
    """
    for key, example in (("run", "outputs/train/..."), ("out", "exported/drafter")):
        if not config[key]:
            raise ValueError(f"{key}=null: give {key}={example}.")
    if config.dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"dtype={config.dtype!r} is unknown. Allowed: bfloat16, float16, float32.")
    run_config = config_of_run(config.run)
    target_config = config.get("target") or (run_config and run_config.target)
    if config.check and target_config is None:
        raise ValueError(
            f"check=true needs the target, and run={config.run} is no run of dflash.train that could name it: give "
            "target=hf target.name=Qwen/Qwen3-8B."
        )
    out = Path(config.out)
    check_new_folder("out", out)

    import shutil

    import torch

    from dflash.decoding.check_export import compare_logits
    from dflash.drafter.checkpoint import check_target, load_drafter
    from dflash.drafter.published import read_published, write_published
    from dflash.target.loading import load_causal_lm, load_config, servable_name

    drafter = load_drafter(config.run, "run")
    target_name, target_revision = "TARGET", None
    if target_config is not None:
        target = instantiate(target_config)
        cache_dir = config.cache_dir or (run_config.cache_dir if run_config else "outputs/cache")
        check_target(drafter, load_config(target, cache_dir), f"run={config.run}", target.name)
        target_name, target_revision = servable_name(target, cache_dir), target.revision
    # Loaded before anything is written: a target that can not be had must leave no export that looks checked.
    model = load_causal_lm(target, cache_dir, torch.float32) if config.check else None

    dtype = getattr(torch, config.dtype)
    write_published(drafter, out, dtype)
    num_parameters = sum(p.numel() for p in drafter.parameters())
    print(f"{out}: {num_parameters:,} parameters in {config.dtype}, {len(drafter.state_dict())} tensors")
    if model is not None:
        try:
            agreement = compare_logits(drafter, dtype, read_published(out, "out"), model)
        except ValueError:
            shutil.rmtree(out)
            raise
        print(
            f"check: read back, the logits of {agreement.num_slots} slots behind {target.name} are the same to the "
            f"bit; rounding to {config.dtype} moved {agreement.num_changed} of their most likely tokens"
        )
    print(serving_commands(out, target_name, target_revision, drafter.block_size))


def serving_commands(out: Path, target_name: str, target_revision: str | None, block_size: int) -> str:
    """How to serve the target with the drafter; both servers read the layout as it is."""
    folder = out.resolve()
    revision = f" --revision {target_revision}" if target_revision else ""
    return f"""
vLLM:
  vllm serve {target_name}{revision} --speculative-config \\
    '{{"method": "dflash", "model": "{folder}", "num_speculative_tokens": {block_size - 1}}}'

SGLang:
  python -m sglang.launch_server --model-path {target_name}{revision} --speculative-algorithm DFLASH \\
    --speculative-draft-model-path {folder}"""


if __name__ == "__main__":
    main()
