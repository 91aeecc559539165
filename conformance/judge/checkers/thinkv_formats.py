"""Checker of ThinKV's number formats: scales, codes, and the numbers that they stand for.

Divisions are correctly rounded by the specification; DIVISION is what hardware may add. A scale in E4M3 is right if
some number of the interval of its quotient rounds to it, and a code if some ratio |x| / scale does, for the scale that
came back. A division by a power of two is exact, so halves between two of them follow the rule: the even one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....reference.contract.thinkv.types import BITS
from ....reference.thinkv import formats, unpack
from ....reference.thinkv.formats import E4M3, MAGNITUDES, grouped
from ... import stats
from ...cases.format_cases import (
    EXTREME,
    FORMATS,
    LAYOUTS,
    ORDINARY,
    TIED,
    BytesCase,
    FormatsCase,
    QuantizedCase,
    bytes_cases,
    formats_cases,
)
from ..bounds import DIVISION, FLUSH, SLACK, UNIT, gamma
from ..choices import any_of_equals
from ..compare import assert_dtype, assert_same, fail
from ..fields import Missing, field
from ..mismatch import fail_choice, fail_tie
from ..subjects import Subject, properties
from .quantizers import assert_rounded, rounded

LARGEST = torch.finfo(torch.float32).max


class Levels(NamedTuple):
    """The lowest and the highest index of a magnitude that is right, the likely one, and where halves decide."""

    low: Tensor
    high: Tensor
    likely: Tensor
    halves: Tensor


def levels(numerator: Tensor, denominator: Tensor, magnitudes: tuple[float, ...], roundings: int = 0) -> Levels:
    """Of numerator / denominator, float64: the index of the nearest magnitude; 0 for a denominator of 0.

    The quotient has DIVISION and further roundings, and each operand below FLUSH may be 0. With a denominator that is a
    power of two, and no further roundings, it is exact.
    """
    table = torch.tensor(magnitudes, dtype=torch.float64, device=numerator.device)
    halfway = (table[:-1] + table[1:]) / 2
    live = denominator > 0
    below = denominator.where(live, 1)
    fraction, _ = torch.frexp(below)
    exact = (fraction == 0.5) & (below >= FLUSH) & ((numerator == 0) | (numerator >= FLUSH)) & (roundings == 0)
    error = (DIVISION + gamma(roundings)) * SLACK
    low = torch.where(exact, numerator, (numerator * (1 - error) - FLUSH).clamp_min(0)) / below
    high = torch.where(exact, numerator, numerator * (1 + error) + FLUSH) / below
    high = high.where(exact | (below >= FLUSH), torch.inf)
    low, high, ratio = (one.contiguous() for one in (low, high, numerator / below))
    first, last = torch.bucketize(low, halfway), torch.bucketize(high, halfway, right=True)
    at, reached = torch.bucketize(ratio, halfway), torch.bucketize(ratio, halfway, right=True)
    likely = torch.where(at % 2 == 0, at, reached)
    first, last, likely = (one.where(live, 0) for one in (first, last, likely))
    return Levels(first, last, likely, exact & live & (at != reached))


class Exact(NamedTuple):
    """The sizes of a case's numbers in groups, float64, their signs, and the largest size of each group."""

    sizes: Tensor
    negative: Tensor
    largest: Tensor


def exact_of(case: FormatsCase) -> Exact:
    along = -2 if case.fmt == "fp8" else case.axis
    x = grouped(case.x.double(), along, min(case.size, case.x.shape[along]))
    sizes = x.abs().nan_to_num(nan=0.0).clamp_max(LARGEST)
    return Exact(sizes, x < 0, sizes.amax((-2, -1) if case.fmt == "fp8" else along))


def judge_quantized(result: Any, case: FormatsCase) -> None:
    """result: what `quantize(**case.inputs)` returns."""
    if case.fmt == "unquantized":
        with field("codes"):
            assert_dtype(result.codes, case.dtype, what="codes")
            assert_same(result.codes, case.x, what="codes")
            stats.decisions(0, 0)
        return
    exact = exact_of(case)
    with field("tensor_scale"):
        assert_second(result.tensor_scale, exact, case)
    second = _usable(result.tensor_scale, exact.sizes.max() / 2688) if case.tensor_scale else None
    with field("scales"):
        assert_scales(result.scales, second, exact, case)
    with field("codes"):
        assert_codes(result.codes, result.scales, second, exact, case)


def _usable(given: Any, exact: Tensor) -> Tensor:
    """A given scale, float64; the exact one if it is missing or no number."""
    if isinstance(given, Missing) or given is None or given.shape != exact.shape:
        return exact
    given = given.double()
    return given.where(given.isfinite() & (given >= 0), exact)


