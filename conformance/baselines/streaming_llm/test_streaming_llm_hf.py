"""StreamingLLM inside transformers: with room the stock model, with less a loop by hand over its State."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance.cases.hf_cases import BlockCacheTests

pytestmark = pytest.mark.kind("equivalence")


class TestStreamingLLMCache(BlockCacheTests):
    method = "streaming_llm"
    small: ClassVar[dict[str, dict[str, Any]]] = {
        "a sink": {"budget": 6, "block_size": 4, "sinks": 1},
        "sinks": {"budget": 5, "block_size": 3, "sinks": 4},
        "no sinks": {"budget": 4, "block_size": 7, "sinks": 0},
    }
    refused: ClassVar[list[tuple[dict[str, Any], type[Exception], str]]] = [
        ({"budget": 4, "sinks": 4}, ValueError, "sinks must be less than budget = 4"),
    ]
