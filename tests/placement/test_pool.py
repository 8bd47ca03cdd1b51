"""Several targets feed one drafter: the same states in the same order, bounded queues, and an end to every mishap."""

import ctypes
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.batch import Batch
from dflash.callbacks.pipeline import judge
from dflash.cost import CostModel
from dflash.placement.inline import InlinePlacement
from dflash.placement.pipeline import Pipeline, PipelineFigures, PoolState
from dflash.placement.pool import PoolPlacement, replica_devices
from dflash.placement.queues import Part
from dflash.placement.ranks import drafter_device
from dflash.placement.replica import Replica
from dflash.target.frozen import FrozenTarget
from tests.commands import scalars, train_here
from tests.models import ARCHITECTURES, random_model

CPU = torch.device("cpu")


def batches(count: int, seed: int = 0) -> list[Batch]:
    """Padded and packed ones of all sizes."""
    random = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        lengths = torch.randint(1, 40, (int(torch.randint(1, 5, (1,), generator=random)),), generator=random)
        packed = number % 3 == 0
        rows, width = (1, int(lengths.sum())) if packed else (len(lengths), int(lengths.max()))
        ids = torch.randint(3, 97, (rows, width), generator=random)
        bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int() if packed else None
        nothing = torch.zeros(0, dtype=torch.long)
        made.append(
            Batch(ids, torch.zeros_like(ids).bool(), lengths, torch.arange(len(lengths)), nothing, nothing, bounds)
        )
    return made


def pool(replicas: int, **changes: Any) -> PoolPlacement:
    options = {"cost": CostModel(), "token_budget": 160, "queued_batches": 1, "hang_timeout_seconds": 30.0, **changes}
    return PoolPlacement(["cpu"] * replicas, **options)


def opened(placement: Any, target: FrozenTarget) -> Any:
    placement.lay_out(CPU)
    placement.open(target)
    return placement


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dflash-")]


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(random_model(ARCHITECTURES["qwen3"]), [0, 2])


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_states_are_those_of_inline_to_the_bit_and_in_order(replicas: int, target: FrozenTarget) -> None:
    made = batches(25)
    inline, pooled = opened(InlinePlacement(), target), opened(pool(replicas), target)
    assert len(pooled.feed(made)) == 25  # type: ignore[arg-type]
    for _ in range(2):  # a loader is iterated once an epoch
        expected, got = list(inline.feed(made)), list(pooled.feed(made))
        assert len(got) == 25
        for theirs, ours in zip(expected, got, strict=True):
            assert ours.input_ids.tolist() == theirs.input_ids.tolist()
            assert torch.equal(ours.hidden, theirs.hidden)
    assert not our_threads()


def test_replicas_share_weights_but_no_module(target: FrozenTarget) -> None:
    first, second = (replica.target.model for replica in opened(pool(2), target).replicas)
    assert first is target.model  # no copy more than replicas
    assert first is not second
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert one.data_ptr() == other.data_ptr()
    buffers = list(zip(first.buffers(), second.buffers(), strict=True))
    assert buffers  # some architectures change their rotary embedding's with every pass
    assert all(one.data_ptr() != other.data_ptr() for one, other in buffers)


class FakeReplica:
    """Takes as long as it is told, batch by batch."""

    def __init__(self, seconds: Iterable[float] = ()) -> None:
        self.seconds = iter(seconds)
        self.target = SimpleNamespace(device=CPU)

    def read(self, batch: Batch, samples: Any = None, width: Any = None) -> tuple[torch.Tensor, float]:
        time.sleep(next(self.seconds, 0.0))
        return batch.input_ids, 0.0


def pipeline(loader: Iterable[Batch], replicas: list[Any], capacity_tokens: int = 10**6, **changes: Any) -> Pipeline:
    def least_loaded(batch: Batch, loads: Sequence[float]) -> list[Part]:
        return [Part(loads.index(min(loads)), None, float(batch.num_padded_tokens))]

    options = {"route": least_loaded, "hang_timeout_seconds": 30.0, **changes}
    state = PoolState(figures=options.pop("figures", PipelineFigures()))
    return Pipeline(loader, replicas, CPU, capacity_tokens=capacity_tokens, state=state, **options)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    replicas=st.integers(1, 4),
    capacity_tokens=st.sampled_from([1, 60, 160, 400]),
    pauses=st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.004]), min_size=60, max_size=60),
    reader=st.sampled_from([0.0, 0.002]),
)
def test_order_is_kept_and_queues_are_bounded_whoever_is_slow(
    seed: int, replicas: int, capacity_tokens: int, pauses: list[float], reader: float
) -> None:
    made, figures = batches(20, seed), PipelineFigures()
    fakes = [FakeReplica(pauses[n * 15 :]) for n in range(replicas)]
    got = []
    for batch in pipeline(made, fakes, capacity_tokens, figures=figures):
        got.append(batch)
        time.sleep(reader)
    assert [batch.input_ids.data_ptr() for batch in got] == [batch.input_ids.data_ptr() for batch in made]
    bound = max(capacity_tokens, *(batch.num_padded_tokens for batch in made))  # one that is larger passes alone
    assert 0 < figures.most_waiting_tokens <= bound
    assert 0 < figures.most_states_tokens <= bound


