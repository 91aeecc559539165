"""SnapKV inside transformers: with room the stock model, with less a loop by hand over its State."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance.cases.hf_cases import BlockCacheTests

pytestmark = pytest.mark.kind("equivalence")


class TestSnapKVCache(BlockCacheTests):
    method = "snapkv"
    small: ClassVar[dict[str, dict[str, Any]]] = {
        "small": {"budget": 6, "block_size": 4, "window": 3},
        "a window beyond the budget": {"budget": 5, "block_size": 3, "window": 9, "kernel_size": 1},
        "a window of one": {"budget": 4, "block_size": 5, "window": 1, "kernel_size": 7},
        "once in four tokens": {"budget": 4, "block_size": 3, "window": 2, "kernel_size": 3, "interval": 4},
    }
    refused: ClassVar[list[tuple[dict[str, Any], type[Exception], str]]] = [
        ({"budget": 4, "window": 0}, ValueError, "window must be at least 1"),
        ({"budget": 4, "kernel_size": 2}, ValueError, "kernel_size must be odd"),
        ({"budget": 4, "interval": 0}, ValueError, "interval must be at least 1"),
    ]
