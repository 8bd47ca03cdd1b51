"""The drafter's own arithmetic against what it replaces: block attention, the loss, the drafter's step.

Each case is forward and backward. Cases of a kind run in turns, a median is over the rounds. Memory is that of tensors
made meanwhile, on top of the inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash.batch import Batch
from dflash.benchmarks.steps import TrainingSteps
from dflash.checks import check_integer
from dflash.drafter.block_attention import BlockAttention, block_attention, choose_backend
from dflash.measuring import peak_tensor_bytes, synchronised_seconds
from dflash.training.lightning_module import DFlashModule
from dflash.training.objective import WeightedHeadCrossEntropy


@dataclass(frozen=True)
class KernelSizes:
    """What the cases are given (config group `kernels`).

    Attributes:
        documents: of equal length: padded to each other they have no padding.
        document_tokens: of each.
        anchors_per_document: random ones.
        attention_block_size: slots of a block in the cases of attention.
        loss_slots: that the LM head reads in the cases of the loss.

    Raises:
        ValueError: a size that is no whole number above 0; more anchors than a document has.
    """

    documents: int = 8
    document_tokens: int = 512
    anchors_per_document: int = 64
    attention_block_size: int = 16
    loss_slots: int = 4096

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            check_integer(f"kernels.{key}", value, 1)
        if self.anchors_per_document >= self.document_tokens:
            raise ValueError(
                f"kernels.anchors_per_document={self.anchors_per_document} must be below kernels.document_tokens="
                f"{self.document_tokens}: the last token has none behind it to predict."
            )

    def shorter(self, times: int) -> "KernelSizes":
        """As many anchors (up to rounding) in so many times as many documents, so many times as short."""
        return replace(
            self,
            documents=self.documents * times,
            document_tokens=max(self.document_tokens // times, 2),
            anchors_per_document=max(self.anchors_per_document // times, 1),
        )


@dataclass(frozen=True)
class KernelCase:
    """Something to run, and the floating-point operations that it has to do, None where they are not counted."""

    run: Callable[[], object]
    flops: float | None = None


@dataclass(frozen=True)
class KernelRow:
    """A line of `kernels.csv`; speed and memory relative to the first case of the same kind, 1 for that case itself."""

    case: str
    seconds: float
    speed_ratio: float
    peak_mib: float
    memory_ratio: float
    share_of_peak: float | None


def kernel_cases(steps: TrainingSteps, sizes: KernelSizes) -> list[dict[str, KernelCase]]:
    """What is measured, by kind: shapes are those of the drafter and of the target's ends."""
    module = steps.module

    def drafter_step(of: KernelSizes) -> KernelCase:
        batch = random_documents(module, of)

        def step() -> None:
            steps.draft_and_differentiate(batch)
            module.drafter.zero_grad()

        return KernelCase(step, steps.drafter_flops(batch))

    cases = [attention_cases(module, sizes, steps.compute_dtype), loss_cases(module, sizes)]
    # What an anchor budget is for: as many anchors in short samples as in long ones.
    return [*cases, {"drafter_step/long": drafter_step(sizes), "drafter_step/short": drafter_step(sizes.shorter(8))}]


def measure_kernels(
    kinds: list[dict[str, KernelCase]],
    device: torch.device,
    *,
    rounds: int,
    matrix_peak: float,
    on_turn: Callable[[str], object],
) -> list[KernelRow]:
    """Run the cases of every kind in turns.

    Args:
        kinds: cases by name; the first of a kind is what the others are compared with.
        device: where they run.
        rounds: over which the median is taken.
        matrix_peak: floating-point operations a second of a plain matrix product.
        on_turn: called with the case's name after each of its turns.
    """
    rows: list[KernelRow] = []
    for cases in kinds:
        peaks = {}
        for name, case in cases.items():
            case.run()  # so that what is made once is there
            peaks[name] = peak_tensor_bytes(case.run, device)
            on_turn(name)
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(rounds):
            for name, case in cases.items():
                begin = synchronised_seconds(device)
                case.run()
                seconds[name].append(synchronised_seconds(device) - begin)
                on_turn(name)
        reference = next(iter(cases))
        for name, case in cases.items():
            taken = median(seconds[name])
            rows.append(
                KernelRow(
                    case=name,
                    seconds=taken,
                    speed_ratio=median(r / s for r, s in zip(seconds[reference], seconds[name], strict=True)),
                    peak_mib=peaks[name] / 2**20,
                    memory_ratio=peaks[name] / peaks[reference],
                    share_of_peak=case.flops / taken / matrix_peak if case.flops else None,
                )
            )
    return rows


