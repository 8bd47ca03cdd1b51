"""Tokenise conversations into the token dataset that training reads, and show one sample with its mask.

    python -m dflash.prepare data=jsonl data.path=chats.jsonl target=smollm2

Training does the same by itself and finds the result in the cache; this command is there to look at the data first.
"""

from omegaconf import DictConfig

from dflash.command import command
from dflash.config import instantiate


@command("prepare")
def main(config: DictConfig) -> None:
    """Compose, build, report."""
    import torch
    from transformers import PreTrainedModel

    from dflash.data.stdlib_chat import with_answers
    from dflash.data.tokens import build_token_datasets, show_sample
    from dflash.precision import resolve_dtype
    from dflash.target.frozen import resolve_mask_token_id
    from dflash.target.loading import load_causal_lm, load_config, load_tokenizer

    data, target, answers = instantiate(config.data), instantiate(config.target), instantiate(config.regenerate)
    tokenizer = load_tokenizer(target, config.cache_dir)
    vocab_size = load_config(target, config.cache_dir).get_text_config().vocab_size
    mask_token_id = resolve_mask_token_id(target.mask_token_id, tokenizer, vocab_size)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = resolve_dtype(target.dtype, device)

    def target_model() -> PreTrainedModel:
        return load_causal_lm(target, config.cache_dir, dtype, device)

    data = with_answers(data, target_model, tokenizer, target.fingerprint(dtype), answers, config.cache_dir)
    train, _ = build_token_datasets(
        data, tokenizer, vocab_size=vocab_size, mask_token_id=mask_token_id, cache_dir=config.cache_dir
    )
    print(f"\n{show_sample(train, tokenizer)}\n\n{train.folder.parent}")


if __name__ == "__main__":
    main()
