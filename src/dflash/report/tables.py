"""Tables for the screen."""

from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; numbers stand to the right, None is a dash.

    Args:
        header: one name a column.
        rows: as many cells each; floats are shown with two decimals.
    """
    cells = [list(header)] + [[_cell(value) for value in row] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    numeric = [all(isinstance(row[c], int | float | None) for row in rows) for c in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    )


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
