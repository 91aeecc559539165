"""Bad numbers and flags: every other argument of LongFlow and its SnapKV, and input that only the kernels refuse:
what only our own sides promise.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtwin.conformance.cases.bad_input import (
    STATE,
    Call,
    convert_to,
    module_of,
    moved,
    refused,
)
from kvtwin.conformance.harness.impl import Twins
from kvtwin.conformance.suite.longflow.test_longflow_input_values import FLOATING, both_sides

pytestmark = [pytest.mark.kind("bad_input"), pytest.mark.main]

FUNCTIONS = ("decode_attention", "compress_prefill", "window_score", "compress")


@pytest.mark.limits
@pytest.mark.parametrize(("head_dim", "query_heads", "says"), [
    (8, 2, "head_dim must be from 16 to 256, got D = 8"),
    (15, 2, "head_dim must be from 16 to 256, got D = 15"),
    (257, 2, "head_dim must be from 16 to 256, got D = 257"),
    (16, 17, "query heads per KV head must be at most 16, got G = 17 .Hq = 17, Hkv = 1"),
])
@pytest.mark.parametrize("subject", [*FUNCTIONS, "LongFlowState"])
@both_sides
def test_sizes_that_kernels_cannot_take(
    subject: str, head_dim: int, query_heads: int, says: str, side: str, twins: Twins, device: torch.device
) -> None:
    """The reference accepts all sizes."""
    module = module_of(twins, side, subject)
    function = getattr(module, subject)
    key = torch.zeros(1, 1, 4, head_dim, device=device)
    query = torch.zeros(1, query_heads, 2, head_dim, device=device)
    arguments: dict[str, Any] = {
        "decode_attention": {"query": query[:, :, 0], "key": key, "value": key, "occupied": key[:, 0, :, 0] == 0},
        "compress_prefill": {"query_window": query, "key": key, "value": key, "budget": 2},
        "window_score": {"query_window": query, "key": key},
        "compress": {"query_window": query, "key": key, "value": key, "budget": 2},
        "LongFlowState": {
            "batch": 1, "query_heads": query_heads, "key_value_heads": 1, "head_dim": head_dim, "device": device,
            "dtype": torch.float32,
        },
    }[subject]
    if subject == "LongFlowState":
        arguments["config"] = module.LongFlowConfig(4)
    if side == "optimized":
        refused(function, ValueError, says, **arguments)
    else:
        function(**arguments)


@pytest.mark.limits
@pytest.mark.parametrize("subject", [*FUNCTIONS, "decode_per_head"])
@both_sides
def test_float64_is_for_the_reference(subject: str, side: str, twins: Twins, device: torch.device) -> None:
    call = Call(twins, side, subject, device)
    convert_to(torch.float64)(call.arguments)
    if side == "optimized":
        with call.refused(TypeError, r"dtype must be one of .*float32.*float16.*bfloat16, got torch.float64"):
            call()
    else:
        call()


@pytest.mark.limits
@both_sides
def test_a_state_of_float64_is_for_the_reference(side: str, twins: Twins, device: torch.device) -> None:
    longflow = getattr(twins, side).longflow
    arguments = STATE | {"config": longflow.LongFlowConfig(4), "device": device, "dtype": torch.float64}
    if side == "optimized":
        refused(longflow.LongFlowState, TypeError, "dtype must be one of .*, got torch.float64", **arguments)
    else:
        longflow.LongFlowState(**arguments)


@pytest.mark.limits
@pytest.mark.parametrize(("subject", "argument"), FLOATING)
def test_kernels_have_no_backward(subject: str, argument: str, twins: Twins, device: torch.device) -> None:
    """Inputs that require grad are refused, unless gradients are disabled."""
    call = Call(twins, "optimized", subject, device)
    call.arguments[argument].requires_grad_()
    with call.refused(ValueError, rf"^{argument} requires grad.*no_grad"):
        call()
    if argument == "value":  # once per subject
        with torch.no_grad():
            call()


@pytest.mark.limits
def test_kernels_run_on_a_gpu_or_in_the_interpreter(twins: Twins, device: torch.device) -> None:
    """All tensors are on one device, but no kernel can run there."""
    call = Call(twins, "optimized", "decode_attention", device)
    moved(call.arguments)
    with call.refused(ValueError, "query must be on a CUDA device .*got meta"):
        call()
    arguments = STATE | {"config": twins.optimized.longflow.LongFlowConfig(4), "device": "meta"}
    refused(twins.optimized.longflow.LongFlowState, ValueError, "device must be .*CUDA.*got meta", **arguments)
