"""Bad input to ThinKV's thoughts and eviction: errors have the right type, and say what was expected and passed:
what only our own sides promise.
"""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance.cases.bad_input import refused
from kvtwin.conformance.suite.thinkv.test_thinkv_thoughts_input import FLOATS, good

pytestmark = [
    pytest.mark.kind("bad_input"),
    pytest.mark.parametrize("side", ["reference", "optimized"]),
    pytest.mark.main,
]


@pytest.mark.limits
def test_a_compiled_call_does_not_read_slots_beyond_the_cache(side, twins, device):
    """torch.compile skips the check of slots, but slot 2**40 still does not end the process."""
    if side == "reference":
        return
    arguments = good("segment_representatives", device)
    arguments["slots"][:] = torch.tensor([0, 2**40], device=device)
    torch.compiler.reset()
    keep = torch.compile(twins.optimized.thinkv.segment_representatives, backend="eager", fullgraph=True)(**arguments)
    assert keep.sum(-1).tolist() == arguments["keep"].tolist()


@pytest.mark.limits
@pytest.mark.parametrize("function", FLOATS)
def test_what_kernels_cannot_take(function, side, twins, device):
    """Inputs that require grad, float64, and too large heads and segments. The reference accepts all of them."""
    call = getattr(getattr(twins, side).thinkv, function)
    for name in FLOATS[function]:
        arguments = good(function, device)
        arguments[name].requires_grad_()
        double = {
            other: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for other, value in good(function, device).items()
        }
        if side == "reference":
            call(**arguments)
            call(**double)
            continue
        refused(call, ValueError, rf"\b{name}\b.*grad.*no_grad", **arguments)
        with torch.no_grad():
            call(**arguments)
        refused(call, TypeError, r"dtype.*torch\.float64", **double)


@pytest.mark.limits
def test_sizes_beyond_the_kernels(side, twins, device):
    module = getattr(twins, side).thinkv
    key = torch.ones(1, 1, 3, 512, device=device)
    occupied = torch.ones(1, 3, dtype=torch.bool, device=device)
    wide = {"query": key[:, :, 0], "key": key, "occupied": occupied}
    long = {"key_segment": torch.ones(1, 129, 16, device=device), "keep": 128}
    slots = {
        "key": torch.ones(1, 1, 3, 16, device=device), "slots": torch.full((1, 1, 129), -1, device=device),
        "keep": torch.ones(1, 1, dtype=torch.int64, device=device),
    }
    if side == "reference":
        assert module.attention_sparsity(**wide).tolist() == [0.0]
        assert len(module.select_representatives(**long).indices) == 128
        assert not bool(module.segment_representatives(**slots).any())
        return
    refused(module.attention_sparsity, ValueError, "head_dim must be from 16 to 256, got D = 512", **wide)
    refused(module.select_representatives, ValueError, "key_segment must have at most 128 tokens.*129", **long)
    refused(module.segment_representatives, ValueError, "slots must have at most 128 tokens.*129", **slots)
