"""Faults at random moments of runs with a pool: each run must end soon, say why, leave nothing behind, and resume.

    python -m tests.faults --count 200          # takes some 10 minutes; --seed, --kind, --setup

A fault is an exception in a target, in collate or in the drafter, a target or a process of the loader that hangs,
Ctrl-C, SIGTERM, or a disk that is full when a checkpoint is written. Every faulty run is a process of its own, forked
from this one, which has imported everything already. Afterwards it is resumed, and must come to the weights and losses
of a run that nothing disturbed.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

import dflash.callbacks.stop_and_save
import dflash.data.datamodule
import dflash.placement.replica
import dflash.train
import dflash.training.lightning_module
from dflash.data.stdlib_chat import read_functions
from tests.commands import SMALL, scalars

HANG_TIMEOUT_SECONDS = 3.0
END_SECONDS = 10.0
STEPS = 8
COMMON = [
    *SMALL, f"max_steps={STEPS}", "trainer.accumulate_grad_batches=2", "trainer.save_every_n_steps=2",
    "trainer.validate_every_n_steps=4", "trainer.log_every_n_steps=1", "callbacks.decoding=null",
    "validate_untrained=false", "batch.token_budget=1024", "placement=pool",
    f"placement.hang_timeout_seconds={HANG_TIMEOUT_SECONDS}",
]  # fmt: skip
_MOST_BYTES = 100_000  # of a file: less than a checkpoint, more than all else that a run writes
# Name -> overrides, and how near to the undisturbed run a resumed one must be: under split_by_length the groups follow
# the load, that is the clock, so that sums are rounded otherwise.
SETUPS: dict[str, tuple[list[str], float]] = {
    "bucketed": (["sampler=bucketed", "placement.targets=[cpu,cpu]"], 0.0),
    "packed": (["sampler=packed", "placement.targets=[cpu,cpu,cpu]"], 0.0),
    "cut": (["sampler=random", "placement.targets=[cpu,cpu,cpu]", "placement.routing=split_by_length"], 1e-5),
}
_READ, _PASS = "dflash.placement.replica.Replica.read", "dflash.target.frozen.FrozenTarget.hidden_states"
_COLLATE = "dflash.data.datamodule.collate"
_WAIT = "dflash.placement.pipeline.Pipeline._is_next"
_TRAIN, _UPDATE, _VALIDATE = (
    f"dflash.training.lightning_module.DFlashModule.{method}"
    for method in ("training_step", "on_before_optimizer_step", "validation_step")
)
_SAVE = "lightning.pytorch.trainer.trainer.Trainer.save_checkpoint"
# What is hit -> how often each run calls it, at least.
CALLS = {
    _READ: 2 * STEPS, _PASS: 2 * STEPS, _COLLATE: 2 * STEPS, _WAIT: 2 * STEPS, _TRAIN: 2 * STEPS, _UPDATE: STEPS,
    _VALIDATE: 2, _SAVE: STEPS // 2,
}  # fmt: skip
_ANYWHERE = (_TRAIN, _UPDATE, _VALIDATE, _WAIT, _SAVE)
# Kind -> exit code; what has to be on the screen; what it hits.
KINDS = {
    "target": (1, "injected into a target", (_READ, _PASS)),
    "collate": (1, "injected into collate", (_COLLATE,)),
    "drafter": (1, "injected into the drafter", (_TRAIN, _UPDATE, _VALIDATE)),
    "loader hang": (1, "the loader has not brought it", (_COLLATE,)),  # in a process of its own
    "hang": (1, "did not come within placement.hang_timeout_seconds", (_READ, _PASS)),
    "ctrl-c": (130, "SIGINT: finishing the optimizer step, then saving", _ANYWHERE),
    "sigterm": (143, "SIGTERM: finishing the optimizer step, then saving", _ANYWHERE),
    "full disk": (1, "could not be written: File too large", (_SAVE,)),
}

HANGS = ("hang", "loader hang")


class InjectedError(Exception):
    """The fault."""


@dataclass(frozen=True)
class Fault:
    """What happens when: at call number `at_call` of `place`, `delay_seconds` after it has begun."""

    kind: str
    place: str
    at_call: int
    delay_seconds: float

    def __str__(self) -> str:
        return f"{self.kind:11} in {self.place.rpartition('.')[2]} {self.at_call} + {self.delay_seconds:g} s"


def random_fault(source: random.Random, kind: str) -> Fault:
    """In any of the calls that a run makes."""
    place = source.choice(KINDS[kind][2])
    return Fault(kind, place, source.randint(1, CALLS[place]), source.choice([0.0, 0.0, 0.002, 0.02]))


def inject(fault: Fault, happened: Any) -> None:
    """Make the fault happen in this process; `happened`, a shared number, takes the time at which it does."""
    owner_path, _, name = fault.place.rpartition(".")
    owner = resolve_name(owner_path)
    original: Callable[..., Any] = getattr(owner, name)
    calls, lock = 0, threading.Lock()

    def strike() -> None:
        happened.value = time.time()
        _strike(fault.kind)

    def faulty(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        is_before_training = fault.place == _PASS and threading.current_thread() is threading.main_thread()
        with lock:
            calls += not is_before_training
            is_now = calls == fault.at_call and not is_before_training
        if is_now and fault.kind in ("ctrl-c", "sigterm"):
            threading.Timer(fault.delay_seconds, strike).start()  # so that it comes while the call runs
        elif is_now:
            time.sleep(fault.delay_seconds)
            strike()
        return original(*arguments, **options)

    setattr(owner, name, faulty)


def _strike(kind: str) -> None:
    if kind in ("target", "collate", "drafter"):
        raise InjectedError(KINDS[kind][1])
    if kind in HANGS:
        threading.Event().wait()
    elif kind == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_BYTES, _MOST_BYTES))
    else:
        os.kill(os.getpid(), signal.SIGINT if kind == "ctrl-c" else signal.SIGTERM)


def train_process(overrides: list[str], output: Path, fault: Fault | None = None) -> tuple[int, float, str]:
    """`python -m dflash.train` with these overrides, as a forked process that leads a group of its own.

    Returns:
        Exit code; seconds from the fault to the end; what was printed.

    Raises:
        AssertionError: a process is left.
    """
    happened = multiprocessing.get_context("fork").Value("d", 0.0)

    def body() -> None:
        os.setpgid(0, 0)
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
        sys.argv = ["dflash.train", *overrides]
        if fault is not None:
            inject(fault, happened)
        dflash.train.main()

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join(60)
    ended = time.time()
    if process.exitcode is None:
        os.killpg(process.pid or 0, signal.SIGKILL)
    assert process.exitcode is not None, f"still running after 60 s: {output}"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, 0)
        raise AssertionError(f"a process of this run is left: {output}")
    return process.exitcode, ended - happened.value if happened.value else float("nan"), output.read_text()


class Bench:
    """Undisturbed runs, and what faulty ones are held against."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.undisturbed: dict[str, Path] = {}
        read_functions(Path(sysconfig.get_path("stdlib")))  # takes seconds, which no fork has to spend again

    def overrides(self, setup: str, run_folder: Path) -> list[str]:
        """Of a run from the beginning."""
        return [*COMMON, *SETUPS[setup][0], f"cache_dir={self.cache}", f"hydra.run.dir={run_folder}"]

    def expected(self, setup: str) -> Path:
        """The folder of the undisturbed run."""
        if setup not in self.undisturbed:
            run_folder = self.folder / f"undisturbed-{setup}"
            code, _, shown = train_process(self.overrides(setup, run_folder), self.folder / "undisturbed.txt")
            assert code == 0, shown
            self.undisturbed[setup] = run_folder
        return self.undisturbed[setup]

    def check(self, setup: str, fault: Fault, name: str) -> str:
        """One faulty run, and its resume.

        Returns:
            What it was resumed from.

        Raises:
            AssertionError: it did not end as it must.
        """
        expected, run_folder = self.expected(setup), self.folder / name
        output = self.folder / f"{name}.txt"
        of_run = [*self.overrides(setup, run_folder), f"num_workers={int(fault.kind == 'loader hang')}"]
        code, seconds, shown = train_process(of_run, output, fault)
        expected_code, words, _ = KINDS[fault.kind]
        assert code == expected_code, f"exit code {code}, expected {expected_code}\n{shown[-3000:]}"
        assert words in shown, f"{words!r} is not on the screen\n{shown[-3000:]}"
        if fault.kind == "full disk":  # a fault of nobody's code
            assert "Traceback" not in shown, shown[-3000:]
        limit = END_SECONDS + (HANG_TIMEOUT_SECONDS if fault.kind in HANGS else 0.0)
        assert seconds < limit, f"ended {seconds:.1f} s after the fault"

        checkpoint = run_folder / "checkpoints" / "last.ckpt"
        if not checkpoint.exists():
            assert code == 1, "a run that a signal ends saves"
            resumed_from, overrides = "the beginning", self.overrides(setup, run_folder)
            shutil.rmtree(run_folder)
        else:
            step = torch.load(checkpoint, weights_only=False)["global_step"]
            resumed_from, overrides = f"step {step}", [f"resume_from={run_folder}"]
        code, _, shown = train_process(overrides, output)
        assert code == 0, shown[-3000:]
        same_run(expected, run_folder, SETUPS[setup][1])
        shutil.rmtree(run_folder)
        return f"ended after {seconds:.1f} s, resumed from {resumed_from}"


