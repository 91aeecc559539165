"""StreamingLLM with `inv_freq`: queries and keys are rotated by their places in the cache."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.kind("equivalence")

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))


@pytest.mark.kind("bad_input")
@SIDES
def test_more_frequencies_than_pairs_are_refused(side, twins, device):
    module = getattr(twins, side).baselines.streaming_llm
    with pytest.raises(ValueError, match=r"at most head_dim / 2 = 8 frequencies, got 9"):
        module.StreamingLLMState(
            module.StreamingLLMConfig(4, sinks=1, inv_freq=(1.0,) * 9), batch=1, query_heads=1, key_value_heads=1,
            head_dim=16, dtype=torch.float32, device=device,
        )
