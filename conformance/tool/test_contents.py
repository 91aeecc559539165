"""Contents of cases that are made to have scales at the ends of ranges, or weights that float16 rounds up."""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance.cases import contents
from kvtwin.reference.baselines import kivi


def filled(content: str, dtype: torch.dtype, heads: int, scale: float = 0.125) -> contents.Tokens:
    return contents.fill(
        content, torch.Generator().manual_seed(1), batch=1, key_value_heads=heads, group=2, queries=32, slots=32,
        head_dim=64, dtype=dtype, scale=scale,
    )


@pytest.mark.parametrize("bits", [2, 4])
def test_steps_of_some_bits_are_two_to_the_11(bits):
    """In three heads of keys and in three of values; the last head has tiny values without steps."""
    given = filled(f"steps_of_{bits}_bits", torch.bfloat16, 8)
    keys = kivi.quantize(given.key, bits=bits, axis=-2, group=32).scale
    values = kivi.quantize(given.value, bits=bits, axis=-1, group=32).scale
    assert [bool((keys[0, head] == 2.0**11).any()) for head in range(8)] == [head in (2, 4, 6) for head in range(8)]
    assert [bool((values[0, head] == 2.0**11).any()) for head in range(8)] == [head in (1, 3, 5) for head in range(8)]
    tiny = given.value[0, 7].double().abs()
    assert not bool(values[0, 7].any()) and float(tiny.min()) > 2.0**-117 and float(tiny.max()) < 2.0**-116
    logit = (given.query[:, ::2] @ given.key.mT).double() * 0.125
    assert float(logit.abs().max()) < 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_outliers_are_in_two_of_three_heads(dtype):
    given = filled("outliers", dtype, 3)
    for tensor, holds in ((given.key, [0, 1, 0]), (given.value, [0, 0, 1])):
        assert (tensor.abs() == 2.0**15).sum((0, 2, 3)).tolist() == holds
    logit = (given.query.double()[:, ::2] @ given.key.double().mT) * 0.125
    assert float(logit.abs().max()) < 20


@pytest.mark.parametrize("scale", [1.0, 0.125, 0.088])
def test_weights_of_the_largest_values_are_rounded_up(scale):
    query, key, value = filled("largest_values", torch.float16, 1, scale)
    weight = (query.double()[:, ::2] @ key.double().mT * scale)[0, 0, 0].exp()
    mean = (weight.half().double() @ value.double()[0, 0]) / weight.sum()
    assert weight[0] == 1 and bool((mean.half() == torch.inf).all())
