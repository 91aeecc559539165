"""KIVI's state: when keys and values are quantized, what a step attends to, padding, memory, and refused sizes."""

from __future__ import annotations

from typing import Any

import pytest

from kvtwin.conformance.suite.quantized_states import Kit

pytestmark = pytest.mark.kind("equivalence")

SMALL: dict[str, Any] = {"key_bits": 4, "value_bits": 4, "group": 4, "residual": 4, "max_tokens": 24}
KIT = Kit("kivi", SMALL)
new_state, tokens = KIT.state, KIT.tokens
both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])


# Refused -------------------------------------------------------------------------------------------------------------


@pytest.mark.kind("bad_input")
@both_sides
@pytest.mark.parametrize(("options", "head_dim", "says"), [
    ({"group": 32, "residual": 32}, 48, "head_dim must be a multiple of group = 32, got 48"),
    ({"value_bits": 2}, 24, "head_dim must be a multiple of 32 / value_bits = 16, got 24"),
    ({"value_bits": 4}, 20, "head_dim must be a multiple of 32 / value_bits = 8, got 20"),
], ids=str)
def test_head_dims_that_do_not_fit_are_refused_by_name(options, head_dim, says, side, twins, device):
    with pytest.raises(ValueError, match=f"^{says}"):
        new_state(getattr(twins, side), device, head_dim=head_dim, **options)


@pytest.mark.kind("bad_input")
@pytest.mark.parametrize(("options", "error", "says"), [
    ({"key_bits": 8}, ValueError, "key_bits must be 2 or 4, got 8"),
    ({"value_bits": 1}, ValueError, "value_bits must be 2 or 4, got 1"),
    ({"value_bits": "2"}, TypeError, "value_bits must be an int, got str"),
    ({"group": 24}, ValueError, "group must be a power of two, got 24"),
    ({"group": 8}, ValueError, "residual must be a multiple of group = 8, got 4"),
    ({"residual": 0}, ValueError, "residual must be at least 1, got 0"),
    ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0"),
    ({"scale": "1"}, TypeError, "scale must be a float or None, got str"),
], ids=str)
def test_wrong_configs(options, error, says, twins):
    with pytest.raises(error, match=f"^{says}"):
        twins.reference.baselines.kivi.KIVIConfig(**{**SMALL, **options})
