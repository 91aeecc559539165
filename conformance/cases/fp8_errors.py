"""Wrong FP8 keys, values and scales, and what every function says about them. The case has E4M3 numbers."""

from __future__ import annotations

from typing import Any

import torch

FN, FNUZ, E5 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2
HALF: dict[str, Any] = {"key": lambda x: x.float(), "value": lambda x: x.float()}
#: By name: the arguments that change, which are values or functions of the argument; the error; and its message. With
#: two KV heads in two rows, and scales of heads.
BAD_CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "fnuz": (
        {"key": lambda x: x.view(FNUZ), "value": lambda x: x.view(FNUZ)}, TypeError,
        r"(key|pages.key_cache).dtype must be one of .*torch.float8_e5m2, got torch.float8_e4m3fnuz",
    ),
    "e5m2fnuz": (
        {"key": lambda x: x.view(torch.float8_e5m2fnuz), "value": lambda x: x.view(torch.float8_e5m2fnuz)}, TypeError,
        "got torch.float8_e5m2fnuz",
    ),
    "mixed FP8": (
        {"value": lambda x: x.view(E5)}, TypeError, "value.* must have key.*'s dtype torch.float8_e4m3fn, got .*e5m2"
    ),
    "FP8 keys alone": (
        {"value": lambda x: x.float()}, TypeError, "value.* must have key.*'s dtype torch.float8_e4m3fn, got .*float32"
    ),
    "FP8 values alone": ({"key": lambda x: x.float()}, TypeError, "value.* must have key.*'s dtype torch.float32, got"),
    "FP8 queries": ({"query": lambda x: x.to(FN)}, TypeError, "query.dtype must be one of .*, got torch.float8_e4m3fn"),
    "scales without FP8": (HALF, TypeError, "key_scale must be None unless key.* is torch.float8_e4m3fn or .*float32"),
    "a scale of values without FP8": (
        {**HALF, "key_scale": None}, TypeError, "value_scale must be None unless key.* is torch.float8_e4m3fn or "
    ),
    "a float": ({"key_scale": 0.5}, TypeError, r"key_scale must be a torch.Tensor \[\] or \[Hkv\], or None, got float"),
    "float16": ({"value_scale": lambda x: x.half()}, TypeError, "value_scale must have dtype torch.float32, got .*16"),
    "float64": ({"key_scale": lambda x: x.double()}, TypeError, "key_scale must have dtype torch.float32, got .*64"),
    "sparse": ({"key_scale": lambda x: x.to_sparse()}, TypeError, "key_scale must be a strided tensor"),
    "one per query head": (
        {"key_scale": lambda x: x.repeat(3)}, ValueError, r"key_scale must be \[\] or \[Hkv\] = \(2,\), got \(6,\)"
    ),
    "one per row and head": ({"value_scale": lambda x: x.expand(2, 2)}, ValueError, r"value_scale must be .*\(2, 2\)"),
    "one element": ({"value_scale": lambda x: x[:1]}, ValueError, r"value_scale must be .*, got \(1,\)"),
    "meta": ({"key_scale": lambda x: x.to("meta")}, ValueError, "key_scale must be on .* like key.*, got meta"),
}
#: Wrong elements of scales. Those on a GPU are checked with check_finite alone, if a function has it.
BAD_ELEMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "zero": ({"key_scale": lambda x: x * 0}, ValueError, "key_scale must be above 0 and at most 7.596e.35.*, got 0.0"),
    "negative": ({"value_scale": lambda x: -x}, ValueError, "value_scale must be above 0 .*, got -"),
    "NaN": ({"value_scale": lambda x: x * torch.nan}, ValueError, "value_scale must be above 0 .*, got nan"),
    "infinity": ({"key_scale": lambda x: x / 0}, ValueError, "key_scale must be above 0 .*, got inf"),
    "too large": ({"key_scale": lambda x: x * 0 + 1e36}, ValueError, "key_scale must .*finite in float32, got 9.*e.35"),
    "one head's": (
        {"value_scale": lambda x: x * torch.tensor([1.0, 0.0], device=x.device)}, ValueError,
        "value_scale must be above 0 .*, got 0.0",
    ),
}


def changed(inputs: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call with those of an entry of BAD_CALLS or BAD_ELEMENTS."""
    made = {name: change(inputs.get(name)) if callable(change) else change for name, change in changes.items()}
    return {**inputs, **made}
