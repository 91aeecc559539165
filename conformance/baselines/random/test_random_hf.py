"""Random eviction inside transformers: with room the stock model, with less a loop by hand over its State."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance.cases.hf_cases import BlockCacheTests

pytestmark = pytest.mark.kind("equivalence")


class TestRandomCache(BlockCacheTests):
    method = "random"
    small: ClassVar[dict[str, dict[str, Any]]] = {
        "small": {"budget": 6, "block_size": 4},
        "another seed": {"budget": 5, "block_size": 3, "seed": 7},
        "budget 1": {"budget": 1, "block_size": 4},
    }
    refused: ClassVar[list[tuple[dict[str, Any], type[Exception], str]]] = [
        ({"budget": 4, "seed": 2**32}, ValueError, "seed must be at most"),
    ]
