"""Which text is supervised, under templates that behave as those of real model families do.

Expectations are written by hand: the rendered text with the supervised parts between « and ».
"""

from pathlib import Path

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from dflash.config import CONF_DIR
from dflash.data.conversations import BadRow, Conversation, parse_row
from dflash.data.masks import ConversationTokenizer, MarkedText
from dflash.target.loading import load_tokenizer

# SmolLM2: a default system prompt, every message alike.
CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind<|im_end|>\n{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen3: the thinking of answers before the last user message is dropped, and of a last answer without any, shown empty.
QWEN3 = (
    "{%- set ns = namespace(last_user=-1) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}"
    "{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    "{%- set thinking = '' %}{%- set content = message.content %}"
    "{%- if '</think>' in content %}"
    "{%- set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last_user and (loop.last or thinking) %}"
    "{{- '<think>\n' + thinking + '\n</think>\n\n' }}{%- endif %}"
    "{{- content }}"
    "{%- for call in message.tool_calls or [] %}{%- set call = call.function or call %}"
    "{{- '\n<tool_call>' + call.name + ' ' + (call.arguments | tojson) + '</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{{- '<|im_start|>user\n<response>' + message.content + '</response><|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
# Llama 3: headers, content trimmed, nothing after the end-of-turn token.
LLAMA3 = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|header|>' + message['role'] + '<|/header|>\n\n' + message['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}"
)
# Gemma: no system role, the assistant is called model.
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<turn>' + role + '\n' + message['content'] | trim + '</turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
# SmolLM3 and TRL's training templates: the template itself marks what the model generates.
MARKERS = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message.content + '<|im_end|>' + '\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
MARKERS_WITHOUT_END = MARKERS.replace(
    "{{ message.content + '<|im_end|>' + '\n' }}{% endgeneration %}",
    "{{ message.content }}{% endgeneration %}{{ '<|im_end|>\n' }}",
)
# The same, and it drops earlier thinking.
MARKERS_DROP_THINKING = MARKERS.replace(
    "{{ message.content +", "{{ (message.content if loop.last else message.content.split('</think>')[-1]) +"
)
# DeepSeek-R1: the prompt ends in <think>, which the whole conversation does not show.
HIDDEN_THINKING = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")
# Alpaca: no special tokens at all.
PLAIN = (
    "{% for message in messages %}{{ '### ' + message.role + ':\n' + message.content + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|bos|>", "<|header|>", "<|/header|>", "<|eot|>", "<turn>", "</turn>"]

THREE_TURNS = [
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "<think>\nT1\n</think>\n\nA1"},
    {"role": "user", "content": "Q2"},
    {"role": "assistant", "content": "<think>\nT2\n</think>\n\nA2"},
    {"role": "user", "content": "Q3"},
    {"role": "assistant", "content": "<think>\nT3\n</think>\n\nA3"},
]


def make_tokenizer(template: str | None, **special_tokens: str) -> PreTrainedTokenizerFast:
    """A small byte-level BPE, trained to join newlines into one token, as real ones do."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=SPECIAL,
    )
    backend.train_from_iterator(["assistant\n\nuser\n\n\n\n the answer ", "\n\n", "\n\n\n"] * 9, trainer)
    names = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", **special_tokens}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **names)


def marked(text: str, spans: list[tuple[int, int]]) -> str:
    out, done = "", 0
    for start, end in spans:
        out += text[done:start] + "«" + text[start:end] + "»"
        done = end
    return out + text[done:]


def supervised_texts(
    template: str,
    messages: list[dict],
    *,
    finish_reason: str | None = None,
    multi_turn: str = "split",
    **template_kwargs,
) -> list[str]:
    """Every sample's decoded tokens, supervised stretches between « and »: what training sees, not the rendering."""
    tokenizer = make_tokenizer(template)
    to_samples = ConversationTokenizer(
        tokenizer, vocab_size=len(tokenizer), multi_turn=multi_turn, template_kwargs=template_kwargs
    )
    conversation = parse_row({"messages": messages, "finish_reason": finish_reason}, "chat.jsonl:1")
    out = []
    for sample, text in zip(to_samples.samples(conversation), to_samples.render(conversation), strict=True):
        edges = np.flatnonzero(np.diff(sample.loss_mask, prepend=False, append=False)).tolist()
        pieces = np.split(sample.input_ids, edges)
        decoded = [tokenizer.decode(piece.tolist()) for piece in pieces]
        out.append("".join(f"«{piece}»" if k % 2 else piece for k, piece in enumerate(decoded)))
        assert out[-1].replace("«", "").replace("»", "") == text.text
    return out


