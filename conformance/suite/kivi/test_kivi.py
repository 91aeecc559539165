"""KIVI's quantization: codes against exact arithmetic, the bound of the error, both sides bit for bit, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.kind("equivalence")

both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])


X = torch.zeros(1, 1, 8, 16)
GOOD: dict[str, Any] = {"x": X, "bits": 4, "axis": -2, "group": 4}


@pytest.mark.kind("bad_input")
@both_sides
@pytest.mark.parametrize(("change", "error", "says"), [
    ({"bits": 3}, ValueError, "bits must be 2 or 4, got 3"),
    ({"bits": 2.0}, TypeError, "bits must be an int, got float"),
    ({"axis": 1}, ValueError, "axis must be -2 .* or -1 .*, got 1"),
    ({"group": 6}, ValueError, "group must be a power of two, got 6"),
    ({"group": 0}, ValueError, "group must be at least 1, got 0"),
    ({"group": 16}, ValueError, "x's T must be a multiple of group = 16, got 8"),
    ({"axis": -1, "group": 32}, ValueError, "x's D must be a multiple of group = 32, got 16"),
    ({"axis": -1, "x": X[..., :12]}, ValueError, "x's D must be a multiple of 32 / bits = 8, got 12"),
    ({"x": X[0]}, ValueError, r"x must be \[B, H, T, D\], got a tensor of 3 dimensions"),
    ({"x": X.int()}, TypeError, "x.dtype must be one of"),
    ({"dtype": torch.int8}, TypeError, "dtype must be one of"),
], ids=str)
def test_wrong_arguments_of_quantize(change, error, says, side, twins, device):
    given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in (GOOD | change).items()}
    with pytest.raises(error, match=f"^{says}"):
        getattr(twins, side).baselines.kivi.quantize(**given)


@pytest.mark.kind("bad_input")
@both_sides
@pytest.mark.parametrize(("change", "error", "says"), [
    ({"codes": torch.zeros(1, 1, 2, 16)}, TypeError, "codes must have dtype torch.int32, got torch.float32"),
    ({"codes": torch.zeros(1, 1, 3, 16, dtype=torch.int32)}, ValueError, r"codes must be .*= \(1, 1, 2, 16\), got"),
    ({"minimum": torch.zeros(1, 1, 1, 16)}, ValueError, r"minimum must be .*= \(1, 1, 2, 16\), got \(1, 1, 1, 16\)"),
    ({"minimum": torch.zeros(1, 1, 2, 16).half()}, TypeError, "minimum must have scale's dtype"),
    ({"bits": 8}, ValueError, "bits must be 2 or 4, got 8"),
    ({"group": 5}, ValueError, "group must be a power of two, got 5"),
], ids=str)
def test_wrong_arguments_of_dequantize(change, error, says, side, twins, device):
    given = {**twins.reference.baselines.kivi.quantize(**GOOD)._asdict(), "bits": 4, "axis": -2, "group": 4, **change}
    given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    with pytest.raises(error, match=f"^{says}"):
        getattr(twins, side).baselines.kivi.dequantize(**given)
