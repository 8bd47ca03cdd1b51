"""How a run ended: `summary.json` in its folder, and the same on the screen."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash import metric_names
from dflash.config import BEST_CHECKPOINT, LAST_CHECKPOINT

SUMMARY_NAME = "summary.json"

# By which runs are compared: column of a table -> where summary.json has it.
FIGURES = {
    "real_tokens_per_s": ("throughput", "real_tokens_per_s"),
    "padding_ratio": ("padding_ratio",),
    "eta2_ratio": ("eta2_ratio",),
    "loss_variance_explained_by_length": ("loss_variance_explained_by_length",),
    "gradient_spikes": ("spikes", "gradient"),
    "loss_spikes": ("spikes", "loss"),
    "val_loss": ("validation", "trained", "loss"),
    "val_acceptance_length": ("validation", "trained", "acceptance_length"),
    "steps": ("steps",),
    "real_tokens": ("real_tokens",),
}


def read_figures(run_folder: Path) -> dict[str, Any]:
    """The figures of a run by column of `FIGURES`; None where it has not measured one.

    Raises:
        ValueError: the folder has no whole `summary.json`.
    """
    try:
        summary = json.loads((run_folder / SUMMARY_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{run_folder}: found no {SUMMARY_NAME} to read ({error}). Expected the folder of a run that has ended."
        ) from error

    def find(path: tuple[str, ...]) -> Any:
        value: Any = summary
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    return {column: find(path) for column, path in FIGURES.items()}


class RunSummary:
    """Collects what a run came to.

    Args:
        run_folder: where `summary.json` is written; a resumed run finds there what its first part measured untrained.
    """

    def __init__(self, run_folder: Path) -> None:
        self.path = run_folder / SUMMARY_NAME
        self.untrained: dict[str, float] = {}
        if self.path.is_file():
            earlier = json.loads(self.path.read_text(encoding="utf-8"))["validation"]["untrained"]
            self.untrained = earlier or {}

    def note_untrained(self, metrics: Mapping[str, Any]) -> None:
        """Keep the validation of the drafter before its first step, on disk at once: the run may be killed."""
        self.untrained = _validation(metrics)
        self._write({"validation": {"untrained": self.untrained}})

    def finish(
        self,
        *,
        metrics: Mapping[str, Any],
        totals: Mapping[str, int],
        steps: int,
        epochs: float,
        num_empty_steps: int,
        throughput: Mapping[str, float] | None,
        spikes: Mapping[str, int] | None,
        eta2_ratio: float | None,
        loss_variance_explained_by_length: float | None,
        interrupted_by: str | None,
    ) -> str:
        """Write `summary.json` and return the text for the screen.

        Args:
            metrics: the latest value of every metric.
            totals: counts over the whole run and all ranks, as `RunTotals` names them.
            steps: optimizer steps done.
            epochs: epochs done.
            num_empty_steps: optimizer steps that had nothing to learn from.
            throughput: rates since the warm-up steps of this process; None where it was too short.
            spikes: counts over the whole run; None where nobody looked.
            eta2_ratio: how lengths mix in its optimizer steps, 1 as chance would (`dflash.mixing`); None where one
                cannot tell.
            loss_variance_explained_by_length: share in 0..1 of the step loss's ups and downs.
            interrupted_by: the signal that ended the run early, if one did.
        """
        padded_tokens = totals["padded_tokens"]
        by_length = {
            group: {
                name.removeprefix(f"{group}/"): float(value)
                for name, value in sorted(metrics.items())
                if name.startswith(f"{group}/")
            }
            for group in (
                metric_names.LOSS_BY_LENGTH, metric_names.VAL_LOSS_BY_LENGTH, metric_names.ACCEPTANCE_BY_LENGTH,
            )
        }  # fmt: skip
        content = {
            "steps": steps,
            "epochs": epochs,
            **totals,
            "steps_without_anchor": num_empty_steps,
            "padding_ratio": (padded_tokens - totals["real_tokens"]) / padded_tokens if padded_tokens else None,
            "throughput": dict(throughput) if throughput else None,
            "spikes": dict(spikes) if spikes is not None else None,
            "eta2_ratio": eta2_ratio,
            "loss_variance_explained_by_length": loss_variance_explained_by_length,
            "train": {
                "loss": _number(metrics, metric_names.TRAIN_LOSS),
                "acceptance_length": _number(metrics, metric_names.TRAIN_ACCEPTANCE_LENGTH),
            },
            "validation": {"trained": _validation(metrics), "untrained": self.untrained or None},
            **by_length,
            "checkpoint": str(self.path.parent / LAST_CHECKPOINT),
            "best_checkpoint": str(self.path.parent / BEST_CHECKPOINT),
            "interrupted_by": interrupted_by,
        }
        self._write(content)
        return self._text(content)

    def _write(self, content: dict[str, Any]) -> None:
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, self.path)

    def _text(self, content: dict[str, Any]) -> str:
        trained, untrained = content["validation"]["trained"], content["validation"]["untrained"]
        lines = [
            ("optimizer steps", f"{content['steps']:,}"),
            ("data seen", f"{content['epochs']:.2f} epochs, {content['samples']:,} samples"),
            ("padding", _format(content["padding_ratio"], "{:.1%} of the computed tokens")),
        ]
        if throughput := content["throughput"]:
            lines.append(
                (
                    "throughput",
                    f"{throughput['real_tokens_per_s']:,.0f} real tokens/s, {throughput['anchors_per_s']:,.0f} "
                    f"anchors/s ({throughput['warmup_steps_left_out']:.0f} warm-up steps left out)",
                )
            )
        for label, key in (
            ("truncated samples", "truncated_samples"),
            ("batches without anchor", "batches_without_anchor"),
            ("steps without anchor", "steps_without_anchor"),
        ):
            if content[key]:
                lines.append((label, f"{content[key]:,}"))
        if spikes := content["spikes"]:
            text = f"gradient {spikes['gradient']}, loss {spikes['loss']}"
            text += f", steps skipped {spikes['skipped_steps']}" if spikes["skipped_steps"] else ""
            text += f"  (who was in them: {self.path.parent / 'spikes.jsonl'})" if any(spikes.values()) else ""
            lines.append(("spikes", text))
        mixing = _format(content["eta2_ratio"], "{:.1f}  (variance of length between steps; 1 is what chance gives)")
        lines.append(("mixing, eta2_ratio", mixing))
        share = content["loss_variance_explained_by_length"]
        lines.append(("loss explained by length", _format(share, "{:.0%} of its changes from step to step")))
        lines.append(("train loss", _format(content["train"]["loss"], "{:.3f}  (last interval)")))
        lines.append(("validation loss", _format(trained.get("loss"), "{:.3f}")))
        lines.append(("held-out acceptance length", _format(trained.get("acceptance_length"), "{:.3f}")))
        if untrained:
            lines.append(("  untrained drafter's", _format(untrained.get("acceptance_length"), "{:.3f}")))
        for name, value in content[metric_names.VAL_LOSS_BY_LENGTH].items():
            acceptance = content[metric_names.ACCEPTANCE_BY_LENGTH].get(name)
            lines.append((f"  {name} tokens", f"loss {value:.3f}, acceptance length {_format(acceptance, '{:.3f}')}"))
        lines.append(("checkpoint", content["checkpoint"]))
        lines.append(("to decode with it", f"python -m dflash.evaluate run={self.path.parent}"))
        lines.append(("TensorBoard", f"tensorboard --logdir {self.path.parent}"))
        if content["interrupted_by"]:
            lines.append(("ended early by", content["interrupted_by"]))
            lines.append(("to continue", f"python -m dflash.train resume_from={self.path.parent}"))
        width = max(len(label) for label, _ in lines)
        return "\n" + "\n".join(f"{label:<{width}}  {value}" for label, value in lines)


def _validation(metrics: Mapping[str, Any]) -> dict[str, float]:
    pairs = {"loss": metric_names.VAL_LOSS, "acceptance_length": metric_names.VAL_ACCEPTANCE_LENGTH}
    return {key: float(metrics[name]) for key, name in pairs.items() if name in metrics}


def _number(metrics: Mapping[str, Any], name: str) -> float | None:
    return float(metrics[name]) if name in metrics else None


def _format(value: float | None, form: str) -> str:
    return "not measured" if value is None else form.format(value)