def same_run(expected: Path, got: Path, tolerance: float) -> None:
    """Losses of all steps and the final weights are the same, to the bit where `tolerance` is 0."""
    theirs, ours = scalars(expected)["train/loss"], scalars(got)["train/loss"]
    assert [step for step, _ in ours] == [step for step, _ in theirs] == list(range(1, STEPS + 1))
    for (step, a), (_, b) in zip(theirs, ours, strict=True):
        assert abs(a - b) <= tolerance * abs(a), f"loss of step {step}: {b}, undisturbed {a}"
    weights = [torch.load(f / "checkpoints" / "last.ckpt", weights_only=False)["state_dict"] for f in (expected, got)]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=tolerance, atol=tolerance * 10, msg=name)


def main() -> int:
    """Inject `--count` faults and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=[*KINDS])
    parser.add_argument("--setup", choices=[*SETUPS])
    options = parser.parse_args()
    source, failures, endings = random.Random(options.seed), 0, Counter[str]()
    kinds = [options.kind] if options.kind else [*KINDS]
    setups = [options.setup] if options.setup else [*SETUPS]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for number in range(options.count):
            fault, setup = random_fault(source, kinds[number % len(kinds)]), source.choice(setups)
            try:
                result = bench.check(setup, fault, f"run-{number}")
            except AssertionError as error:
                failures, result = failures + 1, f"FAILED: {error}"
            endings[f"{fault.kind}: {'failed' if result.startswith('FAILED') else 'as it must'}"] += 1
            print(f"{number + 1}/{options.count}  {setup:8}  {fault}: {result}", flush=True)
    print("\n".join(f"{count:4}  {ending}" for ending, count in sorted(endings.items())))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
