"""PM-KVQ's codes: quantizing against exact arithmetic, shrinking of every code, both sides bit for bit, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.kind("equivalence")

both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])


X = torch.zeros(1, 1, 2, 16)
CODES, SCALE = torch.zeros(1, 1, 2, 16, dtype=torch.int32), torch.ones(1, 1, 2, 2)


@pytest.mark.kind("bad_input")
@both_sides
@pytest.mark.parametrize(("function", "change", "error", "says"), [
    ("quantize", {"bits": 3}, ValueError, "bits must be one of 16, 8, 4, 2, got 3"),
    ("quantize", {"bits": 2.0}, TypeError, "bits must be an int, got float"),
    ("quantize", {"group": 6}, ValueError, "group must be a power of two, got 6"),
    ("quantize", {"group": 1}, ValueError, "group must be at least 2, got 1"),
    ("quantize", {"x": X[..., :12]}, ValueError, "x's D must be a multiple of group = 8 or less, got 12"),
    ("quantize", {"x": X[..., :7]}, ValueError, "x's D must be even, got 7"),
    ("quantize", {"x": X[0]}, ValueError, r"x must be \[B, H, T, D\], got a tensor of 3 dimensions"),
    ("quantize", {"x": X.int()}, TypeError, "x.dtype must be one of"),
    ("quantize", {"least_scale": -1.0}, ValueError, "least_scale must be finite and at least 0, got -1.0"),
    ("quantize", {"dtype": torch.int8}, TypeError, "dtype must be one of"),
    ("shrink", {"bits": 2}, ValueError, "bits must be one of 16, 8, 4, got 2"),
    ("shrink", {"codes": CODES.float()}, TypeError, "codes must have dtype torch.int32, got torch.float32"),
    ("shrink", {"scale": SCALE[:, :, :1]}, ValueError, r"scale must be \[B, H, T, D / group\] for codes of"),
    ("shrink", {"scale": torch.ones(1, 1, 2, 3)}, ValueError, r"scale must be \[B, H, T, D / group\] for codes of"),
    ("dequantize", {"minimum": SCALE[..., :1]}, ValueError, r"minimum must be .*= \(1, 1, 2, 2\), got \(1, 1, 2, 1\)"),
    ("dequantize", {"dtype": torch.int8}, TypeError, "dtype must be one of"),
], ids=str)
def test_wrong_arguments(function, change, error, says, side, twins, device):
    good: dict[str, Any] = {
        "quantize": {"x": X, "bits": 4, "group": 8}, "shrink": {"codes": CODES, "scale": SCALE, "bits": 16},
        "dequantize": {"codes": CODES, "scale": SCALE, "minimum": SCALE},
    }[function]
    given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in (good | change).items()}
    with pytest.raises(error, match=f"^{says}"):
        getattr(getattr(twins, side).baselines.pm_kvq, function)(**given)
