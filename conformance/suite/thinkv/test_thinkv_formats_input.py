"""Bad input: every argument of the number formats' functions, wrong in every way that a caller could pass it.

The error has the right type. Its message names the argument, what was expected and what was passed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtwin.conformance.cases.bad_input import refused
from kvtwin.conformance.cases.format_cases import EVERY

pytestmark = [
    pytest.mark.kind("bad_input"),
    pytest.mark.parametrize("side", ["reference", "optimized"]),
    pytest.mark.main,
]

NOT_INTEGERS = [None, True, 2.0, "3", torch.tensor(3)]
NOT_WORDS = [None, 1, ("nvfp4",)]


def good(function: str, twins, device: torch.device, fmt: str = "nvfp4") -> dict[str, Any]:
    """Valid arguments."""
    x = torch.randn(2, 3, 5, 20, generator=torch.Generator().manual_seed(1)).to(device)
    module = twins.reference.thinkv
    q, coded = (module.quantize(x, name, axis=-1) for name in (fmt, "nvfp4"))
    return {
        "quantize": {"x": x, "fmt": fmt, "axis": -1},
        "dequantize": {"q": q, "dtype": torch.float32},
        "pack": {"codes": coded.codes, "bits": 4},
        "unpack": {"packed": module.pack(coded.codes, 4), "bits": 4, "size": 20},
    }[function]


TENSORS = [
    ("list", lambda x: x.tolist(), TypeError, "torch.Tensor.*list"),
    ("None", lambda x: None, TypeError, "torch.Tensor.*NoneType"),
    ("number", lambda x: x.flatten()[0], ValueError, "0"),
    ("empty", lambda x: x[..., :0], ValueError, r"empty.*0\)"),
    ("sparse", lambda x: x.to_sparse(), TypeError, "strided.*[Ss]parse"),
    ("bool", lambda x: x > 0, TypeError, "dtype.*torch.bool"),
    ("int64", lambda x: x.long(), TypeError, "dtype.*torch.int64"),
]
BYTES = [("float", lambda x: x.float(), TypeError, "dtype.*torch.float32")]
CASES = [
    pytest.param(function, name, *wrong, id=f"{function}-{name}-{label}")
    for function, name in (("quantize", "x"), ("pack", "codes"), ("unpack", "packed"))
    for label, *wrong in [*TENSORS, *(BYTES if function != "quantize" else [
        ("row", lambda x: x[0, 0, 0], ValueError, r"\[..., T, D\].*\(20,\)"),
        ("complex", lambda x: x.to(torch.complex64), TypeError, "dtype.*complex64"),
        ("bytes", lambda x: x.to(torch.uint8), TypeError, "dtype.*uint8"),
    ])]
]


@pytest.mark.parametrize(("function", "name", "spoil", "error", "says"), CASES)
def test_a_wrong_tensor(function, name, spoil, error, says, side, twins, device):
    arguments = good(function, twins, device)
    arguments[name] = spoil(arguments[name])
    refused(getattr(getattr(twins, side).thinkv, function), error, rf"\b{name}\b", "must", "got", says, **arguments)


NUMBERS: list[tuple[str, str, list[Any], type[Exception], str]] = [
    ("quantize", "fmt", NOT_WORDS, TypeError, "must be a str"),
    ("quantize", "fmt", ["", "NVFP4", "int8"], ValueError,
     "must be one of fp8, nvfp4, ternary, int4, int2, unquantized"),
    ("quantize", "axis", NOT_INTEGERS, TypeError, "must be an int"),
    ("quantize", "axis", [0, 1, -3, 4], ValueError, "one of the last two dimensions, -1 or -2"),
    ("quantize", "group", NOT_INTEGERS, TypeError, "must be an int"),
    ("quantize", "group", [0, -16], ValueError, "must be at least 1"),
    ("quantize", "tensor_scale", [None, 1, "yes"], TypeError, "must be a bool"),
    ("quantize", "scale_rule", [1, ("mse",)], TypeError, "must be a str"),
    ("quantize", "scale_rule", ["absmax", ""], ValueError, "must be one of amax, mse"),
    ("quantize", "scale_rule", ["mse", "amax"], ValueError, "None but for ternary.*nvfp4"),
    ("dequantize", "dtype", [None, "float32", torch.int8, torch.float8_e4m3fn], TypeError, "must be one of"),
    ("pack", "bits", NOT_INTEGERS, TypeError, "must be an int"),
    ("pack", "bits", [0, 1, 3, 16, -4], ValueError, "must be one of 2, 4, 8"),
    ("unpack", "bits", NOT_INTEGERS, TypeError, "must be an int"),
    ("unpack", "bits", [0, 1, 3, 16], ValueError, "must be one of 2, 4, 8"),
    ("unpack", "size", NOT_INTEGERS, TypeError, "must be an int"),
    ("unpack", "size", [0, -1], ValueError, "must be at least 1"),
]


@pytest.mark.parametrize(("function", "name", "values", "error", "says"), NUMBERS, ids=lambda value: str(value)[:24])
def test_a_wrong_number_or_word(function, name, values, error, says, side, twins, device):
    for value in values:
        arguments = good(function, twins, device) | {name: value}
        refused(getattr(getattr(twins, side).thinkv, function), error, rf"\b{name}\b", "got", says, **arguments)


@pytest.mark.parametrize("fmt", EVERY)
def test_options_belong_to_formats(fmt, side, twins, device):
    quantize = getattr(twins, side).thinkv.quantize
    x = torch.ones(2, 4, device=device)
    for options, owner in (({"scale_rule": "mse"}, "ternary"), ({"tensor_scale": True}, "nvfp4")):
        if fmt == owner:
            assert quantize(x, fmt, axis=-1, **options).codes.any()
        else:
            (name,) = options
            refused(quantize, ValueError, name, f"but for {owner}", f"for {fmt}", x=x, fmt=fmt, axis=-1, **options)


@pytest.mark.parametrize(("bits", "size"), [(4, 18), (4, 41), (2, 20), (8, 20), (4, 21)])
def test_a_size_that_does_not_fit_its_bytes(bits, size, side, twins, device):
    arguments = good("unpack", twins, device) | {"bits": bits, "size": size}
    refused(getattr(twins, side).thinkv.unpack, ValueError, "packed", "bytes for", f"{size} codes", "got 10",
            **arguments)  # fmt: skip


PARTS = [
    ("q", "nvfp4", tuple, TypeError, "must be a Quantized, got tuple"),
    ("q", "nvfp4", lambda q: None, TypeError, "must be a Quantized, got NoneType"),
    ("q.codes", "nvfp4", lambda q: q._replace(codes=q.codes.tolist()), TypeError, "must be a torch.Tensor.*list"),
    ("q.codes.dtype", "nvfp4", lambda q: q._replace(codes=q.codes.int()), TypeError, "torch.uint8.*torch.int32"),
    ("q.codes", "nvfp4", lambda q: q._replace(codes=q.codes[..., 1:]), ValueError, r"\(2, 3, 5, 20\).*\(2, 3, 5, 19\)"),
    ("q.codes", "nvfp4", lambda q: q._replace(shape=q.shape[1:]), ValueError, r"\(3, 5, 20\).*\(2, 3, 5, 20\)"),
    ("q.shape", "nvfp4", lambda q: q._replace(shape=None), TypeError, "torch.Size.*NoneType"),
    ("q.fmt", "nvfp4", lambda q: q._replace(fmt="fp4"), ValueError, "must be one of fp8.*'fp4'"),
    ("q.axis", "nvfp4", lambda q: q._replace(axis=3), ValueError, "must be -1 or -2, got 3"),
    ("q.group", "nvfp4", lambda q: q._replace(group=0), ValueError, "at least 1"),
    ("q.scales", "nvfp4", lambda q: q._replace(group=8), ValueError, r"\(2, 3, 5, 3\).*\(2, 3, 5, 2\)"),
    ("q.scales", "nvfp4", lambda q: q._replace(axis=-2), ValueError, r"\(2, 3, 1, 20\).*\(2, 3, 5, 2\)"),
    ("q.scales", "fp8", lambda q: q._replace(scales=q.scales[0]), ValueError, r"\(2, 3, 1\).*\(3, 1\)"),
    ("q.scales", "fp8", lambda q: q._replace(scales=1.0), TypeError, "torch.Tensor.*float"),
    ("q.scales.dtype", "fp8", lambda q: q._replace(fmt="int4"), TypeError, "torch.uint8.*torch.float32"),
    ("q.scales.dtype", "nvfp4", lambda q: q._replace(fmt="fp8"), TypeError, "torch.float32.*torch.uint8"),
    ("q.scales", "nvfp4", lambda q: q._replace(scales=q.scales.to("meta")), ValueError, "meta"),
    ("q.codes.dtype", "unquantized", lambda q: q._replace(codes=q.codes.long()), TypeError, "bfloat16.*torch.int64"),
    ("q.codes.dtype", "unquantized", lambda q: q._replace(codes=q.codes.double()), TypeError, "torch.float64"),
    ("q.codes.dtype", "unquantized", lambda q: q._replace(fmt="nvfp4"), TypeError, "torch.uint8.*torch.float32"),
    ("q.scales", "unquantized", lambda q: q._replace(scales=q.codes.byte()), ValueError, r"\(0,\).*\(2, 3, 5, 20\)"),
    ("q.tensor_scale", "unquantized", lambda q: q._replace(tensor_scale=torch.ones(())), ValueError, "but for nvfp4"),
    ("q.tensor_scale", "nvfp4", lambda q: q._replace(tensor_scale=1.0), TypeError, "torch.Tensor.*float"),
    ("q.tensor_scale", "nvfp4", lambda q: q._replace(tensor_scale=torch.ones(1)), ValueError, r"\(\).*\(1,\)"),
    ("q.tensor_scale", "int4", lambda q: q._replace(tensor_scale=torch.ones(())), ValueError, "but for nvfp4.*int4"),
]


@pytest.mark.parametrize(("name", "fmt", "spoil", "error", "says"), PARTS, ids=lambda value: str(value)[:20])
def test_rejects_an_inconsistent_quantized(name, fmt, spoil, error, says, side, twins, device):
    arguments = good("dequantize", twins, device, fmt)
    arguments["q"] = spoil(arguments["q"])
    if name == "q.tensor_scale" and isinstance(arguments["q"].tensor_scale, torch.Tensor):
        arguments["q"] = arguments["q"]._replace(tensor_scale=arguments["q"].tensor_scale.to(device))
    refused(getattr(twins, side).thinkv.dequantize, error, rf"\b{name}\b", "must", "got", says, **arguments)


@pytest.mark.limits
def test_what_a_kernel_cannot_take(side, twins, device):
    """Inputs that require grad, and groups larger than a tile. The reference accepts both."""
    module = getattr(twins, side).thinkv
    x = torch.ones(2, 4, device=device, requires_grad=True)
    calls = [({"x": x}, "requires grad"), ({"x": x.double()}, "requires grad"), ({"group": 1025}, "at most 1024")]
    for wrong, says in calls:
        arguments = {"x": x.detach(), "fmt": "fp8", "axis": -1} | wrong
        if side == "optimized":
            refused(module.quantize, ValueError, next(iter(wrong)), says, **arguments)
        else:
            assert module.quantize(**arguments).codes.tolist() == [[126] * 4] * 2
    with torch.no_grad():
        assert module.quantize(x, "nvfp4", axis=-1).codes.tolist() == [[7] * 4] * 2


@pytest.mark.limits
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("fmt", ["nvfp4", "fp8"])
def test_a_group_longer_than_any_memory(fmt, axis, side, twins, device):
    """The reference takes it as one group, at the cost of the tensor. The kernels refuse it."""
    module = getattr(twins, side).thinkv
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1)).to(device)
    if side == "optimized":
        refused(module.quantize, ValueError, "group must be at most 1024", x=x, fmt=fmt, axis=axis, group=2**62)
        return
    whole, huge = (module.quantize(x, fmt, axis=axis, group=group) for group in (6, 2**62))
    assert torch.equal(huge.codes, whole.codes)
    assert torch.equal(huge.scales, whole.scales)
    assert torch.equal(module.dequantize(huge, torch.float32), module.dequantize(whole, torch.float32))
