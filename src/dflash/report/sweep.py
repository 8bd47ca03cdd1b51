"""The table of a sweep (`python -m dflash.train -m ...`): a row a job, written anew after every one of them.

A Hydra callback, since Hydra runs the jobs. Each job leaves its row in its own folder, and the table is made of all
rows there are: so it is right with jobs side by side, and a failed job keeps none of the others from it.
"""

import csv
import fcntl
import gc
import io
import json
import os
import traceback
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from dflash.report.run_summary import FIGURES, SUMMARY_NAME, read_figures

ROW_NAME = "sweep_row.json"


class SweepTable(Callback):
    """Writes `sweep.csv` and `sweep.png` into the sweep's folder; does nothing outside a sweep."""

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Write the job's row, then the table."""
        if config.hydra.mode != RunMode.MULTIRUN:
            return
        # The next job's target needs the room of this one's, which a failed job's traceback would hold on to.
        if job_return.status == JobStatus.FAILED and isinstance(job_return._return_value, BaseException):
            traceback.clear_frames(job_return._return_value.__traceback__)
        gc.collect()
        job_folder = Path(config.hydra.runtime.output_dir)
        row = job_row(config.hydra.job.num, list(config.hydra.overrides.task), job_folder, job_return)
        job_folder.mkdir(parents=True, exist_ok=True)
        _write(job_folder / ROW_NAME, json.dumps(row))
        write_table(Path(config.hydra.sweep.dir))


def job_row(number: int, overrides: list[str], job_folder: Path, job_return: JobReturn) -> dict[str, Any]:
    """What the table says of one job."""
    failed = job_return.status != JobStatus.COMPLETED
    figures = dict.fromkeys(FIGURES)
    if not failed and (job_folder / SUMMARY_NAME).is_file():
        figures = read_figures(job_folder)
    return {
        "job": number,
        "overrides": dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override),
        "status": "failed" if failed else "completed",
        "reason": str(job_return._return_value) if failed else "",
        "folder": str(job_folder),
        **figures,
    }


def write_table(sweep_folder: Path) -> None:
    """Make `sweep.csv` and `sweep.png` of all rows below `sweep_folder`."""
    from dflash.report.plots import plot_sweep

    with (sweep_folder / "sweep.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = [json.loads(path.read_text(encoding="utf-8")) for path in sweep_folder.glob(f"*/{ROW_NAME}")]
        rows.sort(key=lambda row: row["job"])
        swept = swept_keys(rows)
        text = io.StringIO()
        table = csv.writer(text)
        table.writerow(["job", *swept, "status", *FIGURES, "reason", "folder"])
        for row in rows:
            values = [row["overrides"].get(key, "") for key in swept]
            figures = [row[column] for column in FIGURES]
            table.writerow([row["job"], *values, row["status"], *figures, row["reason"], row["folder"]])
        _write(sweep_folder / "sweep.csv", text.getvalue())
        plot_sweep(rows, swept, sweep_folder / "sweep.png")


def swept_keys(rows: list[dict[str, Any]]) -> list[str]:
    """The overrides that are not the same in every job, in the command line's order; all of them for a single job."""
    keys = list(dict.fromkeys(key for row in rows for key in row["overrides"]))
    differing = [key for key in keys if len({row["overrides"].get(key) for row in rows}) > 1]
    return differing or keys


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
