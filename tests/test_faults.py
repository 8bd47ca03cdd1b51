"""One fault of each kind, as `python -m tests.faults` injects hundreds: each ends its run soon, and it resumes."""

import subprocess
import sys
from pathlib import Path

from tests.faults import KINDS


def test_every_kind_of_fault_ends_a_run_and_it_resumes_to_the_undisturbed_one() -> None:
    # A process of its own: it forks, and must not have torch's threads when it does.
    command = [sys.executable, "-m", "tests.faults", f"--count={len(KINDS)}", "--seed=3", "--setup=bucketed"]
    result = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("as it must") == len(KINDS)
