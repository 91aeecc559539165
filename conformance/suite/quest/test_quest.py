"""Quest's functions: bounds of pages, their scores and the selection, against plain Python and float64; bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.kind("equivalence")

both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])


def quest_of(twins: Any, side: str) -> Any:
    return getattr(twins, side).baselines.quest


KEY, BOUND = torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 3, 16)
GOOD: dict[str, dict[str, Any]] = {
    "page_bounds": {"key": KEY, "page_size": 4},
    "page_scores": {"query": torch.zeros(1, 4, 16), "maximum": BOUND, "minimum": BOUND},
    "select_pages": {"score": torch.zeros(1, 4, 3), "count": torch.tensor([2]), "k": 2},
}


@pytest.mark.kind("bad_input")
@both_sides
@pytest.mark.parametrize(("function", "change", "error", "says"), [
    ("page_bounds", {"key": KEY[0]}, ValueError, r"key must be \[B, Hkv, T, D\], got a tensor of 3 dimensions"),
    ("page_bounds", {"key": KEY.int()}, TypeError, "key.dtype must be one of"),
    ("page_bounds", {"page_size": 0}, ValueError, "page_size must be at least 1, got 0"),
    ("page_bounds", {"page_size": 2.0}, TypeError, "page_size must be an int, got float"),
    ("page_scores", {"query": torch.zeros(1, 3, 16)}, ValueError, "query's Hq must be a multiple of Hkv = 2, got 3"),
    ("page_scores", {"query": torch.zeros(1, 4, 8)}, ValueError, r"query must be .*= \(1, 4, 16\), got \(1, 4, 8\)"),
    ("page_scores", {"minimum": BOUND[:, :, :2]}, ValueError, r"minimum must be .*= \(1, 2, 3, 16\), got"),
    ("page_scores", {"minimum": BOUND.half()}, TypeError, "minimum must have maximum's dtype"),
    ("page_scores", {"query": torch.zeros(1, 4, 16).half()}, TypeError, "query must have maximum's dtype"),
    ("select_pages", {"count": torch.tensor([2, 2])}, ValueError, r"count must be \[B\] = \(1,\), got \(2,\)"),
    ("select_pages", {"count": torch.tensor([2.0])}, TypeError, "count.dtype must be one of"),
    ("select_pages", {"k": 0}, ValueError, "k must be at least 1, got 0"),
    ("select_pages", {"k": 2**40}, ValueError, r"batch \* query_heads \* k must be less than \d+, got 1 \* 4 \* 1099"),
    ("select_pages", {"keep_last": 1}, TypeError, "keep_last must be a bool, got int"),
], ids=str)
def test_wrong_arguments(function, change, error, says, side, twins, device):
    given_ = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in (GOOD[function] | change).items()
    }
    with pytest.raises(error, match=f"^{says}"):
        getattr(quest_of(twins, side), function)(**given_)
