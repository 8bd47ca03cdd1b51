"""The frozen target: reads tokens, gives the hidden states that the drafter is conditioned on."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from dflash.batch import packed_position_ids
from dflash.target.layers import check_layer_ids, decoder_layers, layer_hooks
from dflash.target.varlen import packed_attention


class _LastLayerReachedError(Exception):
    """Ends a forward pass after the last captured layer: what lies above it would be computed for nothing."""


class FrozenTarget:
    """A causal LM whose chosen decoder layers are captured.

    A plain object, not an `nn.Module`: so it is in no state dict, no optimizer, and `.to()`, `.train()` and precision
    casting of the module that uses it pass it by.

    Layer id i means the output of decoder layer i, counted from 0. That is transformers' `hidden_states[i + 1]`, except
    for the last layer, where transformers has applied the final norm already and a captured state has not.

    Args:
        model: any Hugging Face causal LM.
        layer_ids: distinct ids in 0..num_layers-1, in the order in which the states are concatenated.
        device: where it runs.
        prefill_chunk: samples of more tokens than this are read so many tokens at a time, with a KV cache, which bounds
            the memory of activations; None: in one pass, however long.

    Raises:
        ValueError: layer ids out of range or repeated; chunks for a target that can not be read in pieces exactly.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layer_ids: Sequence[int],
        device: torch.device | str = "cpu",
        prefill_chunk: int | None = None,
    ) -> None:
        check_layer_ids(layer_ids, model.config.get_text_config().num_hidden_layers)
        if prefill_chunk is not None and (reason := _why_not_in_pieces(model)):
            raise ValueError(
                f"target.prefill_chunk={prefill_chunk} is not exact for targets of the architecture "
                f"{model.config.model_type}: {reason}. Set target.prefill_chunk=null."
            )
        self.model = model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]  # transformers' wrapper hides nn.Module.to's overloads
        self.layer_ids = tuple(layer_ids)
        self.device = torch.device(device)
        self.prefill_chunk = prefill_chunk

    def hidden_states(self, input_ids: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """States of the captured layers, concatenated.

        Args:
            input_ids: [B, S] int64. Padding must stand on the right: the target is causal, so it changes no real
                position, and needs no mask.
            cu_seqlens: [D + 1] int32: the one row of `input_ids` holds D samples behind each other, which begin there;
                each is read as if it were alone. None: a sample a row.

        Returns:
            [B, S, L * H] in the target's dtype.
        """
        input_ids = input_ids.to(self.device)
        if cu_seqlens is None:
            return self._read(input_ids)
        bounds = cu_seqlens.tolist()
        row_length = input_ids.shape[1]
        pieces = []
        for first, end, is_long in _passes(bounds, self.prefill_chunk):
            # What follows the last sample is padding, which nobody reads: it goes with it where it can.
            until = row_length if end == len(bounds) - 1 and not is_long else bounds[end]
            ids = input_ids[:, bounds[first] : until]
            own_bounds = cu_seqlens[first : end + 1].to(self.device) - bounds[first]
            pieces.append(self._read(ids) if is_long else self._read_packed(ids, own_bounds))
        states = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        missing = row_length - states.shape[1]
        return F.pad(states, (0, 0, 0, missing)) if missing else states

    def _read(self, input_ids: Tensor) -> Tensor:
        """[B, S] -> [B, S, L * H], a sample a row, in as many passes as it takes."""
        length = input_ids.shape[1]
        chunk = length if self.prefill_chunk is None else self.prefill_chunk
        if length <= chunk:
            return self._pass(input_ids=input_ids, use_cache=False)
        cache = DynamicCache(config=self.model.config)
        arguments = {cache_argument(self.model.base_model): cache, "use_cache": True}
        positions = torch.arange(length, device=self.device)[None]
        return torch.cat(
            [
                self._pass(
                    input_ids=input_ids[:, begin : begin + chunk],
                    position_ids=positions[:, begin : begin + chunk],
                    **arguments,
                )
                for begin in range(0, length, chunk)
            ],
            dim=1,
        )

    def _read_packed(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[1, S] -> [1, S, L * H], samples behind each other, in one pass."""
        positions = packed_position_ids(cu_seqlens, input_ids.shape[1])
        with packed_attention(self.model, cu_seqlens):
            return self._pass(input_ids=input_ids, position_ids=positions, use_cache=False)

    def _pass(self, **inputs: Any) -> Tensor:
        # no_grad and not inference_mode: tensors made in inference mode can not be saved for the drafter's backward.
        with torch.no_grad(), self.capturing(stop_after_last=True) as captured:
            self.model.base_model(**inputs)
        return self.joined(captured)

    def check_packing(self) -> None:
        """Make sure that samples behind each other in a row are read as if each were alone.

        Raises:
            ValueError: this architecture's are not (its state crosses samples, or its attention is of another kind).
        """
        config = self.model.config.get_text_config()
        if reason := _why_not_in_pieces(self.model):
            raise ValueError(_no_packing_text(config.model_type, reason))
        lengths = [5, 3, 9]
        ids = (torch.arange(2 * sum(lengths), device=self.device) % config.vocab_size).view(2, -1)
        ids[1, lengths[0] :] = ids[0, lengths[0] :]  # the same samples behind another first one
        cu_seqlens = torch.tensor([0, *lengths], device=self.device).cumsum(0).int()
        try:
            packed, behind_another = (self._read_packed(row[None], cu_seqlens).double() for row in ids)
        except (NotImplementedError, KeyError, TypeError, RuntimeError) as error:
            raise ValueError(_no_packing_text(config.model_type, f"its attention needs {error}")) from error
        alone = torch.cat([self.hidden_states(part) for part in ids[:1].split(lengths, dim=1)], dim=1).double()
        # Position by position: some have states a thousand times larger than the others.
        from_alone = ((packed - alone).norm(dim=-1) / alone.norm(dim=-1)).max()
        from_company = ((packed - behind_another).norm(dim=-1) / alone.norm(dim=-1))[:, lengths[0] :].max()
        # Other shapes round otherwise; another company of the same shape hardly does.
        epsilon = torch.finfo(self.model.dtype).eps
        if from_alone > max(16 * epsilon, 1e-3) or from_company > max(4 * epsilon, 1e-5):
            raise ValueError(_no_packing_text(config.model_type, "its samples are not read as if each were alone"))

    def check_padding(self, longest_tokens: int, pad_multiple: int, *, is_alone: bool) -> None:
        """Make sure that a sample's states do not depend on the width that it is padded to.

        Args:
            longest_tokens: of any row, padding included.
            pad_multiple: rows are padded to multiples of it.
            is_alone: every sample is read in a pass of its own.

        Raises:
            ValueError: rows of this width change the rotary embedding of shorter samples beside them.
        """
        config = self.model.config.get_text_config()
        for rope in _ropes_that_change(config):
            if is_alone and rope["rope_type"] == "longrope":  # the other kind depends on earlier passes, too
                continue
            unchanged = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            if longest_tokens > unchanged:
                raise ValueError(
                    f"The target's architecture {config.model_type} has a rotary embedding ({rope['rope_type']}) that "
                    f"is another one in passes over more than {unchanged} tokens, and rows of up to {longest_tokens} "
                    "would change it for shorter samples beside them. Set data.max_length_tokens="
                    f"{unchanged // pad_multiple * pad_multiple}: longer samples are cut or left out, and counted."
                )

    @contextmanager
    def capturing(self, *, stop_after_last: bool = False) -> Iterator[dict[int, Tensor]]:
        """While it lasts, forward passes of the model leave the captured layers' states in the dict that it gives.

        Args:
            stop_after_last: end the pass, and the `with` block, after the last captured layer.
        """
        captured: dict[int, Tensor] = {}
        last = max(self.layer_ids)

        def capture(layer_id: int, output: Any) -> None:
            captured[layer_id] = output[0] if isinstance(output, tuple) else output
            if stop_after_last and layer_id == last:
                raise _LastLayerReachedError

        with layer_hooks(decoder_layers(self.model), self.layer_ids, capture), suppress(_LastLayerReachedError):
            yield captured

    def joined(self, captured: dict[int, Tensor]) -> Tensor:
        """Captured states, each [B, S, H], as the drafter reads them: [B, S, L * H]."""
        return torch.cat([captured[i] for i in self.layer_ids], dim=-1)


def cache_argument(module: nn.Module) -> str:
    """What a model's forward calls its KV cache: renamed within transformers 5, a model's own code may be older."""
    return "cache" if "cache" in inspect.signature(type(module).forward).parameters else "past_key_values"


def _why_not_in_pieces(model: PreTrainedModel) -> str | None:
    """Why it is wrong to read several samples in one row, or one sample in several passes; None where it is right."""
    if getattr(model, "_is_stateful", False):  # transformers' mark of recurrent layers
        return "it keeps a state that crosses from sample to sample"
    if _ropes_that_change(model.config.get_text_config()):
        return "its rotary embedding changes with the longest position of a pass"
    return None


def _ropes_that_change(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Parameters of the rotary embeddings, one or one a kind of layer, that depend on a pass's longest position."""
    rope = getattr(config, "rope_parameters", None) or {}
    of_kinds = [rope, *(of_kind for of_kind in rope.values() if isinstance(of_kind, dict))]
    return [of_kind for of_kind in of_kinds if of_kind.get("rope_type") in ("dynamic", "longrope")]


def _passes(bounds: Sequence[int], longest: int | None) -> Iterator[tuple[int, int, bool]]:
    """Which samples of a packed row are read together: neighbours; one of more than `longest` tokens by itself.

    Args:
        bounds: where samples begin, and where the last one ends.
        longest: tokens, or None.

    Yields:
        the first sample, the one behind the last, and whether it is a single one that is longer than `longest`.
    """
    first, num_samples = 0, len(bounds) - 1
    for sample in range(num_samples):
        if longest is not None and bounds[sample + 1] - bounds[sample] > longest:
            if first < sample:
                yield first, sample, False
            yield sample, sample + 1, True
            first = sample + 1
    if first < num_samples:
        yield first, num_samples, False


def _no_packing_text(model_type: str, reason: str) -> str:
    return (
        f"sampler=packed is not exact for targets of the architecture {model_type}: {reason}. Choose a sampler that "
        "pads, for example sampler=bucketed."
    )


def resolve_mask_token_id(explicit: int | None, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """Id of the mask token: the explicit one, else the tokenizer's, else the first vocabulary row without a token.

    Args:
        explicit: `target.mask_token_id`.
        tokenizer: the target's.
        vocab_size: rows of the target's embedding.

    Raises:
        ValueError: the id lies outside the vocabulary, or there is none of the three.
    """
    if explicit is not None:
        if not 0 <= explicit < vocab_size:
            raise ValueError(f"target.mask_token_id={explicit}: expected an id in 0..{vocab_size - 1}.")
        return explicit
    if tokenizer.mask_token_id is not None and tokenizer.mask_token_id < vocab_size:
        return int(tokenizer.mask_token_id)
    used = set(tokenizer.get_vocab().values())
    unused = next((i for i in range(vocab_size) if i not in used), None)
    if unused is None:
        raise ValueError(
            "target.mask_token_id is null, the tokenizer has no mask token, and every one of the "
            f"{vocab_size} vocabulary rows has a token. Set target.mask_token_id to a reserved token that never occurs "
            "in the data."
        )
    return unused
