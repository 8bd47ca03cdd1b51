"""The real LLM, loaded once."""

from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash.config import CONF_DIR
from dflash.target.loading import load_causal_lm, load_tokenizer


@pytest.fixture(scope="session")
def smollm2(cache_dir: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    target = instantiate(OmegaConf.load(Path(CONF_DIR) / "target" / "smollm2.yaml"))
    return load_causal_lm(target, cache_dir, torch.float32), load_tokenizer(target, cache_dir)
