"""A target of two random layers over single characters: for tests and `experiment=smoke`, without network."""

import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_SPECIAL_TOKENS = ["<|unknown|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable ASCII character, a ChatML template, and a mask token."""
    vocabulary = _SPECIAL_TOKENS + sorted(string.printable)
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=_SPECIAL_TOKENS[0])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(_SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unknown|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        mask_token="<|mask|>",
        chat_template=_CHAT_TEMPLATE,
    )


def tiny_config() -> LlamaConfig:
    """Two Llama layers of width 64 over the tiny tokenizer's vocabulary."""
    return LlamaConfig(
        vocab_size=len(_SPECIAL_TOKENS) + len(string.printable),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=False,
        initializer_range=0.5,  # wide enough that the greedy text is not one repeated character
    )


def build_tiny_model() -> LlamaForCausalLM:
    """Random weights, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(tiny_config())
    with torch.no_grad():
        # A zero logit is never the largest of a hundred: the model writes no mask token and begins no turn.
        model.lm_head.weight[[_SPECIAL_TOKENS.index(t) for t in ("<|unknown|>", "<|im_start|>", "<|mask|>")]] = 0.0
    return model