def test_who_waits_for_whom_is_counted() -> None:
    slow_target, slow_drafter = PipelineFigures(), PipelineFigures()
    list(pipeline(batches(8), [FakeReplica([0.02] * 8)], figures=slow_target))
    for _ in pipeline(batches(8), [FakeReplica()], 200, figures=slow_drafter):
        time.sleep(0.02)
    assert slow_target.drafter_wait_seconds > slow_target.target_wait_seconds
    assert slow_drafter.target_wait_seconds > slow_drafter.drafter_wait_seconds


def test_a_second_replica_is_not_kept_waiting_by_a_batch_that_waits_for_the_first() -> None:
    second_has_read_two = threading.Event()

    class First(FakeReplica):
        """Stays at its first batch, number 0, until the other one has read 1 and 3: 2 waits behind it meanwhile."""

        def read(self, batch: Batch, samples: Any = None, width: Any = None) -> tuple[torch.Tensor, float]:
            assert second_has_read_two.wait(20)
            return super().read(batch, samples, width)

    class Second(FakeReplica):
        num_read = 0

        def read(self, batch: Batch, samples: Any = None, width: Any = None) -> tuple[torch.Tensor, float]:
            self.num_read += 1
            if self.num_read == 2:
                second_has_read_two.set()
            return super().read(batch, samples, width)

    assert (
        len(
            list(
                pipeline(
                    batches(30),
                    [First(), Second()],
                    route=lambda batch, loads: [Part(loads.index(min(loads)), None, 1.0)],
                )
            )
        )
        == 30
    )
    assert our_threads() == []


class BrokenError(Exception):
    """Raised on purpose."""


def test_what_a_replica_raises_reaches_the_drafter_with_its_own_traceback() -> None:
    class Broken(FakeReplica):
        def read(self, batch: Batch, samples: Any = None, width: Any = None) -> tuple[torch.Tensor, float]:
            if batch.input_ids is made[5].input_ids:
                raise BrokenError("in a target")
            return super().read(batch, samples, width)

    made = batches(12)
    with pytest.raises(BrokenError, match="in a target") as caught:
        list(pipeline(made, [Broken(), Broken()]))
    assert "read" in [entry.name for entry in caught.traceback]
    assert our_threads() == []


def test_what_the_loader_raises_reaches_the_drafter() -> None:
    def loader() -> Iterator[Batch]:
        yield from batches(3)
        raise BrokenError("in collate")

    with pytest.raises(BrokenError, match="in collate"):
        list(pipeline(loader(), [FakeReplica()]))
    assert our_threads() == []


def test_a_drafter_that_fails_or_stops_leaves_no_thread() -> None:
    reader = iter(pipeline(batches(12), [FakeReplica([0.01] * 12)], 100))
    next(reader)
    assert len(our_threads()) == 2
    reader.close()  # type: ignore[attr-defined]  # what Python does to a loop that an exception has left
    deadline = time.monotonic() + 5
    while our_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert our_threads() == []


def test_closing_the_pool_ends_passes_that_were_left_early(target: FrozenTarget) -> None:
    pooled, before = opened(pool(2, threads_per_replica=3), target), torch.get_num_threads()
    readers = [iter(pooled.feed(batches(20))) for _ in range(2)]  # kept, as by a loop that stopped at its last step
    for reader in readers:
        next(reader)
    assert len(our_threads()) >= 3
    pooled.close()
    assert our_threads() == []
    assert torch.get_num_threads() == before
    pooled.close()


