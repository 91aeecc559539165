"""What a failed test found: which property is wrong, of which function and field, in which case."""

from __future__ import annotations

from typing import Any

import pytest

from .impl import Twins, environment_limit


def of(item: pytest.Item, error: BaseException, judged: str | None, twins: Twins) -> dict[str, Any]:
    """The finding of a failed test, as plain values. judged: the property of the test; None if it has none."""
    # These import torch, which a run that only collects tests does not need.
    from ..cases import case as cases
    from ..cases import failures
    from ..judge import attribution, compare, stats
    from ..judge.subjects import Subject

    error = _unwrapped(error)
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    subject, field = parameters.get("subject"), parameters.get("field")
    field = field if isinstance(field, str) else None
    case = cases.latest()
    found: dict[str, Any] = {
        "property": judged, "subject": None if subject is None else str(subject), "field": field,
        "error": type(error).__name__, "message": _first_lines(error),
        "case": None if case is None else repr(case), "replay": failures.last_command(),
    }
    of_bound, dtype = getattr(error, "of_bound", None), getattr(case, "dtype", None)
    if of_bound is not None and dtype is not None:
        found |= {"of_bound": of_bound, "dtype": str(dtype).removeprefix("torch."), "sizes": stats.sizes_of(case)}
    if judged is None or case is None or not isinstance(subject, Subject):
        return found
    found["choice"] = field in subject.choices
    if isinstance(error, compare.WrongTie):
        return found | {"property": "ties"}
    if field is None:
        # Without an assertion, the call itself failed, before anything was compared.
        return found if isinstance(error, AssertionError) else found | {"property": "accuracy"}
    if not isinstance(error, Exception):
        return found
    of_state = getattr(error, "of_state", False)
    if of_state and judged in ("accuracy", "decisions"):
        judged = "state"
    found["property"] = attribution.property_of(
        subject, field, case, subject.module(twins.optimized), judged, type(error), of_state=of_state
    )
    return found


def _unwrapped(error: BaseException) -> BaseException:
    """The error that a test raised, of those that Hypothesis reports in a group: the first that is no limit of the
    interpreter."""
    inside = getattr(error, "exceptions", ())
    return _unwrapped(next((one for one in inside if environment_limit(one) is None), inside[0])) if inside else error


def _first_lines(error: BaseException, most: int = 4) -> str:
    """The message without the command that replays the case."""
    lines = [line for line in str(error).splitlines() if "replay: kvtwin" not in line]
    return "\n".join(lines[:most]) or type(error).__name__
