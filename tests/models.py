"""Small random targets of several architectures."""

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

ARCHITECTURES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "llama tied": LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**GROUPED),
    "gpt-neox": GPTNeoXConfig(**SIZES),
    "gemma2 with soft-cap": Gemma2Config(**GROUPED, final_logit_softcapping=0.5, query_pre_attn_scalar=8),
    "gemma3": Gemma3TextConfig(**GROUPED, query_pre_attn_scalar=8),
    "granite": GraniteConfig(**GROUPED, embedding_multiplier=12.0, logits_scaling=8.0),
    "cohere2": Cohere2Config(**GROUPED, logit_scale=0.0625),
}


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():  # larger than at initialisation, so that nothing hides in rounding
        if parameter.ndim > 1:
            parameter.mul_(5.0)
    return model