def test_a_replica_that_hangs_ends_the_run() -> None:
    released = threading.Event()

    class Hanging(FakeReplica):
        def read(self, batch: Batch, samples: Any = None, width: Any = None) -> tuple[torch.Tensor, float]:
            released.wait(20)
            return super().read(batch, samples, width)

    try:
        with pytest.raises(
            RuntimeError, match=r"Batch 0 .* placement\.hang_timeout_seconds=0\.2: replica 0 on cpu hangs"
        ):
            next(iter(pipeline(batches(3), [Hanging()], hang_timeout_seconds=0.2)))
    finally:
        released.set()


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("auto", "there is no CUDA device for targets"),
        (["gpu"], "'gpu' is no device"),
        (["cuda:7"], "there is no cuda:7 here"),
    ],
)
def test_devices_that_there_are_not_are_named(targets: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"placement\.targets.*{message}"):
        replica_devices(targets, [CPU])


def test_a_drafters_device_is_the_one_that_is_asked_for_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert drafter_device("auto", 1) == drafter_device("gpu", 1) == torch.device("cuda", 1)
    assert drafter_device("cpu", 1) == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert drafter_device("auto", 0) == CPU
    with pytest.raises(ValueError, match=r"trainer\.accelerator=gpu, but torch finds no CUDA device here"):
        drafter_device("gpu", 0)
    with pytest.raises(ValueError, match=r"trainer\.accelerator='mps' is not supported\. Allowed: auto, gpu, cpu"):
        drafter_device("mps", 0)


def test_replicas_of_two_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"placement\.targets=\[cuda:1,cpu\] mixes CPUs and GPUs"):
        replica_devices(["cuda:1", "cpu"], [torch.device("cuda", 0)])


def test_gpus_are_dealt_to_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    cuda = [torch.device("cuda", index) for index in range(8)]

    def dealt(targets: Any, num_ranks: int) -> list[list[int]]:
        placement, of_ranks = PoolPlacement(targets, cost=CostModel(), token_budget=160), []
        for rank in range(num_ranks):
            assert placement.lay_out(cuda[rank], rank, num_ranks) == placement.devices[0]
            of_ranks.append([device.index for device in placement.devices])
        return of_ranks

    assert dealt("auto", 1) == [[1, 2, 3, 4, 5, 6, 7]]
    assert dealt("auto", 2) == [[2, 4, 6], [3, 5, 7]]
    assert dealt("auto", 4) == [[4], [5], [6], [7]]
    assert dealt(["cuda:7", "cuda:5", "cuda:6"], 2) == [[7, 6], [5]]
    with pytest.raises(ValueError, match=r"placement\.targets: cuda:1 is a drafter's own device"):
        dealt(["cuda:1", "cuda:5"], 2)
    with pytest.raises(ValueError, match=r"trainer\.devices=1, but this is process 4 of this machine"):
        PoolPlacement(["cpu"], cost=CostModel(), token_budget=160).lay_out(CPU, 3, 1)
    with pytest.raises(ValueError, match=r"placement\.targets has 3 devices for trainer\.devices=5 ranks"):
        dealt("auto", 5)
    with pytest.raises(ValueError, match=r"of 8 CUDA devices, drafters take 8: none is left .* Lower trainer\.devices"):
        dealt("auto", 8)


def test_replicas_have_threads_of_their_own_and_leave_the_drafters_alone(target: FrozenTarget) -> None:
    seen = []

    class Watching(Replica):
        def read(self, batch: Batch, samples: Any = None, width: Any = None) -> tuple[torch.Tensor, float]:
            seen.append((torch.get_num_threads(), mkl_threads()))
            return super().read(batch, samples, width)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        of_drafter = []
        for _ in pipeline(batches(6), [Watching(target, CPU)], threads_per_replica=3):
            of_drafter.append((torch.get_num_threads(), mkl_threads()))
        after = (torch.get_num_threads(), mkl_threads())
        torch.set_num_threads(before)
        follows = mkl_threads() in (0, before)
    finally:
        torch.set_num_threads(before)
    assert follows
    mkl = (3, 2) if torch.backends.mkl.is_available() else (0, 0)
    assert set(seen) == {(3, mkl[0])}
    assert set(of_drafter) == {after} == {(2, mkl[1])}


@pytest.mark.parametrize(
    ("target_wait", "drafter_wait", "q_pre", "words"),
    [
        (0.0, 0.6, 0.9, "the targets are the bottleneck"),
        (0.2, 0.6, 0.9, "the targets are the bottleneck"),  # one of several has long batches
        (0.7, 0.0, 0.9, "the drafter is the bottleneck"),
        (0.7, 0.0, 0.0, "the drafter is the bottleneck"),  # near the end of a run
        (0.8, 0.7, 0.0, "the loader is the bottleneck"),
        (0.05, 0.05, 0.5, "keep up with each other"),
    ],
)
def test_waits_are_put_in_words(target_wait: float, drafter_wait: float, q_pre: float, words: str) -> None:
    assert words in judge(target_wait, drafter_wait, q_pre)[0]


