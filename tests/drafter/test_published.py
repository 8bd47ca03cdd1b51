"""The published layout: exactly what servers expect, back to the bit, and nothing else is read."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen3Config

from dflash.drafter.checkpoint import check_target, init_drafter_from, load_drafter
from dflash.drafter.config import DrafterOptions, drafter_config
from dflash.drafter.network import DFlashDrafter
from dflash.drafter.published import read_published, write_published
from tests.models import GROUPED

TARGET = Qwen3Config(**GROUPED, rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0})


def make_drafter(**options: Any) -> DFlashDrafter:
    torch.manual_seed(3)
    shape = {"block_size": 4, "num_layers": 2, "num_captured": 2, "target_layer_ids": [0, 2], **options}
    return DFlashDrafter(drafter_config(DrafterOptions(**shape), TARGET, mask_token_id=96))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_published(make_drafter(), tmp_path / "exported", torch.float32)
    return tmp_path / "exported"


def test_an_export_holds_the_published_tensors_and_fields_and_nothing_else(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in folder.iterdir()), "servers run as another user"
    layer = [
        "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_proj.weight",
        "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight", "self_attn.q_norm.weight",
        "self_attn.k_norm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
    ]  # fmt: skip
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {f"layers.{i}.{n}" for i in (0, 1) for n in layer}
    assert set(load_file(folder / "model.safetensors")) == expected
    config = json.loads((folder / "config.json").read_text())
    assert config == {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 4, "num_target_layers": 4,
        "dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 2]},
        "layer_types": ["full_attention", "full_attention"], "rope_theta": 1_000_000.0, "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}, "num_hidden_layers": 2,
        "hidden_size": 32, "vocab_size": 97, "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "tie_word_embeddings": False, "dtype": "float32", "torch_dtype": "float32",
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
        "initializer_range": 0.02, "max_position_embeddings": 32768, "max_window_layers": 28, "sliding_window": None,
        "use_sliding_window": False, "use_cache": True, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    # transformers, which servers read it with, understands it the same way.
    theirs = Qwen3Config.from_pretrained(folder)
    assert theirs.rope_parameters["rope_theta"] == 1_000_000.0
    assert theirs.dflash_config == config["dflash_config"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_export_read_back_gives_the_same_states_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    drafter = make_drafter()
    write_published(drafter, tmp_path / "exported", dtype)
    with safe_open(tmp_path / "exported" / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {dtype}  # noqa: SIM118
    hidden, block = torch.randn(1, 9, 64), torch.randn(2, 4, 32)
    where = torch.tensor([5, 9]), torch.tensor([0, 0])
    back = load_drafter(tmp_path / "exported", "run")
    assert torch.equal(back.float()(hidden, block, *where), drafter.to(dtype).float()(hidden, block, *where))


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "REMOVED"}))

    return change


def change_tensors(change_weights: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change_weights(weights)
        save_file(weights, folder / "model.safetensors")

    return change


def add_pickle(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": 1}))


def break_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no tensors")


DFLASH = {"mask_token_id": 96, "target_layer_ids": [0, 2]}
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing tensor": (change_tensors(lambda w: w.pop("norm.weight")), r"norm\.weight is missing"),
    "extra tensor": (
        change_tensors(lambda w: w.update({"lm_head.weight": torch.ones(97, 32)})),
        r"lm_head\.weight does not belong here",
    ),
    "misshapen tensor": (
        change_tensors(lambda w: w.update({"fc.weight": torch.ones(32, 32)})),
        r"fc\.weight has shape \(32, 32\) instead of \(32, 64\)",
    ),
    "integer tensor": (
        change_tensors(lambda w: w.update({"norm.weight": torch.ones(32, dtype=torch.int32)})),
        "expected floating-point tensors, found torch.int32",
    ),
    "RoPE base in one place": (change_config(rope_theta=10_000.0), r"rope_parameters\.rope_theta=1000000\.0"),
    "RoPE base in both places": (
        change_config(rope_theta=10_000.0, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}),
        "does not say what the weights were trained with",
    ),
    "no RoPE base": (change_config(rope_theta="REMOVED", rope_parameters="REMOVED"), "rope_theta=None"),
    "scaled RoPE": (change_config(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "only rope_type=default"),
    "old scaled RoPE": (change_config(rope_scaling={"type": "linear", "factor": 2.0}), "only rope_type=default"),
    "partial RoPE": (
        change_config(rope_parameters={"rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5}),
        "partial_rotary_factor",
    ),
    "scaling as a word": (change_config(rope_scaling="yarn"), "rope_scaling='yarn', expected null"),
    "no eps": (change_config(rms_norm_eps="REMOVED"), "rms_norm_eps=None"),
    "another eps": (change_config(rms_norm_eps=1e-5), "does not say what the weights were trained with"),
    "eps as text": (change_config(rms_norm_eps="1e-6"), "rms_norm_eps='1e-6'"),
    "causal blocks": (change_config(dflash_config={**DFLASH, "causal": True}), r"dflash_config has \{'causal': True\}"),
    "heads that do not divide": (change_config(num_key_value_heads=3), "no multiple of num_key_value_heads=3"),
    "layer types of lists": (change_config(layer_types=[["x"], ["y"]]), "sliding layers"),
    "dropout as text": (change_config(attention_dropout="none"), "attention_dropout"),
    "layer id out of range": (
        change_config(dflash_config={**DFLASH, "target_layer_ids": [0, 4]}),
        r"target_layer_ids=\[0, 4\], expected distinct layers of a target with num_target_layers=4",
    ),
    "layer id twice": (
        change_config(dflash_config={**DFLASH, "target_layer_ids": [2, 2]}),
        r"target_layer_ids=\[2, 2\]",
    ),
    "other layer ids": (
        change_config(dflash_config={**DFLASH, "target_layer_ids": [0, 3]}),
        "does not say what the weights were trained with",
    ),
    "one layer id fewer": (change_config(dflash_config={**DFLASH, "target_layer_ids": [0]}), "does not say what"),
    "no dflash_config": (change_config(dflash_config="REMOVED"), r"target_layer_ids=None.*mask_token_id=None"),
    "mask token outside": (change_config(dflash_config={**DFLASH, "mask_token_id": 97}), "mask_token_id=97"),
    "sliding layers": (change_config(layer_types=["full_attention", "sliding_attention"]), "sliding layers"),
    "sliding switch": (change_config(use_sliding_window=True), "sliding layers"),
    "too few layer types": (change_config(layer_types=["full_attention"]), "layer_types has 1 entries"),
    "another architecture": (change_config(architectures=["LlamaForCausalLM"]), "architectures="),
    "attention bias": (change_config(attention_bias=True), "attention_bias"),
    "another activation": (change_config(hidden_act="gelu"), "hidden_act='gelu'"),
    "no block size": (change_config(block_size="REMOVED"), "block_size=None"),
    "block of one": (change_config(block_size=1), "block_size=1"),
    "number as text": (change_config(vocab_size="97"), "vocab_size='97'"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{") and None, "no JSON"),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"found no config\.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"found no \.safetensors file"),
    "damaged weights": (break_weights, "damaged"),
    "a tensor twice": (
        lambda folder: shutil.copy(folder / "model.safetensors", folder / "more.safetensors") and None,
        "in more than one file",
    ),
    "a pickle": (add_pickle, r"pytorch_model\.bin: a pickle can run code"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_folder_that_is_not_exactly_a_drafter_is_refused_with_the_reason(folder: Path, name: str) -> None:
    damage, reason = DAMAGES[name]
    assert read_published(folder, "run").block_size == 4  # whole before
    damage(folder)
    with pytest.raises(ValueError, match=reason) as error:
        read_published(folder, "run")
    assert str(folder) in str(error.value)


def test_weights_in_several_files_are_read_as_one(folder: Path) -> None:
    whole = read_published(folder, "run").state_dict()
    names = sorted(whole)
    (folder / "model.safetensors").unlink()
    save_file({n: whole[n] for n in names[:5]}, folder / "model-00001-of-00002.safetensors")
    save_file({n: whole[n] for n in names[5:]}, folder / "model-00002-of-00002.safetensors")
    for name, tensor in read_published(folder, "run").state_dict().items():
        assert torch.equal(tensor, whole[name])


def test_a_published_config_without_rope_parameters_is_read(folder: Path) -> None:
    """As the first published drafters have it: rope_theta alone."""
    change_config(rope_parameters="REMOVED", torch_dtype="REMOVED", layer_types="REMOVED")(folder)
    assert read_published(folder, "run").config.rope_parameters["rope_theta"] == 1_000_000.0


def test_an_integer_base_and_harmless_extras_are_read(folder: Path) -> None:
    """A tool may have written the same values in another way; servers' own switches that are off change nothing."""
    change_config(
        rope_theta=1_000_000, rope_parameters="REMOVED", auto_map={"AutoModel": "dflash.DFlashDraftModel"},
        dflash_config={**DFLASH, "causal": False, "block_size": 4},
    )(folder)  # fmt: skip
    (folder / "model.safetensors").unlink()
    save_file(make_drafter().state_dict(), folder / "model.safetensors")  # without this package's seal
    assert read_published(folder, "run").config.rope_parameters["rope_theta"] == 1_000_000.0


