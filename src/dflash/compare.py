"""Runs side by side: their curves in one picture, their final figures in one table.

    python -m dflash.compare 'runs=[outputs/train/2026-01-31/12-00-00-000000,outputs/train/2026-01-31/13-00-00-000000]'

Writes `compare.csv` and `compare.png`.
"""

import csv
from pathlib import Path

from omegaconf import DictConfig

from dflash.command import command


@command("compare")
def main(config: DictConfig) -> None:
    """Compose, compare, report."""
    from hydra.core.hydra_config import HydraConfig

    compare([Path(run) for run in config.runs or ()], list(config.tags), Path(HydraConfig.get().runtime.output_dir))


def compare(runs: list[Path], tags: list[str], out_folder: Path) -> None:
    """Write the table and the picture of `runs` below `out_folder`, and print the table.

    Args:
        runs: run folders.
        tags: TensorBoard tags whose curves are drawn.
        out_folder: exists.

    Raises:
        ValueError: no run, one twice, or one without a summary.
    """
    from dflash.report.curves import read_curves, short_names
    from dflash.report.plots import plot_curves
    from dflash.report.run_summary import FIGURES, read_figures
    from dflash.report.tables import text_table

    if len(runs) < 2 or len(set(runs)) < len(runs):
        raise ValueError(
            f"runs={[str(run) for run in runs]}: expected two or more different run folders, 'runs=[a,b]'."
        )
    figures = {name: read_figures(run) for name, run in zip(short_names(runs), runs, strict=True)}
    curves = {name: read_curves(run, tags) for name, run in zip(short_names(runs), runs, strict=True)}
    with (out_folder / "compare.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["run", *FIGURES])
        table.writerows([str(run), *of_run.values()] for run, of_run in zip(runs, figures.values(), strict=True))
    plot_curves(curves, tags, out_folder / "compare.png")
    # Figures as rows: their names are long, the runs' are short.
    print(text_table(["", *figures], [[column, *(f[column] for f in figures.values())] for column in FIGURES]))
    print(f"\n{out_folder / 'compare.csv'}\n{out_folder / 'compare.png'}")


if __name__ == "__main__":
    main()
