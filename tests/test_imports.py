"""Imports point one way, and commands answer before anything heavy is loaded."""

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY


def test_imports_point_one_way() -> None:
    program = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"
    result = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("command", ["train", "prepare", "regenerate", "evaluate", "export", "compare"])
def test_a_command_loads_nothing_heavy_before_it_runs(command: str) -> None:
    program = (
        f"import sys, dflash.{command}; "
        "print([m for m in ('torch', 'lightning', 'transformers', 'datasets') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