def test_chatml_supervises_every_answer_and_its_end_token_but_not_the_newline_after_it():
    assert supervised_texts(CHATML, THREE_TURNS) == [
        "<|im_start|>system\nBe kind<|im_end|>\n"
        "<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\n«<think>\nT1\n</think>\n\nA1<|im_end|>»\n"
        "<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\n«<think>\nT2\n</think>\n\nA2<|im_end|>»\n"
        "<|im_start|>user\nQ3<|im_end|>\n<|im_start|>assistant\n«<think>\nT3\n</think>\n\nA3<|im_end|>»\n"
    ]


QWEN3_TURNS = [
    "<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\n«<think>\nT1\n</think>\n\nA1<|im_end|>»\n",
    "<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n"
    "<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\n«<think>\nT2\n</think>\n\nA2<|im_end|>»\n",
    "<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n"
    "<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\nA2<|im_end|>\n"
    "<|im_start|>user\nQ3<|im_end|>\n<|im_start|>assistant\n«<think>\nT3\n</think>\n\nA3<|im_end|>»\n",
]


def test_split_makes_a_sample_of_every_turn_as_served_where_earlier_thinking_is_dropped():
    assert supervised_texts(QWEN3, THREE_TURNS, multi_turn="split") == QWEN3_TURNS


def test_last_keeps_only_the_final_turn_where_earlier_thinking_is_dropped():
    assert supervised_texts(QWEN3, THREE_TURNS, multi_turn="last") == QWEN3_TURNS[-1:]


def test_error_stops_where_earlier_thinking_is_dropped_and_names_row_and_option():
    with pytest.raises(ValueError, match=r"chat\.jsonl:1: the chat template rewrites.*data\.multi_turn=split"):
        supervised_texts(QWEN3, THREE_TURNS, multi_turn="error")


@pytest.mark.parametrize("multi_turn", ["split", "last", "error"])
@pytest.mark.parametrize("template", [CHATML, LLAMA3, GEMMA, MARKERS])
def test_a_template_that_keeps_history_gives_one_sample_with_all_turns_under_every_policy(template, multi_turn):
    (text,) = supervised_texts(template, THREE_TURNS, multi_turn=multi_turn)
    assert text.count("«") == 3


def test_a_tool_loop_keeps_its_thinking_and_stays_one_sample():
    messages = [
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": "<think>\nlook\n</think>\n\n",
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}],
        },
        {"role": "tool", "content": "yes"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nIt rains."},
    ]
    assert supervised_texts(QWEN3, messages) == [
        "<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n"
        '«<think>\nlook\n</think>\n\n\n<tool_call>weather {"city": "Bonn"}</tool_call><|im_end|>»\n'
        "<|im_start|>user\n<response>yes</response><|im_end|>\n"
        "<|im_start|>assistant\n«<think>\nso\n</think>\n\nIt rains.<|im_end|>»\n"
    ]


def test_template_kwargs_reach_the_template():
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    question = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    assert supervised_texts(QWEN3, messages) == [question + "«<think>\n\n</think>\n\nA<|im_end|>»\n"]
    assert supervised_texts(QWEN3, messages, enable_thinking=False) == [
        question + "<think>\n\n</think>\n\n«A<|im_end|>»\n"
    ]


def test_llama3_headers_are_not_supervised_and_the_end_of_turn_is():
    messages = [{"role": "system", "content": "S"}, *THREE_TURNS[:2], {"role": "user", "content": "Q2"}]
    messages += [{"role": "assistant", "content": " A2\n"}]
    assert supervised_texts(LLAMA3, messages) == [
        "<|bos|><|header|>system<|/header|>\n\nS<|eot|><|header|>user<|/header|>\n\nQ1<|eot|>"
        "<|header|>assistant<|/header|>\n\n«<think>\nT1\n</think>\n\nA1<|eot|>»"
        "<|header|>user<|/header|>\n\nQ2<|eot|><|header|>assistant<|/header|>\n\n«A2<|eot|>»"
    ]


def test_gemma_turns_are_marked_under_their_own_role_name():
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    assert supervised_texts(GEMMA, messages) == ["<|bos|><turn>user\nQ</turn>\n<turn>model\n«A</turn>»\n"]


def test_a_template_that_refuses_the_system_role_makes_a_bad_row_with_its_own_words():
    with pytest.raises(BadRow, match="System role not supported") as bad:
        supervised_texts(GEMMA, [{"role": "system", "content": "S"}, *THREE_TURNS])
    assert bad.value.reason == "template_error"


@pytest.mark.parametrize("template", [MARKERS, MARKERS_WITHOUT_END])
def test_generation_markers_are_followed_with_the_end_token_and_without_the_newline(template):
    assert supervised_texts(template, THREE_TURNS[:4]) == [
        "<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\n«<think>\nT1\n</think>\n\nA1<|im_end|>»\n"
        "<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\n«<think>\nT2\n</think>\n\nA2<|im_end|>»\n"
    ]