def mkl_threads() -> int:
    """MKL's own number in the calling thread; 0 without MKL."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    return int(library.MKL_Get_Max_Threads()) if torch.backends.mkl.is_available() else 0


def test_a_mistake_in_the_pool_ends_before_anything_is_loaded_or_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"placement\.targets: there is no cuda:9 here"):
        train_here(tmp_path / "run", tmp_path / "cache", "placement=pool", "placement.targets=[cuda:9]")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("slow", "words"),
    [
        ("dflash.placement.replica.Replica.read", "the targets are the bottleneck"),
        ("dflash.training.lightning_module.DFlashModule.training_step", "the drafter is the bottleneck"),
        ("dflash.data.datamodule.TrainingBatches.__getitem__", "the loader is the bottleneck"),
    ],
)
def test_the_words_name_the_side_that_was_made_slow(
    slow: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    owner, _, name = slow.rpartition(".")
    fast = getattr(resolve_name(owner), name)

    def slowed(*arguments: Any) -> Any:
        time.sleep(0.15)
        return fast(*arguments)

    monkeypatch.setattr(slow, slowed)
    options = ["placement=pool", "placement.targets=[cpu]", "max_steps=15", "trainer.log_every_n_steps=3"]
    small = [
        "validate_untrained=false",
        "callbacks.decoding=null",
        "trainer.validate_every_n_steps=100",
        "batch.token_budget=704",
    ]
    assert train_here(tmp_path / "run", tmp_path / "cache", *options, *small) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("pipeline:")]
    assert any(words in line for line in said)  # a machine that is busy otherwise may say another thing, too
    tags = scalars(tmp_path / "run")
    waits = {side: sum(value for _, value in tags[f"pipeline/{side}_wait"][:3]) for side in ("target", "drafter")}
    if "loader" not in words:
        assert (waits["drafter"] > waits["target"]) == ("targets" in words)
    assert all(0 <= value <= 1 for tag in ("q_pre", "q_hs") for _, value in tags[f"pipeline/{tag}"])


def test_a_run_with_a_pool_is_the_run_inline_to_the_bit_also_resumed(tmp_path: Path) -> None:
    common = ["sampler=packed", "max_steps=8", "callbacks.decoding=null", "trainer.save_every_n_steps=100"]
    pooled = ["placement=pool", "placement.targets=[cpu,cpu]", "placement.queued_batches=2"]
    cache = tmp_path / "cache"
    assert train_here(tmp_path / "inline", cache, *common) == 0
    assert train_here(tmp_path / "pool", cache, *common, *pooled) == 0
    assert train_here(tmp_path / "resumed", cache, *common, *pooled, "stop_after_steps=3") == 0
    assert train_here(tmp_path / "resumed", cache, f"resume_from={tmp_path / 'resumed'}", start_from=[]) == 0
    expected = weights(tmp_path / "inline")
    for other in ("pool", "resumed"):
        assert scalars(tmp_path / other)["train/loss"] == scalars(tmp_path / "inline")["train/loss"]
        got = weights(tmp_path / other)
        assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_run_whose_batches_are_cut_by_length_is_the_run_inline(tmp_path: Path) -> None:
    common = ["sampler=random", "max_steps=6", "callbacks.decoding.every_n_steps=6", "trainer.log_every_n_steps=1",
              "callbacks.decoding.num_prompts=2", "callbacks.decoding.max_new_tokens=8"]  # fmt: skip
    cut = ["placement=pool", "placement.targets=[cpu,cpu,cpu]", "placement.routing=split_by_length"]
    assert train_here(tmp_path / "inline", tmp_path / "cache", *common) == 0
    assert (
        train_here(
            tmp_path / "cut", tmp_path / "cache", *common, *cut, "placement.threads_per_replica=1", "num_workers=1"
        )
        == 0
    )
    expected, got = scalars(tmp_path / "inline"), scalars(tmp_path / "cut")
    for tag in ("train/loss", "grad/norm", "decode/acceptance_length"):
        assert got[tag] == [(step, pytest.approx(value, rel=1e-5)) for step, value in expected[tag]], tag


def weights(run_folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = torch.load(run_folder / "checkpoints" / "last.ckpt", weights_only=False)
    return dict(checkpoint["state_dict"])