def test_nothing_is_overwritten_and_nothing_half_written_stays(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exists already"):
        write_published(make_drafter(), folder, torch.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]


def test_a_run_can_start_from_an_export(folder: Path) -> None:
    fresh = make_drafter()
    with torch.no_grad():
        fresh.norm.weight.fill_(7.0)
    init_drafter_from(fresh, folder)
    for name, tensor in make_drafter().state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name


def test_another_block_size_may_start_from_an_export(folder: Path) -> None:
    init_drafter_from(make_drafter(block_size=8), folder)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rope_theta": 10_000.0}, r"rope_theta=1000000\.0 there, 10000\.0 here"),
        ({"target_layer_ids": [0, 3]}, r"target_layer_ids=\[0, 2\] there, \[0, 3\] here"),
        ({"num_layers": 3}, r"layers\.2\..* is missing"),
        ({"intermediate_size": 64}, r"mlp\..* has shape \(48, 32\) instead of \(64, 32\)"),
        ({"num_attention_heads": 8}, r"q_proj\.weight has shape \(32, 32\) instead of \(64, 32\)"),
    ],
)
def test_another_kind_of_drafter_is_refused_as_a_start(folder: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        init_drafter_from(make_drafter(**options), folder)
    assert f"init_from={folder}" in str(error.value)


def test_a_drafter_for_another_target_is_refused() -> None:
    check_target(make_drafter(), TARGET, "run=x", "mine")
    other = LlamaConfig(**{**GROUPED, "hidden_size": 64, "num_hidden_layers": 5})
    with pytest.raises(ValueError, match="layers 4 in the drafter's, 5 here; hidden_size 32 in the drafter's, 64 here"):
        check_target(make_drafter(), other, "run=x", "another")


def test_a_name_that_is_nowhere_is_refused_with_what_it_may_be() -> None:
    for name in ("z-lab/no-such-drafter", "outputs/train/no-such-run", "not a name!"):
        with pytest.raises(
            ValueError, match=r"neither a run folder, a \.ckpt file or a folder with a drafter"
        ) as error:
            load_drafter(name, "init_from")
        assert f"init_from={name}" in str(error.value)
