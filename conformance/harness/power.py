"""What a verdict rests on, and what it would have missed.

A property is right because n things were judged and none of them was wrong: elements, decisions, launches or cases. An
implementation that is wrong with probability p in each of them, independently, passes with probability (1 - p)^n. The
*limit* is the p for which that is 5 %: any implementation that is wrong more often is found with a probability of at
least 95 %. It is the upper limit of Clopper and Pearson, which is exact. It says nothing of cases unlike those that
were drawn, and less if errors come together: a wrong row has many wrong elements.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..capabilities import DTYPES, FP8
from .wording import counted_noun

if TYPE_CHECKING:
    from ..stats import JudgedCase

CONFIDENCE = 0.95
#: What a property's verdict counts; cases, if it has none of it. Only a decisive decision can be found wrong.
UNITS = {
    "accuracy": "elements", "decisions": "decisive", "ties": "decisive", "traces": "decisive",
    "repeatability": "launches",
}
CASES = "cases"
ORDER = (*DTYPES, *FP8)
#: Wrong arguments are listed, not drawn: their number says nothing of others.
WITHOUT_LIMIT = ("bad_input",)
#: Under the page's tables.
ABOUT = (
    "Wrong (95 %): an implementation that is wrong at least as often as this, in cases like these, would have been "
    "found with a probability of at least 95 %."
)
#: Said of a case in which the reference fails as well.
BLAMES_US = "the reference fails in such a case, too: look for the mistake in the checker, or in the reference"
#: Under a verdict on a CPU.
ON_A_CPU = (
    "on a CPU, sizes are the interpreter's; only a GPU shows races, its rounding, large sizes: "
    "docs/explanation/gpu-findings"
)


def unit_of(judged: str, counts: Mapping[str, int]) -> str:
    """What the verdict on a property counts, of `counts` by unit."""
    unit = UNITS.get(judged, CASES)
    return unit if counts[unit] else CASES


def counts(unit: str, count: int) -> str:
    """What a verdict counts, as words: "123 k elements", "335 decisive", "1 case"."""
    return f"{short(count)} {unit.removesuffix('s') if count == 1 else unit}"


def upper_limit(wrong: int, judged: int, confidence: float = CONFIDENCE) -> float:
    """The largest probability of being wrong with which `wrong` or fewer of `judged` are wrong with a probability of at
    least 1 - confidence (Clopper and Pearson, one-sided): 1 - (1 - confidence)^(1 / judged) if none is.

    ValueError if `wrong` is not in 0..judged, or `judged` is 0.
    """
    if not 0 <= wrong <= judged or not judged:
        raise ValueError(f"wrong must be in 0..judged, and judged at least 1, got {wrong} and {judged}")
    if wrong == judged:
        return 1.0
    if not wrong:
        return -math.expm1(math.log1p(-confidence) / judged)
    from scipy.stats import beta  # takes most of a second to import

    return float(beta.ppf(confidence, wrong + 1, judged - wrong))


def limit_of(judged: str, unit: str, counts: Mapping[str, int]) -> float | None:
    """The limit of a property of which nothing was found wrong, in its unit; None if it has none."""
    if judged in WITHOUT_LIMIT or not counts[unit]:
        return None
    return upper_limit(0, counts[unit])


def fewer_than(limit: float | None) -> str:
    """A limit as "1 in 4,270", rounded down to three digits; "" for None, and for more than 1 in 2, which says nothing.
    """
    found = 0.0 if not limit else 1 / limit
    return f"1 in {short(_rounded_down(found))}" if found >= 2 else ""


def short(count: int) -> str:
    """A count as text, from 100,000 on rounded down to three digits: "99,999", "123 k", "1.23 M"."""
    if count < 100_000:
        return f"{count:,}"
    unit, letter = (1000, "k") if count < 10**6 else (10**6, "M") if count < 10**9 else (10**9, "G")
    value = _rounded_down(count) / unit
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f} {letter}"


def _rounded_down(number: float) -> int:
    """To three significant digits."""
    digits = 10 ** max(0, math.floor(math.log10(number)) - 2)
    return math.floor(number / digits) * digits


def described_cases(judged: Iterable[JudgedCase]) -> dict[str, Any]:
    """The dtypes and layouts of judged cases, with how many have each; the number of their rows, and their largest
    number of slots or tokens."""
    found = list(judged)
    return {
        "dtypes": dict(Counter(one.dtype for one in found if one.dtype)),
        "layouts": dict(Counter(one.layout for one in found if one.layout)),
        "rows": sum(one.rows for one in found), "slots": max((one.slots for one in found), default=0),
    }


def sizes(one: Mapping[str, Any]) -> str:
    """What `described` found, as words: "float32 12, float16 8; up to 48 slots; 31 rows; layouts: contiguous 20"."""
    parts = [_counts(one["dtypes"])] if one["dtypes"] else []
    parts += [f"up to {counted_noun(one['slots'], 'slot')}"] if one["slots"] else []
    parts += [counted_noun(one["rows"], "row")] if one["rows"] else []
    parts += [f"layouts: {_counts(one['layouts'])}"] if one["layouts"] else []
    return "; ".join(parts)


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(found.items(), key=_order))


def _order(pair: tuple[str, int]) -> tuple[int, int, str]:
    """dtypes as `Capabilities` lists them; anything else by how frequent it is."""
    name, count = pair
    return ORDER.index(name) if name in ORDER else len(ORDER), -count, name