def test_the_policies_hold_for_templates_with_markers_too():
    split = [
        "<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\n«<think>\nT1\n</think>\n\nA1<|im_end|>»\n",
        "<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\n\n\nA1<|im_end|>\n"
        "<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\n«<think>\nT2\n</think>\n\nA2<|im_end|>»\n",
    ]
    assert supervised_texts(MARKERS_DROP_THINKING, THREE_TURNS[:4], multi_turn="split") == split
    assert supervised_texts(MARKERS_DROP_THINKING, THREE_TURNS[:4], multi_turn="last") == split[1:]
    with pytest.raises(ValueError, match=r"data\.multi_turn=error"):
        supervised_texts(MARKERS_DROP_THINKING, THREE_TURNS[:4], multi_turn="error")


def test_another_number_of_marked_spans_than_answers_is_a_bad_row():
    only_last = MARKERS.replace("message.role == 'assistant'", "message.role == 'assistant' and loop.last")
    with pytest.raises(BadRow, match=r"marks 1 spans .* 2 assistant turns") as bad:
        supervised_texts(only_last, THREE_TURNS[:4])
    assert bad.value.reason == "marked_spans"


def test_a_prompt_that_is_no_prefix_of_the_whole_is_a_bad_row_even_for_a_single_turn():
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    with pytest.raises(BadRow, match=r"prompt goes on with '<think>\\n', the whole with 'A<\|im_end\|>\\n'") as bad:
        supervised_texts(HIDDEN_THINKING, messages)
    assert bad.value.reason == "prompt_not_prefix"


def test_without_an_end_of_turn_token_the_answer_ends_before_the_templates_white_space():
    assert supervised_texts(PLAIN, THREE_TURNS[2:4]) == [
        "### user:\nQ2\n\n### assistant:\n«<think>\nT2\n</think>\n\nA2»\n\n"
    ]


def test_the_end_token_of_an_answer_cut_by_a_limit_is_not_supervised():
    assert supervised_texts(CHATML, THREE_TURNS[:4], finish_reason="length") == [
        "<|im_start|>system\nBe kind<|im_end|>\n"
        "<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\n«<think>\nT1\n</think>\n\nA1<|im_end|>»\n"
        "<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\n«<think>\nT2\n</think>\n\nA2»<|im_end|>\n"
    ]


def test_split_turns_before_a_cut_answer_keep_their_end_tokens():
    texts = supervised_texts(QWEN3, THREE_TURNS, finish_reason="length", multi_turn="split")
    assert [text.endswith("<|im_end|>»\n") for text in texts] == [True, True, False]


def test_what_follows_the_last_answer_is_left_out():
    messages = [*THREE_TURNS[:2], {"role": "user", "content": "unanswered"}]
    assert supervised_texts(CHATML, messages) == supervised_texts(CHATML, messages[:2])


@pytest.mark.parametrize("answer", ["\nA", "\n\nA", "\n\n\n  A", " A"])
def test_a_token_that_would_reach_over_the_turns_edge_is_cut_there(answer):
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": answer}]
    (text,) = supervised_texts(CHATML, messages)
    assert text.endswith(f"<|im_start|>assistant\n«{answer}<|im_end|>»\n")


def test_the_prompt_before_such_an_edge_is_encoded_as_a_server_encodes_it():
    tokenizer = make_tokenizer(CHATML)
    prompt = "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    served = tokenizer(prompt, add_special_tokens=False).input_ids
    row = {"prompt": "Q", "response": "\n\nA"}
    (sample,) = ConversationTokenizer(tokenizer, vocab_size=len(tokenizer)).samples(parse_row(row, "x:1"))
    joined = tokenizer(prompt + "\n\nA", add_special_tokens=False).input_ids
    assert joined[: len(served)] != served  # else this text would show nothing
    assert sample.input_ids[: len(served)].tolist() == served
    assert not sample.loss_mask[: len(served)].any()
    assert sample.loss_mask[len(served)]


def test_characters_of_several_bytes_at_the_edges_are_supervised_whole():
    messages = [{"role": "user", "content": "Grüß 👋🏽"}, {"role": "assistant", "content": "🦊日本é🦊"}]
    (text,) = supervised_texts(CHATML, messages)
    assert text.endswith("Grüß 👋🏽<|im_end|>\n<|im_start|>assistant\n«🦊日本é🦊<|im_end|>»\n")


