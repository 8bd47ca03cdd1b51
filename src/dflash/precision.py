"""Which number format this machine multiplies fast."""

import torch


def has_fast_bf16(device: torch.device | str) -> bool:
    """Whether matrix products in bfloat16 run on their own instructions on `device`.

    A CPU without them (AVX2 only, say) emulates bfloat16 and is several times slower than in float32.
    """
    if torch.device(device).type == "cuda":
        # Emulated support (before Ampere) does not count.
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))


def resolve_dtype(name: str, device: torch.device | str, key: str = "target.dtype") -> torch.dtype:
    """Dtype for the config key `key`: `auto` is bfloat16 where `device` has it, else float32.

    Raises:
        ValueError: `name` is not one of auto, float32, float64, bfloat16, float16.
    """
    if name == "auto":
        return torch.bfloat16 if has_fast_bf16(device) else torch.float32
    dtypes = {d: getattr(torch, d) for d in ("float32", "float64", "bfloat16", "float16")}
    if name not in dtypes:
        raise ValueError(f"{key}={name!r} is unknown. Allowed: auto, {', '.join(dtypes)}.")
    return dtypes[name]
