"""Finding the property that a failing case is about.

A case may be far from ordinary in several ways: logits beyond exp's range in a transposed tensor with free slots. Its
failure belongs to the property whose distinction is needed for the failure. So the field is judged again in cases that
keep the distinction of one property, or of none; each of them with several seeds and sizes, since a single ordinary
case may be right by chance. A failure that is rare even with a distinction belongs to accuracy or decisions, and so
does one that ordinary cases show too, unless it is rare there and regular with the distinction. All limits are numbers
of cases, so that the answer does not depend on how fast the machine is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from .. import capabilities, stats
from ..cases import failures
from ..cases.case import Case
from . import compare
from .subjects import DISTINCTIONS, Subject, neutral
from .unchanged import ChangedInput

#: A subject's sizes, by the name of the case's field: beside its own size, a failure is sought in small ones.
SIZES = {"slots": (2, 3, 5, 9), "tokens": (4, 6, 9)}
SEEDS = 4
#: So many failures of ordinary cases are not rare, and this share of the cases is regular.
MANY, REGULAR = 4, 0.75
#: What ordinary cases are judged for; and so many heads of all rows, and tokens, are many.
CORE = ("accuracy", "decisions")
MANY_HEADS, MANY_TOKENS = 16, 512
#: A fault that depends on other rows shows in more of the rows of a case than this share.
FEW_ROWS = 0.25


def property_of(
    subject: Subject, name: str, case: Case, module: Any, own: str, error: type[BaseException] = compare.Mismatch, *,
    of_state: bool = False, wrong: int | None = None,
) -> str:
    """The property of which field `name` of the subject is wrong in `case`. own: that of the test that found it.

    error: the type of the error that it raised. "accuracy" or "decisions" if ordinary cases raise it as well, or
    "state" if it is about what a state holds (`compare.Mismatch.of_state`), or "repeatability" if it is about inputs
    that a call changed. wrong: how many decisions of the case were wrong, None if it is not known.
    """
    base = "state" if of_state else "decisions" if name in subject.choices else "accuracy"
    base = "repeatability" if issubclass(error, ChangedInput) else base
    if case.content == "given":  # made from tensors: there is nothing to vary
        return own

    def failing(simpler: Case, enough: int) -> int:
        return _failures(subject, name, simpler, module, error, enough)

    ordinary = failing(neutral(subject, case), MANY)
    if ordinary >= MANY:
        return base
    distinct = [one for one in DISTINCTIONS if one != "decisions" and _has(subject, case, one)]
    regular = math.ceil(REGULAR * len([*_variants(case)]))
    if ordinary:  # of more rows, more fail
        distinct = [one for one in distinct if one != "independence"]
    many = case.batch * case.key_value_heads * case.group >= MANY_HEADS and (stats.slots_of(case) or 0) >= MANY_TOKENS
    for one in sorted(distinct, key=lambda one: one != own):
        # Of many heads over many tokens a rare failure needs no other reason than their number.
        rare = own in CORE and one == "independence" and many
        enough = regular if ordinary or rare else 2
        simpler = neutral(subject, case, one)
        found = failing(simpler, enough)
        if found >= enough and one == "independence" and own in CORE and name in subject.choices:
            # What is chosen by the sum over heads depends on all heads, and on no other row. One row of a few is right
            # by chance if few of many rows are wrong.
            few = wrong is not None and wrong <= FEW_ROWS * case.batch
            return base if few or failing(dataclasses.replace(simpler, batch=1), 2) > 1 else one
        if found >= enough:
            return one
        if found and not ordinary:  # rare: other cases with this distinction are right
            return base
    return base if ordinary else own


def _has(subject: Subject, case: Case, one: str) -> bool:
    """True if the case has the distinction of this property. Contents distinguish two properties, ties and extreme
    numbers."""
    if one in ("ties", "extreme_numbers"):
        return getattr(case, "content", None) in subject.properties.get(one, {}).get("content", ())
    return neutral(subject, case, one) != neutral(subject, case)


def _failures(
    subject: Subject, name: str, case: Case, module: Any, expected: type[BaseException], enough: int
) -> int:
    """In how many of the case's variants judging the field raises the expected error, up to `enough`."""
    count = 0
    for variant in _variants(case):
        count += fails(subject, name, variant, module, expected)
        if count >= enough:
            break
    return count


def fails(subject: Subject, name: str, case: Case, module: Any, expected: type[BaseException]) -> bool:
    """True if judging field `name` of a module's result raises the expected error. Nothing is recorded or saved."""
    try:
        with stats.collect(), failures.not_saved():
            subject.check(module, case, name)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return isinstance(error, expected)
    return False


def _variants(case: Case) -> Iterator[Case]:
    names = {one.name for one in dataclasses.fields(case)}
    yield case
    for seed in range(SEEDS):
        yield dataclasses.replace(case, seed=seed)
        for name, sizes in SIZES.items():
            if name in names:
                for size in filter(_declared, sizes):
                    yield resized(dataclasses.replace(case, seed=seed), name, size)


def _declared(size: int) -> bool:
    """True if the implementation takes so many slots."""
    can = capabilities.current()
    return size % can.slots_multiple_of == 0 and (can.max_slots is None or size <= can.max_slots)


def resized(case: Case, name: str, size: int) -> Case:
    """The case with another number of slots or tokens; what depends on it is reduced."""
    changes: dict[str, Any] = {name: size}
    for other, least in (("queries", 1), ("observers", 1), ("budget", 1), ("keep", 1)):
        if hasattr(case, other):
            changes[other] = max(least, min(getattr(case, other), size - 1))
    return dataclasses.replace(case, **changes)
