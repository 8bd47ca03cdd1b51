"""What decoding with the drafter came to, in words and tables."""

from typing import Any

from dflash.report.tables import text_table

SOURCE_CHARS = 32  # of a prompt's file and line that a table shows
_SPEED_COLUMNS = {
    "acceptance_length": "tokens/round",
    "tokens_per_s": "tokens/s",
    "baseline_tokens_per_s": "target alone",
}
_PROMPT_COLUMNS = {
    "prompt_tokens": "tokens", "new_tokens": "new", "rounds": "rounds", **_SPEED_COLUMNS, "lossless": "lossless",
}  # fmt: skip
_LENGTH_COLUMNS = {"prompts": "prompts", **_SPEED_COLUMNS, "speedup": "speed-up"}


def evaluation_text(figures: dict[str, Any]) -> str:
    """Tables by prompt and by length, the totals, and whether it is faster.

    Args:
        figures: the content of `evaluate.json`.
    """
    by_prompt = text_table(
        ["prompt", *_PROMPT_COLUMNS.values()],
        [[_end_of(row["source"]), *(row[key] for key in _PROMPT_COLUMNS)] for row in figures["by_prompt"]],
    )
    by_length = text_table(
        ["prompt and text", *_LENGTH_COLUMNS.values()],
        [[f"{name} tokens", *(part[key] for key in _LENGTH_COLUMNS)] for name, part in figures["by_length"].items()],
    )
    return "\n\n".join([by_prompt, by_length, _totals(figures)])


def _end_of(source: str) -> str:
    return source if len(source) <= SOURCE_CHARS else f"…{source[1 - SOURCE_CHARS :]}"


def _totals(figures: dict[str, Any]) -> str:
    acceptance, speedup = figures["acceptance_length"], figures["speedup"]
    if acceptance is None:
        return "Every text ended with its first token: there was nothing to draft."
    seconds = figures["drafter_seconds"] + figures["target_seconds"] + figures["other_seconds"]
    shares = ", ".join(f"{part} {figures[f'{part}_seconds'] / seconds:.0%}" for part in ("target", "drafter", "other"))
    slots = " ".join(f"{share:.0%}" for share in figures["acceptance_by_slot"])
    lines = [
        ("acceptance length", f"{acceptance:.3f} tokens a round, of {figures['block_size']} at most"),
        ("accepted by slot", f"{slots}  (all drafts up to this slot)"),
        ("first token after", f"{figures['first_token_seconds']:.2f} s"),
        ("speed", f"{figures['tokens_per_s']:.2f} tokens/s; the target alone {figures['baseline_tokens_per_s']:.2f}"),
        ("time of a round", f"{seconds / figures['rounds'] * 1000:.0f} ms: {shares}"),
        ("lossless", _lossless(figures)),
    ]
    width = max(len(name) for name, _ in lines)
    judgement = "FASTER than" if speedup > 1.01 else "SLOWER than" if speedup < 0.99 else "as fast as"
    return (
        "\n".join(f"{name:<{width}}  {value}" for name, value in lines)
        + f"\n\nOn this machine decoding with the drafter is {judgement} the target alone: {speedup:.2f} times "
        "its speed."
    )


def _lossless(figures: dict[str, Any]) -> str:
    if figures["lossless"] is None:
        return "not compared: sampled texts differ, their distribution is the target's"
    parted = [row for row in figures["by_prompt"] if row["divergence"]]
    same = f"{figures['prompts'] - len(parted)} of {figures['prompts']} texts are the target's own, token for token"
    lines = [f"{'yes' if figures['lossless'] else 'NO'}: {same}"]
    for row in parted:
        gap = row["divergence"]["gap"]
        where = "one text ends" if gap is None else f"where one token's logit lies {gap:.1e} below the target's best"
        lines.append(f"  {row['source']}: parts at new token {row['divergence']['index']}, {where} ({row['lossless']})")
    if parted and figures["dtype"] != "float32":
        lines.append(
            f"  In {figures['dtype']} a forward of one token and one of several round apart, so that texts may part at "
            "larger gaps: dtype=float32 tells that from a fault."
        )
    return "\n".join(lines)