def assert_second(actual: Any, exact: Exact, case: FormatsCase) -> None:
    """The scale of the whole tensor: its largest size / 2688."""
    if not case.tensor_scale:
        stats.exact()
        if actual is not None and not isinstance(actual, Missing):
            fail(f"tensor_scale: expected None without tensor_scale, got {actual!r}")
        return
    number = exact.sizes.max() / 2688
    right = rounded(number, (number * DIVISION + FLUSH * (number > 0)) * SLACK, torch.float32)
    assert_rounded(actual, right, torch.float32, what="tensor_scale")


def assert_scales(actual: Tensor, second: Tensor | None, exact: Exact, case: FormatsCase) -> None:
    """The largest size over the largest magnitude: float32 for fp8, else E4M3."""
    if case.fmt == "fp8":
        number = exact.largest / MAGNITUDES["fp8"][-1]
        right = rounded(number, (number * DIVISION + FLUSH * (number > 0)) * SLACK, torch.float32)
        assert_rounded(actual, right, torch.float32, what="scales")
        return
    assert_dtype(actual, torch.uint8, what="scales")
    if tuple(actual.shape) != tuple(exact.largest.shape):
        fail(f"scales: expected shape {tuple(exact.largest.shape)}, got {tuple(actual.shape)}")
    stats.exact()
    if case.rule == "mse":
        _assert_least_squares(actual, exact, case)
        return
    found = scale_levels(second, exact, case)
    wrong = (actual < found.low) | (actual > found.high)
    _fail_level("scales", wrong, actual, found.likely, "", fail_choice)
    tied = found.halves & (actual != found.likely) & (not any_of_equals())
    _fail_level("scales", tied, actual, found.likely, "; halves go to the even one", fail_tie)


def scale_levels(second: Tensor | None, exact: Exact, case: FormatsCase) -> Levels:
    """The codes of a group's scale. 6 times the scale of the tensor is one more rounding."""
    top = torch.full_like(exact.largest, MAGNITUDES[case.fmt][-1])
    return levels(exact.largest, top if second is None else top * second, E4M3, 0 if second is None else 1)


def _assert_least_squares(actual: Tensor, exact: Exact, case: FormatsCase) -> None:
    """One of the fractions k/16 of the largest size, in E4M3, with the least sum of squares. A fraction has one
    rounding. An error is rounded to float32, which changes its square by 2 u, and nothing else rounds to float32."""
    table = torch.tensor(E4M3, dtype=torch.float64, device=actual.device)

    def squares(scale: Tensor) -> Tensor:
        wide = scale.unsqueeze(case.axis)
        return (exact.sizes - wide.where(exact.sizes > wide / 2, 0)).square().sum(case.axis)

    found, allowed = table[actual.clamp_max(126).long()], actual > 126
    least = torch.full_like(exact.largest, torch.inf)
    for k in range(16, 7, -1):
        product, one = exact.largest * k, torch.full_like(exact.largest, 16.0)
        low, high = (levels(product * side, one, E4M3).likely for side in (1 - UNIT * SLACK, 1 + UNIT * SLACK))
        allowed = allowed | (actual >= low) & (actual <= high)
        sure = torch.maximum(squares(table[low]), squares(table[high]))
        least = torch.minimum(least, sure)
    allowed = allowed & (actual <= 126)
    _fail_level("scales", ~allowed, actual, actual, "; it is no fraction of the largest number", fail_choice)
    wrong = squares(found) * (1 - gamma(3)) > least * (1 + gamma(3)) + FLUSH
    _fail_level("scales", wrong, actual, actual, "; another fraction has a smaller sum of squared errors", fail_choice)


def assert_codes(actual: Tensor, scales: Any, second: Tensor | None, exact: Exact, case: FormatsCase) -> None:
    """The magnitude nearest to each size / scale, and the sign of what is no zero."""
    assert_dtype(actual, torch.uint8, what="codes")
    if tuple(actual.shape) != case.shape:
        fail(f"codes: expected shape {case.shape}, got {tuple(actual.shape)}")
    along = -2 if case.fmt == "fp8" else case.axis
    found = grouped(actual, along, min(case.size, actual.shape[along])).long()
    step = _step(scales, second, exact, case)
    right = levels(exact.sizes, step.expand(exact.sizes.shape), MAGNITUDES[case.fmt], int(second is not None))
    half = 1 << BITS[case.fmt] - 1
    index, sign = found % half, found // half
    signed = sign == ((index > 0) & exact.negative).long()
    wrong = (index < right.low) | (index > right.high) | ~signed
    expected = right.likely + half * ((right.likely > 0) & exact.negative)
    _fail_level("codes", wrong, found, expected, "", fail_choice)
    tied = right.halves & (not any_of_equals())
    _fail_level("codes", tied & (index != right.likely), found, expected, "; halves go to the even code", fail_tie)
    live = (step > 0).expand(found.shape) & (exact.sizes > 0)
    stats.decisions(int(live.sum()), int((live & (tied | (right.low == right.high))).sum()))
    stats.adjudicate(int((live & (index != right.likely)).sum()))


