"""A training step as the configuration says, ready to be measured: target, drafter, samples."""

import torch
from omegaconf import DictConfig

from dflash.benchmarks.steps import TrainingSteps
from dflash.checks import check_integer
from dflash.config import instantiate
from dflash.data.stdlib_chat import with_answers
from dflash.data.tokens import TokenDataset, build_token_datasets
from dflash.drafter.network import build_drafter
from dflash.precision import resolve_dtype
from dflash.target.ends import target_ends
from dflash.target.frozen import FrozenTarget, resolve_mask_token_id
from dflash.target.loading import load_causal_lm, load_config, load_tokenizer
from dflash.training.lightning_module import DFlashModule


def training_steps(config: DictConfig) -> TrainingSteps:
    """Load what the groups data, batch, target, drafter, objective and optimizer name.

    Args:
        config: these groups, regenerate, and seed, precision, num_threads, cache_dir.

    Raises:
        ValueError: something in the configuration or the data can not be; the message names it.
    """
    check_integer("seed", config.seed, 0)
    target_options, limits = instantiate(config.target), instantiate(config.batch)
    drafter_options, objective = instantiate(config.drafter), instantiate(config.objective)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compute_dtype = resolve_dtype(config.precision, device, key="precision")
    target_dtype = resolve_dtype(target_options.dtype, device)
    if config.num_threads is not None:
        check_integer("num_threads", config.num_threads, 1, ", or null")
        torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.seed)

    tokenizer = load_tokenizer(target_options, config.cache_dir)
    target_config = load_config(target_options, config.cache_dir)
    vocab_size = target_config.get_text_config().vocab_size
    mask_token_id = resolve_mask_token_id(target_options.mask_token_id, tokenizer, vocab_size)
    drafter = build_drafter(drafter_options, target_config, mask_token_id, device).to(device)
    samples = token_samples(config)  # before the target is loaded: writing missing answers loads one, and lets it go
    model = load_causal_lm(target_options, config.cache_dir, target_dtype, device)
    ends = target_ends(model)
    drafter.scale_initial_logits(ends.head)
    module = DFlashModule(
        drafter, ends, objective, instantiate(config.optimizer.optimizer), warmup_fraction=0.0, max_steps=1
    )
    target = FrozenTarget(model, drafter.target_layer_ids, device, target_options.prefill_chunk)
    return TrainingSteps(target, module, samples, limits, compute_dtype, config.seed)


def token_samples(config: DictConfig) -> TokenDataset:
    """The training samples of the group data, tokenised as the group target does.

    Args:
        config: groups data, target, regenerate, and cache_dir.

    Raises:
        ValueError: something in the configuration or the data can not be; the message names it.
    """
    target_options = instantiate(config.target)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = resolve_dtype(target_options.dtype, device)
    tokenizer = load_tokenizer(target_options, config.cache_dir)
    vocab_size = load_config(target_options, config.cache_dir).get_text_config().vocab_size
    data = with_answers(
        instantiate(config.data),
        lambda: load_causal_lm(target_options, config.cache_dir, dtype, device),
        tokenizer,
        target_options.fingerprint(dtype),
        instantiate(config.regenerate),
        config.cache_dir,
    )
    samples, _ = build_token_datasets(
        data,
        tokenizer,
        vocab_size=vocab_size,
        mask_token_id=resolve_mask_token_id(target_options.mask_token_id, tokenizer, vocab_size),
        cache_dir=config.cache_dir,
    )
    return samples
