"""PM-KVQ's state: when tokens are quantized and codes shrink, what a step attends to, padding, memory, wrong sizes."""

from __future__ import annotations

from typing import Any

import pytest

from kvtwin.conformance.suite.quantized_states import Kit

pytestmark = pytest.mark.kind("equivalence")

#: 16, 8, 4 and 2 bits from token 1, 8, 12 and 20 on.
SMALL: dict[str, Any] = {"bits": 5, "window": 4, "sinks": 1, "group": 8, "max_tokens": 24}
KIT = Kit("pm_kvq", SMALL)
new_state, tokens = KIT.state, KIT.tokens
both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])


# Refused -------------------------------------------------------------------------------------------------------------


@pytest.mark.kind("bad_input")
@both_sides
@pytest.mark.parametrize(("options", "head_dim", "says"), [
    ({"group": 32}, 48, "head_dim must be a multiple of group = 32 or less, got 48"),
    ({}, 17, "head_dim must be even, got 17"),
], ids=str)
def test_head_dims_that_do_not_fit_are_refused_by_name(options, head_dim, says, side, twins, device):
    with pytest.raises(ValueError, match=f"^{says}"):
        new_state(getattr(twins, side), device, head_dim=head_dim, **options)


@pytest.mark.kind("bad_input")
@pytest.mark.parametrize(("options", "error", "says"), [
    ({"bits": 0}, ValueError, "bits must be finite and more than 0, got 0"),
    ({"bits": float("inf")}, ValueError, "bits must be finite and more than 0, got inf"),
    ({"bits": "4"}, TypeError, "bits must be a float, got str"),
    ({"bits": 3}, ValueError, "bits = 3 is too small for max_tokens = 24: in codes of 2 bits, 11 tokens fit, 1 sinks"),
    ({"window": 0}, ValueError, "window must be at least 1, got 0"),
    ({"sinks": -1}, ValueError, "sinks must be at least 0, got -1"),
    ({"group": 24}, ValueError, "group must be a power of two, got 24"),
    ({"group": 1}, ValueError, "group must be at least 2, got 1"),
    ({"least_scale": float("nan")}, ValueError, "least_scale must be finite and at least 0, got nan"),
    ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0"),
    ({"scale": "1"}, TypeError, "scale must be a float or None, got str"),
], ids=str)
def test_wrong_configs(options, error, says, twins):
    with pytest.raises(error, match=f"^{says}"):
        twins.reference.baselines.pm_kvq.PMKVQConfig(**{**SMALL, **options})