def test_an_end_token_that_swallows_the_white_space_after_it_is_supervised():
    tokenizer = make_tokenizer(CHATML)
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("<|fin|>", rstrip=True, special=True)])
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<|fin|>")
    row = parse_row({"messages": THREE_TURNS[:4]}, "x:1")
    (sample,) = ConversationTokenizer(tokenizer, vocab_size=len(tokenizer)).samples(row)
    assert tokenizer.decode(sample.input_ids[sample.loss_mask].tolist()) == (
        "<think>\nT1\n</think>\n\nA1<|fin|><think>\nT2\n</think>\n\nA2<|fin|>"
    )


def test_a_tokenizer_that_adds_a_space_to_every_piece_makes_a_bad_row_where_it_would_have_to_be_cut():
    tokenizer = make_tokenizer(CHATML)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    to_samples = ConversationTokenizer(tokenizer, vocab_size=len(tokenizer))
    with pytest.raises(BadRow) as bad:
        to_samples.samples(parse_row({"prompt": "Q", "response": "\n\nA"}, "x:1"))
    assert bad.value.reason == "token_across_turns"


def test_tool_calls_that_the_template_leaves_out_make_a_bad_row():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
    with pytest.raises(BadRow, match="does not render tool calls") as bad:
        supervised_texts(CHATML, [{"role": "user", "content": "Q"}, call])
    assert bad.value.reason == "tool_call_not_rendered"


def test_a_conversation_without_an_answer_is_a_bad_row():
    with pytest.raises(BadRow) as bad:
        supervised_texts(CHATML, [{"role": "user", "content": "Q"}])
    assert bad.value.reason == "no_assistant_turn"


def test_half_a_surrogate_pair_is_a_bad_row():
    with pytest.raises(BadRow) as bad:
        supervised_texts(CHATML, [{"role": "user", "content": "\ud83d"}, {"role": "assistant", "content": "A"}])
    assert bad.value.reason == "invalid_unicode"


def test_plain_text_is_supervised_whole():
    tokenizer = make_tokenizer(None)
    (sample,) = ConversationTokenizer(tokenizer, vocab_size=len(tokenizer)).samples(
        parse_row({"text": "one\ntwo"}, "x:1")
    )
    assert tokenizer.decode(sample.input_ids.tolist()) == "one\ntwo"
    assert sample.loss_mask.all()


@pytest.mark.parametrize("token", [-1, 300, 2**31, 2**70])
def test_tokenised_ids_outside_the_vocabulary_are_a_bad_row(token):
    to_samples = ConversationTokenizer(make_tokenizer(None), vocab_size=300)
    with pytest.raises(BadRow, match=r"expected ids in 0\.\.299") as bad:
        to_samples.samples(parse_row({"input_ids": [1, token], "loss_mask": [1, 1]}, "x:1"))
    assert bad.value.reason == "id_out_of_range"


def test_a_target_without_a_chat_template_is_named_as_the_fault():
    to_samples = ConversationTokenizer(make_tokenizer(None), vocab_size=400)
    with pytest.raises(ValueError, match=r"chat\.jsonl:1 is a chat, but the target's tokenizer has no chat template"):
        to_samples.samples(parse_row({"messages": THREE_TURNS}, "chat.jsonl:1"))


def test_a_tokenizer_larger_than_the_targets_vocabulary_is_named_as_the_fault():
    to_samples = ConversationTokenizer(make_tokenizer(CHATML), vocab_size=100)
    with pytest.raises(ValueError, match="the target has 100 vocabulary rows"):
        to_samples.samples(parse_row({"messages": THREE_TURNS}, "x:1"))


@pytest.mark.real
def test_smollm2_is_masked_as_a_person_would(cache_dir: Path):
    target = instantiate(OmegaConf.load(Path(CONF_DIR) / "target" / "smollm2.yaml"))
    tokenizer = load_tokenizer(target, cache_dir)
    conversation = Conversation(
        source="x:1",
        group="g",
        messages=[
            {"role": "user", "content": "Hi 👋🏽"},
            {"role": "assistant", "content": "\n\nHello 🦊!"},
            {"role": "user", "content": "Bye"},
            {"role": "assistant", "content": "See you\n"},
        ],
    )
    to_samples = ConversationTokenizer(tokenizer, vocab_size=49152)
    (text,) = to_samples.render(conversation)
    (sample,) = to_samples.samples(conversation)
    assert isinstance(text, MarkedText)
    assert marked(text.text, text.spans) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi 👋🏽<|im_end|>\n<|im_start|>assistant\n«\n\nHello 🦊!<|im_end|>»\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n«See you\n<|im_end|>»\n"
    )
    assert tokenizer.decode(sample.input_ids.tolist()) == text.text
    assert tokenizer.decode(sample.input_ids[sample.loss_mask].tolist()) == (
        "\n\nHello 🦊!<|im_end|>See you\n<|im_end|>"
    )
