"""Have the target write the answers that a drafter learns from, as chat JSONL.

    python -m dflash.regenerate data.max_samples=700
    python -m dflash.regenerate data=jsonl data.path=chats.jsonl target=hf target.name=Qwen/Qwen3-8B out=answers.jsonl
    python -m dflash.train data=jsonl data.path=answers.jsonl target=hf target.name=Qwen/Qwen3-8B

Training on `data=stdlib_chat` does this by itself. Every finished batch is kept, so a killed run goes on where it
stopped.
"""

from omegaconf import DictConfig

from dflash.command import command
from dflash.config import instantiate


@command("regenerate")
def main(config: DictConfig) -> None:
    """Compose, generate, report."""
    import torch
    from transformers import PreTrainedModel

    from dflash.data.answers import answers_folder, read_conversations, write_answers
    from dflash.memory import keep_freed_memory
    from dflash.precision import resolve_dtype
    from dflash.target.loading import load_causal_lm, load_tokenizer

    keep_freed_memory()
    data, target, options = instantiate(config.data), instantiate(config.target), instantiate(config.regenerate)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    conversations, dropped = read_conversations(data)
    print(
        f"{len(conversations)} conversations", *(f"dropped, {reason}: {n}" for reason, n in dropped.items()), sep="\n"
    )
    if data.has_val_source:
        print(
            "Only the training source is answered: run again with data.path or data.split set to the validation source."
        )

    dtype = resolve_dtype(target.dtype, device)

    def load_model() -> PreTrainedModel:
        return load_causal_lm(target, config.cache_dir, dtype, device)

    report = write_answers(
        conversations,
        load_model,
        load_tokenizer(target, config.cache_dir),
        options,
        answers_folder(config.cache_dir, target.fingerprint(dtype), options, data.template_kwargs),
        config.out,
        template_kwargs=data.template_kwargs,
    )
    print(report)


if __name__ == "__main__":
    main()
