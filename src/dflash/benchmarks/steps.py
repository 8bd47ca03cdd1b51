"""Training steps under several samplers, measured side by side: what padding costs the target, the drafter, the whole.

Rounds are interleaved: each visits every sampler once, in a rotating order, so that a machine that slows down slows all
of them. A round takes other batches of a sampler's plan than the rounds before, spread over the plan's lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np
import torch

from dflash.batch import Batch
from dflash.data.collate import collate
from dflash.data.tokens import TokenDataset
from dflash.flops import DrafterShape, TargetShape
from dflash.measuring import peak_tensor_bytes, synchronised_seconds
from dflash.samplers.base import Plan
from dflash.samplers.limits import BatchLimits
from dflash.target.frozen import FrozenTarget
from dflash.target.layers import decoder_layers
from dflash.training.lightning_module import DFlashModule
from dflash.training.objective import block_labels

Layout = Literal["padded", "packed", "equal_lengths"]  # the last: see `with_equal_lengths`

PARTS = ("target", "drafter", "step")
REFERENCE = "sorted"


@dataclass
class Work:
    """What was done, and how long it took."""

    real_tokens: int = 0
    seconds: float = 0.0
    flops: float = 0.0  # padding not counted

    def add(self, real_tokens: int, seconds: float, flops: float) -> None:
        """One batch more."""
        self.real_tokens += real_tokens
        self.seconds += seconds
        self.flops += flops

    @property
    def rate(self) -> float:
        """Real tokens a second."""
        return self.real_tokens / self.seconds

    @property
    def speed(self) -> float:
        """Useful floating-point operations a second."""
        return self.flops / self.seconds


@dataclass(frozen=True)
class BenchRow:
    """A line of `bench.csv`; None where something can not be told.

    Attributes:
        case: part/sampler.
        real_tokens_per_s: of the batches that were measured.
        ratio_to_sorted: how fast an epoch goes, see `ratio_of`.
        peak_mib: of tensors that the part makes, in the plan's most expensive batch.
        share_of_peak: useful operations a second over what a plain matrix product does.
    """

    case: str
    real_tokens_per_s: float
    ratio_to_sorted: float | None
    peak_mib: float
    share_of_peak: float


class TrainingSteps:
    """A whole training step on one device, in its two parts.

    Args:
        target: frozen.
        module: holds drafter, objective and the target's ends.
        dataset: the samples.
        limits: what a batch holds.
        compute_dtype: of the drafter: bfloat16 is autocast, its parameters stay float32.
        seed: of the anchors.
    """

    def __init__(
        self,
        target: FrozenTarget,
        module: DFlashModule,
        dataset: TokenDataset,
        limits: BatchLimits,
        compute_dtype: torch.dtype,
        seed: int,
    ) -> None:
        self.target = target
        self.module = module
        self.dataset = dataset
        self.limits = limits
        self.compute_dtype = compute_dtype
        self.seed = seed
        self.optimizer = module.configure_optimizers()["optimizer"]
        self.target_shape, self.drafter_shape = target_shape(target), drafter_shape(module)

    def collate(self, sample_ids: np.ndarray, layout: Layout) -> Batch:
        """The samples as a batch on the target's device."""
        packed = layout != "padded"
        batch = collate(self.dataset, sample_ids, self.limits, packed=packed, seed=self.seed, epoch=0)
        if layout == "equal_lengths":
            batch = with_equal_lengths(batch)
        return batch.to(self.target.device)

    def read(self, batch: Batch) -> None:
        """The target's part: hidden states."""
        batch.hidden = self.target.hidden_states(batch.input_ids, batch.cu_seqlens)

    def train(self, batch: Batch) -> None:
        """The drafter's part: forward, loss, backward, optimizer; nothing where the batch has no anchor."""
        if not len(batch.anchors):
            return
        self.draft_and_differentiate(batch)
        torch.nn.utils.clip_grad_norm_(self.module.drafter.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def draft_and_differentiate(self, batch: Batch) -> None:
        """Forward, loss, backward."""
        is_bf16 = self.compute_dtype == torch.bfloat16
        with torch.autocast(self.target.device.type, dtype=torch.bfloat16, enabled=is_bf16):
            outcome = self.module.draft(batch)
        (outcome.loss_sum / outcome.weights.sum()).backward()

    def measure(self, sample_ids: np.ndarray, work: dict[str, Work], layout: Layout = "padded") -> None:
        """One step on these samples, added to the `work` of every part."""
        device = self.target.device
        begin = synchronised_seconds(device)
        batch = self.collate(sample_ids, layout)
        collated = synchronised_seconds(device)
        self.read(batch)
        read = synchronised_seconds(device)
        self.train(batch)
        end = synchronised_seconds(device)
        tokens = batch.num_real_tokens
        target_flops, drafter_flops = self.target_shape.flops(batch.lengths.tolist()), self.drafter_flops(batch)
        work["target"].add(tokens, read - collated, target_flops)
        work["drafter"].add(tokens, end - read, drafter_flops)
        work["step"].add(tokens, end - begin, target_flops + drafter_flops)

    def peak_bytes(self, sample_ids: np.ndarray, layout: Layout) -> dict[str, int]:
        """Memory of the tensors that each part makes, at its peak."""
        device, batch = self.target.device, self.collate(sample_ids, layout)
        self.read(batch)
        self.train(batch)  # the first step makes the optimizer's state, which stays
        batch.hidden = None
        peaks = {"target": peak_tensor_bytes(lambda: self.read(batch), device)}
        peaks["drafter"] = peak_tensor_bytes(lambda: self.train(batch), device)
        batch.hidden = None

        def step() -> None:
            self.read(batch)
            self.train(batch)

        peaks["step"] = peak_tensor_bytes(step, device)
        return peaks

    def drafter_flops(self, batch: Batch) -> float:
        """Of the drafter's part on this batch, padding not counted."""
        block_size = self.module.drafter.block_size
        slots = len(batch.anchors) * block_size
        supervised = block_labels(batch, batch.anchors, batch.anchor_doc, block_size)[1]
        return self.drafter_shape.flops(
            slots=slots,
            supervised_slots=int(supervised.sum()),
            context_tokens=batch.num_real_tokens,
            visible_pairs=block_size * int(batch.anchors.sum()) + slots * block_size,
        )


def with_equal_lengths(batch: Batch) -> Batch:
    """A packed batch's tokens cut into as many samples of one length, its anchors where they were.

    What the same work costs where nothing can be padded, in the plainest layout. Less than a token a sample is lost.
    """
    num_samples = len(batch.lengths)
    length = batch.num_real_tokens // num_samples
    total = num_samples * length
    places = batch.starts[batch.anchor_doc] + batch.anchors
    places = places[places < total]
    return Batch(
        input_ids=batch.input_ids[0, :total].view(num_samples, length),
        loss_mask=batch.loss_mask[0, :total].view(num_samples, length),
        lengths=torch.full_like(batch.lengths, length),
        sample_ids=batch.sample_ids,
        anchors=places % length,
        anchor_doc=places // length,
        epoch=batch.epoch,
    )


def bench_cases(plans: dict[str, Plan]) -> dict[str, tuple[Plan, Layout]]:
    """What is measured: every plan; beside a packed one the same work with samples of equal length."""
    cases: dict[str, tuple[Plan, Layout]] = {n: (p, "packed" if p.packed else "padded") for n, p in plans.items()}
    return cases | {f"{name}_equal": (plan, "equal_lengths") for name, plan in plans.items() if plan.packed}


def measure_samplers(
    steps: TrainingSteps,
    cases: dict[str, tuple[Plan, Layout]],
    *,
    rounds: int,
    batches_per_round: int,
    matrix_peak: float,
    on_turn: Callable[[str], object],
) -> list[BenchRow]:
    """Run steps of every case in turns.

    Args:
        steps: what is measured.
        cases: by name.
        rounds: over which the median is taken.
        batches_per_round: of each case.
        matrix_peak: floating-point operations a second of a plain matrix product.
        on_turn: called with the case's name after each of its turns.

    Returns:
        A row for every part and case.
    """
    chosen = {
        case: spread_batches(steps.limits, steps.dataset, plan, rounds, batches_per_round)
        for case, (plan, _) in cases.items()
    }
    peaks = {}
    for case, (plan, layout) in cases.items():
        # The most expensive batch: plans of epoch 0 begin with it, see BatchLimits.probe_first.
        peaks[case] = steps.peak_bytes(plan.batch(0, 0, 0), layout)
        on_turn(case)
    work = {case: [{part: Work() for part in PARTS} for _ in range(rounds)] for case in cases}
    names = list(cases)
    for turn in range(rounds):
        for case in names[turn % len(names) :] + names[: turn % len(names)]:
            plan, layout = cases[case]
            for number in chosen[case][turn]:
                steps.measure(plan.batch(number, 0, 0), work[case][turn], layout)
            on_turn(case)
    rows = []
    for part in PARTS:
        for case in cases:
            of_rounds = [of_round[part] for of_round in work[case]]
            reference = [of_round[part] for of_round in work[REFERENCE]] if REFERENCE in work else None
            rows.append(
                BenchRow(
                    case=f"{part}/{case}",
                    real_tokens_per_s=median(w.rate for w in of_rounds),
                    ratio_to_sorted=ratio_of(of_rounds, reference),
                    peak_mib=peaks[case][part] / 2**20,
                    share_of_peak=median(w.speed for w in of_rounds) / matrix_peak,
                )
            )
    return rows


def ratio_of(rounds: Sequence[Work], reference: Sequence[Work] | None) -> float | None:
    """Median over the rounds of the speed against the reference's in the same round.

    Speed is useful operations a second. Over an epoch that compares as real tokens a second do, since all samplers
    read the same samples then; the few batches of a round can differ in how many anchors their tokens bring.
    """
    if reference is None:
        return None
    return median(w.speed / r.speed for w, r in zip(rounds, reference, strict=True))


def spread_batches(
    limits: BatchLimits, dataset: TokenDataset, plan: Plan, rounds: int, batches_per_round: int
) -> list[list[int]]:
    """Numbers of the batches that each round measures, no two rounds the same ones while there are enough.

    The plan's batches are sorted by their padded length and cut into `batches_per_round` strata; a round takes one of
    each, so that it sees short and long batches in the plan's own proportions.
    """
    lengths = limits.padded_lengths(limits.planned_lengths(dataset.lengths))
    longest = np.maximum.reduceat(lengths[plan.indices], plan.offsets[:-1])
    strata = np.array_split(np.argsort(longest, kind="stable"), batches_per_round)
    if not len(strata[-1]):
        raise ValueError(
            f"batches_per_round={batches_per_round} is more than the {plan.num_batches} batches of a plan. Lower it, "
            "or raise data.max_samples."
        )
    rng = np.random.default_rng(0)
    shuffled = [rng.permutation(stratum) for stratum in strata]
    return [[int(stratum[turn % len(stratum)]) for stratum in shuffled] for turn in range(rounds)]


def target_shape(target: FrozenTarget) -> TargetShape:
    """Of the layers that run: those up to the last captured one."""
    num_layers = max(target.layer_ids) + 1
    config = target.model.config.get_text_config()
    layers = list(decoder_layers(target.model))[:num_layers]
    return TargetShape(
        layer_parameters=sum(p.numel() for layer in layers for p in layer.parameters() if p.ndim == 2),
        num_layers=num_layers,
        num_heads=config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )


def drafter_shape(module: DFlashModule) -> DrafterShape:
    """Of the module's drafter."""
    drafter, config = module.drafter, module.drafter.config
    matrices = {name: p.numel() for name, p in drafter.named_parameters() if p.ndim == 2}
    return DrafterShape(
        layer_parameters=sum(size for name, size in matrices.items() if name.startswith("layers.")),
        fc_parameters=matrices["fc.weight"],
        key_value_parameters=sum(
            s for name, s in matrices.items() if name.endswith(("k_proj.weight", "v_proj.weight"))
        ),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
    )