def _step(scales: Any, second: Tensor | None, exact: Exact, case: FormatsCase) -> Tensor:
    """The scale of each element, by the given scales: a tensor that broadcasts over the groups."""
    if case.fmt == "fp8":
        return _usable(scales, exact.largest / MAGNITUDES["fp8"][-1])[..., None, None]
    likely = scale_levels(second, exact, case).likely
    if not isinstance(scales, Missing) and scales.shape == likely.shape:
        likely = scales.long().where(scales <= 126, likely)
    table = torch.tensor(E4M3, dtype=torch.float64, device=likely.device)
    scale = table[likely].unsqueeze(case.axis)
    return scale if second is None else scale * second


def _fail_level(what: str, wrong: Tensor, found: Tensor, likely: Tensor, why: str, raises: Any) -> None:
    if bool(wrong.any()):
        at, count = tuple(wrong.nonzero()[0].tolist()), int(wrong.sum())
        message = (
            f"{what}: {count} of {wrong.numel()} are wrong; the first, at {at} of the groups: expected "
            f"{int(likely[at])}, got {int(found[at])}{why}"
        )
        raises(message, fail, wrong=count) if raises is fail_tie else raises(message, fail, count)


def judge_read(actual: Tensor, case: QuantizedCase) -> None:
    """actual: what `dequantize(**case.inputs)` returns. A magnitude times a scale in E4M3 has few bits, so that the
    product is exact; other products round, as does that with the scale of the tensor."""
    codes, scales, second = (case.tensors[name] for name in ("codes", "scales", "second"))
    assert codes is not None and scales is not None
    with field("numbers"):
        if case.fmt == "unquantized":
            assert_rounded(actual, rounded(codes.double(), torch.zeros(()), case.output_dtype), case.output_dtype,
                           what="numbers")  # fmt: skip
            return
        along = -2 if case.fmt == "fp8" else case.axis
        magnitude = formats.decode(grouped(codes, along, min(case.size, codes.shape[along])), case.fmt).double()
        if case.fmt == "fp8":
            step = scales.double()[..., None, None]
        else:
            step = formats.decode(scales, "fp8").double().unsqueeze(case.axis)
        number = magnitude * (step if second is None else step * second.double())
        inexact = (number.float().double() != number) | (second is not None)
        error = (gamma(1 + (second is not None)) * number.abs()) * SLACK * inexact + FLUSH * (number.abs() < FLUSH)
        if second is not None:
            error = error + FLUSH * (second.double() * step < FLUSH) * magnitude.abs() * (number != 0)
        number, error = (formats.ungrouped(one, along, codes.shape) for one in (number, error))
        assert_rounded(actual, rounded(number, error, case.output_dtype), case.output_dtype, what="numbers")


def judge_packed(actual: Tensor, case: BytesCase) -> None:
    with field("packed"):
        assert_dtype(actual, torch.uint8, what="packed")
        assert_same(actual, case.tensor("packed"), what="packed")


def judge_unpacked(actual: Tensor, case: BytesCase) -> None:
    with field("codes"):
        assert_dtype(actual, torch.uint8, what="codes")
        assert_same(actual, unpack(case.tensor("packed"), case.bits, case.head_dim), what="codes")


def _subjects() -> Iterator[Subject]:
    found = dict(properties(ordinary=ORDINARY, tied=TIED, extreme=EXTREME, layout=LAYOUTS))
    apart = {"fmt": FORMATS, "apart": (True,)}
    found["independence"] = {**found["independence"], **apart}
    read = {name: one for name, one in found.items() if name != "ties"}
    yield Subject(
        "quantize", formats_cases, judge_quantized, numbers=("scales", "tensor_scale"), choices=("codes",),
        sized="tokens", properties=found,
    )
    yield Subject(
        "dequantize", lambda **more: formats_cases(made=QuantizedCase, **more), judge_read, numbers=("numbers",),
        sized="tokens", properties=read, arguments=QuantizedCase.arguments,
    )
    bytes_of = properties(layout=LAYOUTS)
    yield Subject("pack", bytes_cases, judge_packed, numbers=("packed",), sized="tokens", properties=bytes_of,
                  inputs=lambda case: case.pack_inputs)  # fmt: skip
    yield Subject("unpack", bytes_cases, judge_unpacked, numbers=("codes",), sized="tokens", properties=bytes_of,
                  inputs=lambda case: case.unpack_inputs, also=True)  # fmt: skip


SUBJECTS = tuple(_subjects())


def replay(case: Any, module: Any) -> Iterator[str]:
    """Judge a saved case again."""
    for one in SUBJECTS:
        kinds = {"quantize": FormatsCase, "dequantize": QuantizedCase, "pack": BytesCase, "unpack": BytesCase}
        if type(case) is kinds[one.name]:
            one.judge(one.call(module, case), case)
            yield f"{one.name}: right"
