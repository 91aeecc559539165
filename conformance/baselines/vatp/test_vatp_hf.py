"""VATP inside transformers: with room the stock model, with less a loop by hand over its State."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance.cases.hf_cases import BlockCacheTests

pytestmark = pytest.mark.kind("equivalence")


class TestVATPCache(BlockCacheTests):
    method = "vatp"
    small: ClassVar[dict[str, dict[str, Any]]] = {
        "half of it recent": {"budget": 6, "block_size": 4},
        "none recent": {"budget": 5, "block_size": 3, "recent": 0},
        "budget 1": {"budget": 1, "block_size": 4},
    }
    refused: ClassVar[list[tuple[dict[str, Any], type[Exception], str]]] = [
        ({"budget": 4, "recent": 4}, ValueError, "recent must be less than budget = 4"),
    ]
