"""KeyDiff inside transformers: with room the stock model, with less a loop by hand over its State."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance.cases.hf_cases import BlockCacheTests

pytestmark = pytest.mark.kind("equivalence")


class TestKeyDiffCache(BlockCacheTests):
    method = "keydiff"
    small: ClassVar[dict[str, dict[str, Any]]] = {
        "small": {"budget": 6, "block_size": 4},
        "recent": {"budget": 5, "block_size": 3, "recent": 2},
        "ablation": {"budget": 6, "block_size": 4, "anchor": "median", "similarity": "euclidean"},
    }
    refused: ClassVar[list[tuple[dict[str, Any], type[Exception], str]]] = [
        ({"budget": 4, "recent": 5}, ValueError, "recent must be"),
        ({"budget": 4, "anchor": "mode"}, ValueError, "anchor must be"),
        ({"budget": 4, "similarity": "angle"}, ValueError, "similarity must be"),
    ]
