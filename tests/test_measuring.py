"""Peak memory, against sizes that can be told beforehand."""

import torch

from dflash.measuring import peak_tensor_bytes

MIB = 2**20
CPU = torch.device("cpu")


def tensor(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8)


def test_the_peak_is_what_is_held_at_one_time_and_not_the_sum() -> None:
    def one_after_the_other() -> None:
        first = tensor(8)
        del first
        second, third = tensor(3), tensor(4)
        del second, third
        tensor(5)

    assert 8 * MIB <= peak_tensor_bytes(one_after_the_other, CPU) < 9 * MIB


def test_what_was_there_before_does_not_count() -> None:
    before = tensor(20)
    assert 2 * MIB <= peak_tensor_bytes(lambda: tensor(2), CPU) < 3 * MIB
    assert before.numel() == 20 * MIB


def test_gradients_and_saved_tensors_count() -> None:
    weight = torch.ones(MIB // 4, requires_grad=True)  # 1 MiB

    def backward() -> None:
        (weight.exp() * 2).sum().backward()

    # The result of exp, the product, and on the way back a gradient or two of the same size.
    assert 2 * MIB <= peak_tensor_bytes(backward, CPU) <= 5 * MIB
