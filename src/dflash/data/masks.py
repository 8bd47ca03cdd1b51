"""From a conversation to token ids and a loss mask that is never shifted.

A token is supervised where the target would have written it: assistant turns with their end-of-turn token, without what
the template adds after it. Where a turn begins and ends is read off the template itself: from its {% generation %}
markers if it has them, else by rendering the prompt of every turn and the conversation up to its end. Each rendering
must be a prefix of the next; where it is not, the row is refused or split, never masked by guess.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from dflash.data.conversations import BadRow, Conversation

_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class MarkedText:
    """A rendered text and the character spans [start, end) of it that are supervised, in order."""

    text: str
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class TokenIds:
    """One sample's tokens.

    Attributes:
        input_ids: [S] int32.
        loss_mask: [S] bool, true where the token is to be predicted.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


@dataclass(frozen=True)
class _Turn:
    """An assistant turn at the end of the conversation up to it: `text[start:end]`, end-of-turn token included."""

    text: str
    start: int
    written_end: int  # before the end-of-turn token
    end: int


class ConversationTokenizer:
    """Makes a target's training samples of conversations.

    Args:
        tokenizer: the target's; a fast one.
        vocab_size: rows of the target's embedding.
        multi_turn: `split`, `last` or `error`, see `DataOptions`.
        template_kwargs: handed to the chat template.

    Raises:
        ValueError: the tokenizer is a slow one, which does not know where in the text its tokens lie.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vocab_size: int,
        multi_turn: str = "split",
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                f"The target's tokenizer {type(tokenizer).__name__} is a slow one, which does not tell where in the "
                "text its tokens lie. Use a target with a tokenizer.json."
            )
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._multi_turn = multi_turn
        self._template_kwargs = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        added = tokenizer.added_tokens_decoder
        self._special_ids = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self._special_tokens = tuple(tokenizer.convert_ids_to_tokens(sorted(self._special_ids)))

    def samples(self, conversation: Conversation) -> list[TokenIds]:
        """The conversation's samples: one, or one an assistant turn under `multi_turn=split`.

        Raises:
            BadRow: it can not be rendered or masked; the detail says why.
            ValueError: the target has no chat template, its tokenizer does not fit it, or `multi_turn=error` forbids
                what the template does.
        """
        if conversation.input_ids is not None:
            samples = [self._from_ids(conversation)]
        elif conversation.text is not None:
            _check_unicode(conversation.text)
            # Plain text begins as it does for a server's completion: with whatever the tokenizer itself puts first.
            ids = self._tokenizer(conversation.text, verbose=False).input_ids
            samples = [TokenIds(np.array(ids, np.int32), np.ones(len(ids), np.bool_))]
        else:
            samples = [self._tokenize(marked) for marked in self.render(conversation)]
        for sample in samples:
            if sample.input_ids.size and sample.input_ids.max() >= self._vocab_size:
                raise ValueError(
                    f"{conversation.source}: the tokenizer gives the id {sample.input_ids.max()}, but the target has "
                    f"{self._vocab_size} vocabulary rows. Tokenizer and target do not belong together."
                )
        return samples

    def _from_ids(self, conversation: Conversation) -> TokenIds:
        # int64 first: an id that does not fit into int32 must not wrap around into the vocabulary.
        ids = np.array(conversation.input_ids, dtype=object)
        outside = [i for i in ids if not 0 <= i < self._vocab_size]
        if outside:
            raise BadRow("id_out_of_range", f"input_ids has {outside[0]}, expected ids in 0..{self._vocab_size - 1}.")
        return TokenIds(ids.astype(np.int32), np.array(conversation.loss_mask, np.bool_))

    def render(self, conversation: Conversation) -> list[MarkedText]:
        """The texts that a conversation's samples consist of, with what is supervised in them.

        Raises:
            BadRow, ValueError: as `samples`.
        """
        turns = self._turns(conversation)
        spans = [(turn.start, turn.end) for turn in turns]
        if conversation.finish_reason == "length":
            spans[-1] = (turns[-1].start, turns[-1].written_end)
        # What the template adds after a turn's end may differ once the conversation goes on; what leads there may not.
        history_kept = all(
            later.text.startswith(earlier.text[: earlier.end]) and earlier.end <= later.start
            for earlier, later in pairwise(turns)
        )
        if history_kept:
            return [MarkedText(turns[-1].text, spans)]
        if self._multi_turn == "error":
            raise ValueError(
                f"{conversation.source}: the chat template rewrites earlier turns of a conversation (thinking models "
                "drop their thinking), so that no single text is what the target saw in every turn. "
                "data.multi_turn=error stops here: set data.multi_turn=split (a sample for every assistant turn) or "
                "data.multi_turn=last (only the final turn)."
            )
        each_turn = [MarkedText(turn.text, [span]) for turn, span in zip(turns, spans, strict=True)]
        return each_turn if self._multi_turn == "split" else each_turn[-1:]

    def _turns(self, conversation: Conversation) -> list[_Turn]:
        """Every assistant turn, rendered as the last of the conversation."""
        messages, tools = conversation.messages or [], conversation.tools
        try:
            template = self._tokenizer.get_chat_template(None, tools)
        except ValueError as error:
            raise ValueError(
                f"{conversation.source} is a chat, but the target's tokenizer has no chat template. Use a chat model "
                "as the target, or rows with text, or with input_ids and loss_mask."
            ) from error
        has_markers = bool(_GENERATION_MARKER.search(template))

        turns: list[_Turn] = []
        for i in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
            text, marked = self._render(template, messages[: i + 1], tools, has_markers, add_generation_prompt=False)
            if has_markers:
                if len(marked) != len(turns) + 1:
                    raise BadRow(
                        "marked_spans",
                        f"the chat template marks {len(marked)} spans as generated where the conversation has "
                        f"{len(turns) + 1} assistant turns (up to message {i}), so it is unclear what is supervised.",
                    )
                start, end = marked[-1]
            else:
                prompt, _ = self._render(template, messages[:i], tools, has_markers, add_generation_prompt=True)
                if not text.startswith(prompt):
                    raise BadRow("prompt_not_prefix", _prefix_difference(prompt, text, i))
                start, end = len(prompt), len(text)
            turn = _Turn(text, start, *self._ends(text, start, end))
            _check_tool_calls_rendered(messages[i], turn, i)
            turns.append(turn)
        if not turns:
            raise BadRow("no_assistant_turn", "the conversation has no assistant turn: there is nothing to learn from.")
        return turns

    def _render(
        self,
        template: str,
        messages: list[dict[str, Any]],
        tools: Any,
        has_markers: bool,
        *,
        add_generation_prompt: bool,
    ) -> tuple[str, list[tuple[int, int]]]:
        try:
            rendered: Any = render_jinja_template(  # annotated as str, returns a pair
                [messages],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=has_markers,
                add_generation_prompt=add_generation_prompt,
                **self._template_kwargs,
            )
        except Exception as error:  # a template is a program: it may raise anything, and says why in its message
            raise BadRow(
                "template_error", f"the chat template refuses the conversation: {type(error).__name__}: {error}"
            ) from error
        texts, marked = rendered
        _check_unicode(texts[0])
        return texts[0], marked[0] if has_markers else []

    def _ends(self, text: str, start: int, end: int) -> tuple[int, int]:
        """Where in text[start:end] the turn's own words end, and where its end-of-turn token does."""
        body = text[start:end].rstrip()
        eos = self._tokenizer.eos_token
        if not body.endswith(self._special_tokens) and eos and text.startswith(eos, end):
            return end, end + len(eos)  # markers that leave the end-of-turn token out
        last = max((token for token in self._special_tokens if body.endswith(token)), key=len, default="")
        return start + len(body) - len(last), start + len(body)

    def _tokenize(self, marked: MarkedText) -> TokenIds:
        encoding = self._tokenizer(marked.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = np.array(encoding.input_ids, np.int32)
        starts, ends = np.array(encoding.offset_mapping, np.int64).reshape(-1, 2).T
        mask = np.zeros(len(ids), np.bool_)
        for start, end in marked.spans:
            first, after = (
                _token_at(starts, ends, start),
                _token_at(starts, ends, self._absorbed(encoding, marked, end)),
            )
            if first is None or after is None:
                return self._tokenize_pieces(marked, ids)
            mask[first:after] = True
        return TokenIds(ids, mask)

    def _absorbed(self, encoding: Any, marked: MarkedText, end: int) -> int:
        """`end`, or where the token before it ends: some such tokens swallow the whitespace after them (Phi-3)."""
        token = encoding.char_to_token(end - 1) if end else None
        if token is None or encoding.input_ids[token] not in self._special_ids:
            return end
        token_end = encoding.offset_mapping[token][1]
        return token_end if marked.text[end:token_end].isspace() else end

    def _tokenize_pieces(self, marked: MarkedText, whole: NDArray[np.int32]) -> TokenIds:
        """A token reaches over a turn's edge: encode prompt and answer apart, as a server and its target do."""
        ids: list[int] = []
        mask: list[bool] = []
        edges = [0, *(edge for span in marked.spans for edge in span), len(marked.text)]
        for k, (start, end) in enumerate(pairwise(edges)):
            piece = self._tokenizer(marked.text[start:end], add_special_tokens=False, verbose=False).input_ids
            ids += piece
            mask += [k % 2 == 1] * len(piece)
        if self._decode(ids) != self._decode(whole.tolist()):
            raise BadRow(
                "token_across_turns",
                "a token reaches over the edge of an assistant turn, and encoding prompt and answer apart gives "
                "another text, so no mask would be exact.",
            )
        return TokenIds(np.array(ids, np.int32), np.array(mask, np.bool_))

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _token_at(starts: NDArray[np.int64], ends: NDArray[np.int64], edge: int) -> int | None:
    """Index of the token that begins exactly at the character `edge`, while the one before ends there; else None."""
    k = int(np.searchsorted(starts, edge))
    begins_here = k == len(starts) or starts[k] == edge
    previous_ends_here = ends[k - 1] == edge if k else edge == 0
    return k if begins_here and previous_ends_here else None


def _prefix_difference(prompt: str, text: str, i: int) -> str:
    same = next((k for k, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), min(len(prompt), len(text)))
    return (
        f"the chat template renders the prompt of message {i} otherwise than the conversation with its answer: "
        f"the prompt goes on with {prompt[same : same + 40]!r}, the whole with {text[same : same + 40]!r}. What the "
        "target saw and what it wrote can not be told apart; data.template_kwargs may change what the template does."
    )


def _check_tool_calls_rendered(message: dict[str, Any], turn: _Turn, i: int) -> None:
    for call in message.get("tool_calls") or ():
        name = call.get("function", call)["name"]
        if name not in turn.text[turn.start : turn.end]:
            raise BadRow(
                "tool_call_not_rendered",
                f"message {i} calls {name!r}, but the chat template does not render tool calls: the drafter would "
                "learn an answer that the target never gave.",
            )


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(
            "invalid_unicode", f"the text holds half a surrogate pair, which is no character ({error})."
        ) from error
