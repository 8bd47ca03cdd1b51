"""The decoding callback where there is nothing to decode: it says so, and training goes on."""

from contextlib import nullcontext

import pytest

from dflash.callbacks.decoding import Decoding
from dflash.decoding.comparison import Prompt
from dflash.target.frozen import FrozenTarget
from dflash.target.sequence import TargetSequence
from dflash.target.tiny import build_tiny_model, build_tiny_tokenizer


def test_a_run_without_prompts_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    callback = Decoding()
    callback.use(lambda: nullcontext(FrozenTarget(build_tiny_model(), [0])), [], build_tiny_tokenizer())
    assert "callbacks.decoding measures nothing in this run: no held-out sample has a prompt" in capsys.readouterr().out
    assert callback.lend_target is None


def test_a_target_whose_state_can_not_be_taken_back_is_told_before_training(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: TargetSequence, token_ids: object) -> None:
        raise ValueError("target X keeps a state that can not be taken back")

    monkeypatch.setattr(TargetSequence, "prefill", refuse)
    callback = Decoding()
    callback.use(
        lambda: nullcontext(FrozenTarget(build_tiny_model(), [0])), [Prompt("a", [5, 6])], build_tiny_tokenizer()
    )
    assert "measures nothing in this run: target X keeps a state" in capsys.readouterr().out
    assert callback.lend_target is None


@pytest.mark.parametrize("key", ["every_n_steps", "num_prompts", "max_new_tokens"])
def test_options_out_of_range_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=rf"callbacks\.decoding\.{key}=0: expected a whole number of 1 or more"):
        Decoding(**{key: 0})
