"""What the checkers of KIVI and PM-KVQ share to judge `quantize` and `dequantize`: minima, scales, codes, numbers.

Every operation rounds to float32; see `bounds` for what hardware may do beyond that. A stored number is rounded to its
type last, and rounding is monotonic. So it lies between the rounded ends of the interval of what was rounded, which for
16-bit types is nearly always a single number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import stats
from ...cases.group_cases import LAYOUTS, ORDINARY, TIED, Coded, GroupCase
from ..bounds import DIVISION, FLUSH, SLACK, UNIT, gamma
from ..choices import any_of_equals
from ..compare import assert_dtype, assert_same, assert_within, fail
from ..fields import Missing, field
from ..mismatch import fail_choice, fail_tie
from ..reconstructed import group_error
from ..subjects import Properties, Subject, properties

LARGEST = torch.finfo(torch.float32).max
#: The errors of a difference and of its quotient, a division or a product with a reciprocal: two roundings, DIVISION.
QUOTIENT = gamma(2) + DIVISION
#: The layouts of codes, of which numbers of 2^31 elements have as many.
NEAR = tuple(layout for layout in LAYOUTS if layout != "far")


def kinds(layouts: tuple[str, ...], *, tied: bool, extreme: tuple[str, ...]) -> Properties:
    """The cases of each property. tied: also numbers half-way between two codes."""
    return properties(ordinary=ORDINARY, tied=TIED if tied else (), extreme=extreme, layout=layouts)


# Numbers that are stored ---------------------------------------------------------------------------------------------


class Rounded(NamedTuple):
    """What a number and the ends of its interval are in a dtype, as float64."""

    number: Tensor
    low: Tensor
    high: Tensor


def rounded(exact: Tensor, error: Tensor, dtype: torch.dtype) -> Rounded:
    """Numbers `exact`, float64, that are computed with an error and then rounded to `dtype`."""
    return Rounded(*((exact + side * error).to(dtype).double() for side in (0, -1, 1)))


def assert_rounded(actual: Tensor, right: Rounded, dtype: torch.dtype, *, what: str, either: Tensor | None = None,
                   ) -> float:  # fmt: skip
    """Assert that `actual` lies between the ends. A number that is NaN must be NaN; one whose interval reaches infinity
    may be infinite. either: elements that may also be infinite. Returns the utilisation."""
    assert_dtype(actual, dtype, what=what)
    number, low, high = right
    if tuple(actual.shape) != tuple(number.shape):
        fail(f"{what}: expected shape {tuple(number.shape)}, got {tuple(actual.shape)}")
    nan, found = number.isnan(), actual.double()
    assert_where(~nan | found.isnan(), what, "expected nan", found)
    beyond = (found == torch.inf) & (high == torch.inf) | (found == -torch.inf) & (low == -torch.inf)
    beyond = beyond | found.isinf() & either if either is not None else beyond
    surely = (low == torch.inf) | (high == -torch.inf)
    assert_where(~surely | beyond, what, "expected an infinity of its sign", found)
    number = number.masked_fill(nan, 0).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    bound = torch.maximum(high - number, number - low).masked_fill(nan, 0)
    return assert_within(found.where(~nan & ~beyond, number), number, bound.nan_to_num(torch.inf), what=what)


def assert_where(right: Tensor, what: str, expected: str, found: Tensor) -> None:
    """Assert that a mask is True everywhere."""
    stats.exact()
    if not bool(right.all()):
        at = tuple((~right).nonzero()[0].tolist())
        fail(f"{what}: {int((~right).sum())} of {right.numel()} elements are wrong; the first, at {at}: {expected}, "
             f"got {found[at].item()!r}")


# Groups --------------------------------------------------------------------------------------------------------------


class Groups(NamedTuple):
    """The exact groups of a case, float64: numbers [B, H, lines, groups, size]; of each group [B, H, lines, groups] the
    stored minimum and scale, and whether the types surely, or surely do not, hold its numbers."""

    numbers: Tensor
    minimum: Tensor
    scale: Rounded
    holds: Tensor
    breaks: Tensor


def exact_groups(case: GroupCase) -> Groups:
    """The minimum is a number of the group, in the stored type. The scale is (max - min) / levels, at least
    least_scale: a difference and a quotient in float32, QUOTIENT, and FLUSH for each. That of a constant group is 0.
    """
    numbers = case.in_groups(case.x).double()
    low, high = numbers.amin(-1), numbers.amax(-1)                               # NaN if the group has NaN
    width = high - low
    minimum = low.to(case.minimum_dtype).double()
    exact = (width / case.levels).clamp_min(case.least_scale)
    error = (exact * QUOTIENT + 2 * FLUSH) * SLACK
    error = error.masked_fill(width == 0, UNIT * case.least_scale)
    scale = rounded(exact, error, case.scale_dtype)
    fits = width.float().isfinite() & minimum.isfinite()
    return Groups(numbers, minimum, scale, fits & scale.high.isfinite(), ~fits | scale.low.isinf())


def judge_quantized(result: Any, case: GroupCase) -> None:
    """result: what `quantize(**case.inputs)` returns. Codes are judged by the scale and the minimum that came back."""
    codes, scale, minimum = result
    exact = exact_groups(case)
    with field("minimum"):
        assert_minimum(minimum, exact, case)
    with field("scale"):
        assert_scale(scale, exact, case)
    with field("codes"):
        assert_codes(codes, scale, minimum, exact, case)


def assert_minimum(actual: Tensor, exact: Groups, case: GroupCase) -> None:
    """The smallest number of each group, rounded to the stored type; NaN where the types do not hold the group."""
    assert_dtype(actual, case.minimum_dtype, what="minimum")
    _assert_shape(actual, case.scales_shape, "minimum")
    found = case.of_lines(actual).double()
    flushed = (found == 0) & (exact.minimum.abs() < FLUSH)
    right = ~exact.breaks & ((found == exact.minimum) | flushed) | ~exact.holds & found.isnan()
    if not bool(right.all()):
        at = tuple((~right).nonzero()[0].tolist())
        expected = exact.minimum.masked_fill(exact.breaks, torch.nan)[at].item()
        assert_where(right, "minimum, by line and group", f"expected {expected!r}", found)
    stats.exact()


def assert_scale(actual: Tensor, exact: Groups, case: GroupCase) -> float:
    """(max - min) / levels of each group; 0 where the types do not hold the group. Returns the utilisation."""
    _assert_shape(actual, case.scales_shape, "scale")
    found, right = case.of_lines(actual), exact.scale
    zero = exact.breaks | ~exact.holds & (found == 0)
    return assert_rounded(
        found, Rounded(*(end.masked_fill(zero, 0) for end in right)), case.scale_dtype, what="scale, by line and group"
    )


def assert_codes(codes: Tensor, scale: Any, minimum: Any, exact: Groups, case: GroupCase) -> None:
    """Each code is round((x - minimum) / scale), from 0 to `levels`, for the stored scale and minimum.

    The ratio has the error QUOTIENT, and FLUSH of x - minimum. So a code is right if rounding some number of this
    interval gives it. Where the ratio is half-way between two codes, x - minimum is a float32 number, and the scale is
    a power of two, no operation rounds, and the even code is right. With a scale of 0 codes are 0, as in groups that
    the types do not hold. A missing scale or minimum is the exact one, within its bound.
    """
    assert_dtype(codes, torch.int32, what="codes")
    _assert_shape(codes, case.codes_shape, "codes")
    found = case.unpacked(codes)                                                 # [B, H, lines, groups, size]
    low_step, step, high_step = _steps(scale, exact, case)
    shift = exact.minimum
    if not isinstance(minimum, Missing) and tuple(minimum.shape) == case.scales_shape:
        given = case.of_lines(minimum).double()
        shift = given.where(given.isfinite(), shift)
    live = (step > 0) & ~exact.breaks
    apart = (exact.numbers - shift[..., None]).masked_fill(~live[..., None], 0)
    low_step, step, high_step = (one.where(live, 1)[..., None] for one in (low_step, step, high_step))
    lost = apart.abs() * QUOTIENT + FLUSH
    ratio = apart / step
    low, high = ((apart - lost) / high_step, (apart + lost) / low_step)
    least, most = (low - 0.5).ceil(), (high + 0.5).floor()                       # halves down, and up
    fraction, _ = torch.frexp(step)
    halves = (
        (ratio - ratio.floor() == 0.5) & (fraction == 0.5) & (low_step == high_step) & (step >= FLUSH)
        & (apart.float().double() == apart) & (apart.abs() >= FLUSH)
    )
    least, most, truth = (end.clamp(0, case.levels).long() for end in (least, most, ratio.round()))
    least, most, truth = (end.masked_fill(~live[..., None], 0) for end in (least, most, truth))
    wrong = (found < least) | (found > most)
    _fail_code(wrong, found, truth, ratio, "", fail_choice)
    tied = halves & (least != most) & (not any_of_equals())
    _fail_code(tied & (found != truth), found, truth, ratio, "; halves go to the even code", fail_tie)
    contested = live[..., None].expand(found.shape)
    stats.decisions(int(contested.sum()), int((contested & (tied | (least == most))).sum()))
    stats.adjudicate(int((contested & (found != truth)).sum()))


def _steps(scale: Any, exact: Groups, case: GroupCase) -> tuple[Tensor, Tensor, Tensor]:
    """The least, the likely and the largest scale of each group: the given one, if it is a number."""
    number, low, high = exact.scale
    if isinstance(scale, Missing) or tuple(scale.shape) != case.scales_shape:
        return low, number, high
    given = case.of_lines(scale).double()
    usable = given.isfinite() & (given >= 0)
    return given.where(usable, low), given.where(usable, number), given.where(usable, high)


def _fail_code(wrong: Tensor, found: Tensor, truth: Tensor, ratio: Tensor, why: str, raises: Any) -> None:
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        message = (
            f"codes: {int(wrong.sum())} of {wrong.numel()} are wrong; the first, at line, group and place {at}: "
            f"(x - minimum) / scale is {ratio[at].item():.9g}, expected {truth[at].item()}, got {found[at].item()}{why}"
        )
        raises(message, fail, wrong=int(wrong.sum())) if raises is fail_tie else raises(message, fail, int(wrong.sum()))


def _assert_shape(actual: Tensor, expected: tuple[int, ...], what: str) -> None:
    if tuple(actual.shape) != expected:
        fail(f"{what}: expected shape {expected}, got {tuple(actual.shape)}")


# Numbers that are read -----------------------------------------------------------------------------------------------


def read_error(exact: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """The error of code * scale + minimum = exact in float32, before it is rounded to the result's type.

    The product and the sum round, fused or not: gamma(2) (|code scale| + |minimum|), and FLUSH for each. With a scale
    of 0 neither rounds, and a minimum below FLUSH may become 0.
    """
    error = (gamma(2) * ((exact - minimum).abs() + minimum.abs()) + 2 * FLUSH) * SLACK
    return torch.where(scale == 0, FLUSH * (minimum.abs() < FLUSH), error)


def judge_read(actual: Tensor, case: Any) -> None:
    """actual: what `dequantize(**case.inputs)` returns for codes, scales and minima of the case."""
    codes, scale, minimum = (case.tensor(name) for name in ("codes", "scale", "minimum"))
    exact = case.read(codes, scale.double(), minimum.double())
    scales, minima = (_each(part, case) for part in (scale, minimum))
    product = (exact - minima).abs()
    with field("numbers"):
        assert_rounded(
            actual, rounded(exact, read_error(exact, scales, minima), case.output_dtype), case.output_dtype,
            what="numbers", either=product * (1 + 4 * UNIT) > LARGEST,
        )


def _each(part: Tensor, case: GroupCase) -> Tensor:
    """The scale or the minimum of each element [B, H, T, D], float64."""
    return part.double().repeat_interleave(case.each, -1 if case.axis == -1 else -2)


def judge_round_trip(actual: Tensor, case: GroupCase) -> None:
    """actual: what `dequantize` reads from what `quantize(**case.inputs)` returned. It misses x by at most the error of
    quantization (`reconstructed.group_error`; a division may have DIVISION, once for the scale and once for the code),
    that of reading, that of the stored minimum, which may have fewer digits than x, and that of its own type."""
    exact = exact_groups(case)
    x = case.x.double()
    scale = exact.scale.high.masked_fill(exact.breaks, 0)
    scales, minima = (_each(case.of_lines(one), case) for one in (scale, exact.minimum))
    nan = _each(case.of_lines(exact.breaks), case) > 0
    maybe = _each(case.of_lines(~exact.breaks & ~exact.holds), case) > 0
    width = case.levels * scales
    lowest = _each(case.of_lines(exact.numbers.amin(-1)), case)
    error = group_error(scales, case.levels, case.scale_dtype) + 2 * DIVISION * width + (minima - lowest).abs()
    error = (error + gamma(2) * (width + minima.abs()) + 4 * FLUSH) * SLACK
    dtype = case.minimum_dtype
    right = rounded(x.masked_fill(nan, torch.nan), error.masked_fill(nan | ~error.isfinite(), 0), dtype)
    with field("numbers"):
        given = actual.where(~maybe, right.number.to(dtype)) if tuple(actual.shape) == tuple(x.shape) else actual
        assert_rounded(given, right, dtype, what="numbers", either=width * (1 + 4 * UNIT) > LARGEST)
        # The next code would be a step away.
        contested = ~nan & ~maybe & (scales > 0)
        sure = contested & ((actual.double() - x).abs() + error < scales * (1 - QUOTIENT))
        stats.decisions(int(contested.sum()), int(sure.sum()))


def assert_same_codes(actual: Tensor, expected: Tensor) -> None:
    """Codes that follow from given ones in integer arithmetic."""
    assert_dtype(actual, torch.int32, what="codes")
    assert_same(actual, expected, what="codes")
    stats.decisions(expected.numel(), expected.numel())


@dataclass(frozen=True)
class RoundTrip(Subject):
    """`dequantize` of what `quantize` returned, for the cases of `quantize`. The numbers are judged as choices: each of
    them says which code was chosen. passed: arguments that both functions have."""

    passed: tuple[str, ...] = ()
    variant: str = "round_trip"
    also: bool = True

    def result(self, module: Any, inputs: dict[str, Any]) -> Any:
        parts = module.quantize(**inputs)
        return module.dequantize(**parts._asdict(), **{name: inputs[name] for name in self.passed})


def subjects(
    cases: Callable[..., Any], coded: Callable[..., Any], *, extreme: tuple[str, ...], passed: tuple[str, ...] = ()
) -> Iterator[Subject]:
    """A method's `quantize`, its `dequantize`, and both. cases, coded: strategies of the arguments of each."""
    yield Subject(
        "quantize", cases, judge_quantized, numbers=("scale", "minimum"), choices=("codes",), sized="tokens",
        properties=kinds(LAYOUTS, tied=True, extreme=extreme),
    )
    found = kinds(NEAR, tied=False, extreme=extreme)
    yield Subject("dequantize", coded, judge_read, numbers=("numbers",), sized="tokens", properties=found)
    yield RoundTrip(
        "dequantize", cases, judge_round_trip, choices=("numbers",), sized="tokens", properties=found, passed=passed
    )


def replay(case: GroupCase, module: Any) -> Iterator[str]:
    """Judge a saved case again."""
    if isinstance(case, Coded):
        judge_read(module.dequantize(**case.inputs), case)
        yield "dequantize: right"
    else:
        judge_quantized(module.quantize(**case.inputs), case)
        yield "quantize: right"
