"""Bad tensors: every tensor argument of LongFlow and its SnapKV, wrong in every way that a caller could pass it.

The error has the right type. Its message names the argument, what was expected and what was passed. A state is left
bitwise unchanged. test_longflow_input_values.py tests numbers and flags.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.bad_input import HKV, MASKS, SUBJECTS, B, Call, S, convert_to, good, moved
from kvtwin.conformance.harness.impl import Twins

pytestmark = [pytest.mark.kind("bad_input"), pytest.mark.main]
both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])


# Dimensions that may be shorter without an error: fewer observers, and, if there is no value to compare with, a key
# with fewer heads or tokens (then `occupied` is wrong).
FITTING = {
    "compress_prefill": {("query_window", 2)}, "compress": {("query_window", 2)},
    "window_score": {("query_window", 2), ("key", 1), ("key", 2)},
}


class Wrong(NamedTuple):
    """A way to spoil a tensor. says: patterns of the message. In them, {shape} is the shape of the spoiled tensor, and
    {size} the size of its dimension `at`."""

    name: str
    spoil: Callable[[Tensor], Any]
    error: type[Exception]
    says: tuple[str, ...]
    at: int = 0


def wrongs(subject: str, argument: str) -> Iterator[Wrong]:
    dims = len(SUBJECTS[subject][argument])
    is_mask, is_index = argument in MASKS, argument == "index"
    if argument not in MASKS or (argument == "occupied" and subject.startswith("decode")):
        yield Wrong("None", lambda x: None, TypeError, ("torch.Tensor", "NoneType"))
    yield Wrong("list", lambda x: x.tolist(), TypeError, ("torch.Tensor", "list"))
    yield Wrong("numpy", lambda x: x.cpu().numpy(), TypeError, ("torch.Tensor", "ndarray"))
    yield Wrong("one_dimension_less", lambda x: x[0], ValueError, (r"\[B", "{shape}"))
    yield Wrong("one_dimension_more", lambda x: x[None], ValueError, (r"\[B", "{shape}"))
    for at in range(dims):
        yield Wrong(f"empty_{at}", lambda x, at=at: x.narrow(at, 0, 0), ValueError, (r"\[B", "{shape}"))
        if (argument, at) not in FITTING.get(subject, ()):
            yield Wrong(f"short_{at}", lambda x, at=at: x.narrow(at, 1, x.shape[at] - 1), ValueError,
                        (r"{shape}|\b[BHSTD]\w* = {size}\b",), at)
    if is_mask:
        # A mask for one row, or of the other grouping, would broadcast.
        yield Wrong("one_row", lambda x: x[:1], ValueError, (r"\[B", "{shape}"))
        regrouped = (lambda x: x[:, 0]) if dims == 3 else (lambda x: x[:, None].expand(B, HKV, S))
        yield Wrong("other_grouping", regrouped, ValueError, (r"\[B", "{shape}"))
        dtypes = (torch.float32, torch.int8, torch.uint8, torch.int64)
    elif is_index:
        dtypes = (torch.float32, torch.int32, torch.bool)
    else:
        # Mixed floating dtypes are as wrong as those that are not floating.
        dtypes = (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float16, torch.float64)
    for dtype in dtypes:
        yield Wrong(f"{dtype}", lambda x, dtype=dtype: x.to(dtype), TypeError, ("dtype", f"{dtype}"))
    yield Wrong("meta", lambda x: x.to("meta"), ValueError, ("on", "meta", "cpu|cuda"))
    yield Wrong("sparse", lambda x: x.to_sparse(), TypeError, ("strided", "sparse"))


TENSOR_CASES = [
    pytest.param(subject, argument, wrong, id=f"{subject}-{argument}-{wrong.name}")
    for subject, arguments in SUBJECTS.items() for argument in arguments for wrong in wrongs(subject, argument)
]


@both_sides
@pytest.mark.parametrize(("subject", "argument", "wrong"), TENSOR_CASES)
def test_a_wrong_tensor(
    subject: str, argument: str, wrong: Wrong, side: str, twins: Twins, device: torch.device
) -> None:
    call = Call(twins, side, subject, device)
    bad = call.arguments[argument] = wrong.spoil(call.arguments[argument])
    shape = tuple(bad.shape) if isinstance(bad, Tensor) else ()
    known = {"shape": re.escape(str(shape)), "size": shape[wrong.at] if shape else None}
    says = (pattern.format(**known) for pattern in wrong.says)
    # The number of heads is not an argument, so "query heads must be a multiple of ..." counts as naming query_window.
    named = r"\bquery(_window\b| heads\b)" if argument == "query_window" else rf"\b{argument}\b"
    with call.refused(wrong.error, named, "must", "got", *says):
        call()


def cut(*names: str, at: int, to: int) -> Callable[[dict[str, Any]], None]:
    def spoil(arguments: dict[str, Any]) -> None:
        for name in names:
            arguments[name] = arguments[name].narrow(at, 0, to)
    return spoil


@both_sides
@pytest.mark.parametrize(
    ("subject", "spoil", "error", "says"),
    [
        ("decode_attention", cut("key", "value", at=0, to=1), ValueError, "query must .*B = 1 .*got (2, 4, 16)"),
        ("decode_attention", cut("key", "value", at=2, to=5), ValueError, "occupied must .*(2, 5), got (2, 6)"),
        ("decode_attention", cut("key", "value", at=3, to=8), ValueError, "query must .*D = 8, got (2, 4, 16)"),
        ("decode_attention", cut("query", at=1, to=3), ValueError, "query heads must .*Hq = 3 and Hkv = 2"),
        ("decode_attention", cut("query", at=1, to=1), ValueError, "query heads must .*Hq = 1 and Hkv = 2"),
        ("decode_per_head", cut("key", "value", at=1, to=1), ValueError, "occupied must .*(2, 1, 6), got (2, 2, 6)"),
        ("compress", cut("key", "value", at=2, to=2), ValueError, "query_window must .*W <= T = 2, got (2, 4, 3, 16)"),
        ("window_score", cut("key", at=2, to=2), ValueError, "query_window must .*W <= T = 2, got (2, 4, 3, 16)"),
        ("window_score", cut("key", at=2, to=5), ValueError, "occupied must .*(2, 5), got (2, 6)"),
        ("prefill", cut("query", at=2, to=5), ValueError, "query must .*T = 6, got (2, 4, 5, 16)"),
        ("prefill", cut("query", "key", "value", "occupied", at=0, to=1), ValueError, "must .*B = 2, .*got B = 1, "),
        ("prefill", cut("query", "key", "value", at=3, to=8), ValueError, "must .*D = 16, got .*D = 8"),
        ("prefill", cut("key", "value", at=1, to=1), ValueError, "must .*Hkv = 2, .*got .*Hkv = 1, "),
        ("prefill", cut("query", at=1, to=2), ValueError, "must .*Hq = 4, .*got .*Hq = 2, "),
        ("prefill", convert_to(torch.float16), TypeError, "key must .*state's dtype torch.float32, got torch.float16"),
        ("step", convert_to(torch.bfloat16), TypeError, "query must .*state's dtype torch.float32, got torch.bfloat16"),
        ("prefill", moved, ValueError, "key must be on the state's device .*, got meta"),
        ("step", moved, ValueError, "query must be on the state's device .*, got meta"),
    ],
)
def test_tensors_that_fit_each_other_but_not_the_rest(
    subject: str, spoil: Callable[[dict[str, Any]], None], error: type[Exception], says: str, side: str, twins: Twins,
    device: torch.device,
) -> None:
    call = Call(twins, side, subject, device)
    spoil(call.arguments)
    with call.refused(error, re.sub("[()]", r"\\\g<0>", says)):  # parentheses are those of shapes
        call()


@both_sides
@pytest.mark.parametrize("subject", ["prefill", "step"])
def test_prefill_needs_an_empty_state(subject: str, side: str, twins: Twins, device: torch.device) -> None:
    """After a prompt, and after a step."""
    call = Call(twins, side, "prefill", device)
    getattr(call.state, subject)(**good(subject, device))
    with call.refused(RuntimeError, r"prefill needs an empty state.*reset\(\)"):
        call()
    call.state.reset()
    call()


@both_sides
@pytest.mark.parametrize("index", [[0, 2], [-1, 0], [2**40, 0]], ids=str)
def test_reorder_out_of_range(index: list[int], side: str, twins: Twins, device: torch.device) -> None:
    call = Call(twins, side, "reorder", device)
    call.arguments["index"] = torch.tensor(index, device=device)
    with call.refused(ValueError, rf"index must name rows 0 to 1, got values from {min(index)} to {max(index)}"):
        call()
