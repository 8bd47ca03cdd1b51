"""Products of few rows: the same values in the other layout, and everything else left alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from dflash.decoding.few_rows import TransposedFewRows, fastest_layout


@given(
    leading=st.lists(st.integers(1, 3), max_size=3),
    inputs=st.integers(1, 9),
    outputs=st.integers(1, 9),
    with_bias=st.booleans(),
    max_rows=st.integers(2, 8),
)
@settings(deadline=None)
def test_a_linear_layer_gives_the_same_values_and_shape(
    leading: list[int], inputs: int, outputs: int, with_bias: bool, max_rows: int
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=with_bias).double()
    rows = torch.randn(*leading, inputs, dtype=torch.float64)
    expected = layer(rows)
    with TransposedFewRows(max_rows):
        found = layer(rows)
    torch.testing.assert_close(found, expected)
    assert found.is_contiguous()


@pytest.mark.parametrize(("num_rows", "is_taken"), [(1, False), (2, True), (4, True), (5, False)])
def test_only_two_to_max_rows_are_laid_out_anew(num_rows: int, is_taken: bool) -> None:
    # In float32 the two layouts round differently, which tells which one was used.
    torch.manual_seed(0)
    rows, weight = torch.randn(num_rows, 300), torch.randn(50, 300)
    with TransposedFewRows(4):
        found = F.linear(rows, weight)
    usual, transposed = F.linear(rows, weight), (weight @ rows.T).T
    if num_rows > 1:
        assert not torch.equal(usual, transposed), "else the next line tells nothing"
    assert torch.equal(found, transposed if is_taken else usual)


def test_the_layout_is_chosen_by_measuring_and_is_ready_to_use() -> None:
    head = torch.randn(200, 16)
    layout = fastest_layout(head, 4)
    rows = torch.randn(4, 16)
    for _ in range(2):  # entered again for every prompt
        with layout:
            torch.testing.assert_close(F.linear(rows, head), rows @ head.T)
