"""One sequence in the target, with its KV cache: what decoding runs on."""

import torch
from torch import Tensor
from transformers import DynamicCache

from dflash.target.frozen import FrozenTarget, cache_argument


class TargetSequence:
    """A prompt, then pieces that are appended and may be taken back from the end.

    Args:
        target: the model, with the layers to capture.
        captures: whether forwards return hidden states; plain decoding needs none.
    """

    def __init__(self, target: FrozenTarget, *, captures: bool = True) -> None:
        self.target = target
        self.captures = captures
        self.cache = DynamicCache(config=target.model.config)
        self._cache_argument = cache_argument(target.model)

    @torch.no_grad()
    def prefill(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Read the prompt.

        Args:
            token_ids: [S] int64.

        Returns:
            logits after its last token, [1, V], and captured states [1, S, L * H].

        Raises:
            ValueError: the target keeps a state that can not be shortened again.
        """
        read = self._forward(token_ids, logits_to_keep=1)
        # From here on pieces are taken back: caches that keep a window or a state must remember what went before.
        self.cache.activate_past_recording()
        if not self.cache.is_croppable:
            raise ValueError(
                f"target {type(self.target.model).__name__} keeps a state that can not be taken back after wrong "
                "drafts, so it can not be decoded speculatively here."
            )
        return read

    @torch.no_grad()
    def extend(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Append tokens; `take_back` must follow, with 0 if all of them stay.

        Args:
            token_ids: [P] int64.

        Returns:
            logits after each of them, [P, V], and captured states [1, P, L * H].
        """
        return self._forward(token_ids, logits_to_keep=0)

    def take_back(self, num_tokens: int) -> None:
        """Forget the last tokens of the latest `extend`."""
        self.cache.crop(-num_tokens)

    def _forward(self, token_ids: Tensor, logits_to_keep: int) -> tuple[Tensor, Tensor | None]:
        arguments = {self._cache_argument: self.cache, "use_cache": True, "logits_to_keep": logits_to_keep}
        if not self.captures:
            return self.target.model(input_ids=token_ids[None], **arguments).logits[0], None
        with self.target.capturing() as captured:
            logits = self.target.model(input_ids=token_ids[None], **arguments).logits[0]
        return logits, self.target.joined(captured)