def attention_cases(
    module: DFlashModule, sizes: KernelSizes, dtype: torch.dtype, seed: int = 0
) -> dict[str, KernelCase]:
    """The same blocks through every way to attend, mask or groups made anew each time as for every batch.

    Returns:
        By name; each gives the gradients towards queries, keys and values.
    """
    config, device = module.drafter.config, module.ends.head.device
    rows, length, block_size = sizes.documents, sizes.document_tokens, sizes.attention_block_size
    anchors, starts = _anchors(sizes, device, seed)
    heads, key_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    assert width is not None
    assert key_heads is not None
    generator = torch.Generator(device).manual_seed(seed)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    of_blocks = [tensor(len(anchors), block_size, n, width) for n in (heads, key_heads, key_heads)]
    of_context = [tensor(rows * length, key_heads, width) for _ in range(2)]
    upstream = tensor(len(anchors), block_size, heads, width)

    def attend(backend: str, num_rows: int) -> list[Tensor]:
        shape = {"num_rows": num_rows, "row_length": rows * length // num_rows}
        attention: BlockAttention = block_attention(backend, anchors, starts, block_size=block_size, **shape)
        inputs = [t.detach().requires_grad_() for t in (*of_blocks, *of_context)]
        context = [t.view(num_rows, -1, key_heads, width) for t in inputs[3:]]
        return list(torch.autograd.grad(attention(*inputs[:3], *context), inputs, upstream))

    cases = {
        "attention/dense_padded": KernelCase(lambda: attend("dense", rows)),
        "attention/dense_packed": KernelCase(lambda: attend("dense", 1)),
        "attention/grouped": KernelCase(lambda: attend("grouped", 1)),
    }
    if choose_backend("auto", device, dtype, width) == "flex":
        cases["attention/flex"] = KernelCase(lambda: attend("flex", 1))
    return cases


def loss_cases(module: DFlashModule, sizes: KernelSizes, seed: int = 0) -> dict[str, KernelCase]:
    """Weighted cross-entropy behind the LM head: all logits at once, and in chunks.

    Returns:
        By name; each gives the loss and its gradient towards the states.
    """
    ends, chunk_slots = module.ends, module.objective.chunk_slots
    device, (vocab_size, width) = ends.head.device, ends.head.shape
    generator = torch.Generator(device).manual_seed(seed)
    states = torch.randn(sizes.loss_slots, width, generator=generator, device=device).to(ends.head.dtype)
    labels = torch.randint(vocab_size, (sizes.loss_slots,), generator=generator, device=device)
    wide = torch.promote_types(ends.head.dtype, torch.float32)
    weights = torch.rand(sizes.loss_slots, generator=generator, device=device).to(wide)

    def full() -> list[Tensor]:
        inputs = states.detach().requires_grad_()
        loss = (F.cross_entropy(ends.logits(inputs).to(wide), labels, reduction="none") * weights).sum()
        return [loss, *torch.autograd.grad(loss, inputs)]

    def chunked() -> list[Tensor]:
        inputs = states.detach().requires_grad_()
        loss, *_ = WeightedHeadCrossEntropy.apply(inputs, labels, weights, ends, chunk_slots)
        return [loss, *torch.autograd.grad(loss, inputs)]

    return {"loss/full_logits": KernelCase(full), "loss/chunked": KernelCase(chunked)}


def random_documents(module: DFlashModule, sizes: KernelSizes, seed: int = 0) -> Batch:
    """Packed random documents, all of which is to be predicted."""
    ends, drafter = module.ends, module.drafter
    device, (vocab_size, width) = ends.head.device, ends.head.shape
    generator = torch.Generator(device).manual_seed(seed)
    length, total = sizes.document_tokens, sizes.documents * sizes.document_tokens
    anchors, starts = _anchors(sizes, device, seed)
    captured = len(drafter.target_layer_ids) * width
    return Batch(
        input_ids=torch.randint(vocab_size, (1, total), generator=generator, device=device),
        loss_mask=torch.ones(1, total, dtype=torch.bool, device=device),
        lengths=torch.full((sizes.documents,), length, device=device),
        sample_ids=torch.arange(sizes.documents, device=device),
        anchors=anchors,
        anchor_doc=starts // length,
        cu_seqlens=torch.arange(0, total + 1, length, dtype=torch.int32, device=device),
        hidden=torch.randn(1, total, captured, generator=generator, device=device).to(ends.head.dtype),
    )


def _anchors(sizes: KernelSizes, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Positions in their documents and where these begin in a packed row, each [N] int64."""
    generator = torch.Generator().manual_seed(seed)
    count = sizes.anchors_per_document
    # Of all positions but the last one, which has nothing behind it to predict.
    drawn = [torch.randperm(sizes.document_tokens - 1, generator=generator)[:count] for _ in range(sizes.documents)]
    starts = torch.arange(sizes.documents).repeat_interleave(count) * sizes.document_tokens
    return torch.stack(drawn).sort(dim=1).values.flatten().to(device), starts.to(device)
