"""What a failed test found: which property is wrong, of which function and field, in which case."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from . import survival, wording
from .fair_play import Unfair
from .impl import Twins, environment_limit

PACKAGE = __package__.removesuffix(".harness")
FOLDER = Path(__file__).resolve().parents[1]


def finding_of(item: pytest.Item, error: BaseException, judged: str | None, twins: Twins) -> dict[str, Any]:
    """The finding of a failed test, as plain values. judged: the property of the test; None if it has none."""
    # These import torch, which a run that only collects tests does not need.
    from .. import stats
    from ..cases import case as cases
    from ..cases import failures
    from ..judge import attribution, compare, unchanged
    from ..judge.subjects import Subject

    error = _unwrapped(error)
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    subject, field = parameters.get("subject"), parameters.get("field")
    field = field if isinstance(field, str) else getattr(error, "field", None)
    case = cases.latest()
    found: dict[str, Any] = {
        "property": judged, "subject": None if subject is None else str(subject), "field": field,
        "error": type(error).__name__, "message": _first_lines(error),
        "case": None if case is None else repr(case), "replay": failures.last_command(),
    }
    if isinstance(error, survival.EndsCall | Unfair):
        found["property"] = error.shows
    tested = subject if isinstance(subject, Subject) else None
    # A replay judges the case, and does not repeat what a test asserts of its own.
    if found["replay"] is None and case is not None and (tested or not isinstance(error, AssertionError)):
        with failures.judging(str(tested) if tested else None):
            found["replay"] = failures.save_latest()
    found["replay"] = found["replay"] or rerun(item)
    of_bound, dtype = getattr(error, "of_bound", None), getattr(case, "dtype", None)
    if of_bound is not None and dtype is not None:
        found |= {"of_bound": of_bound, "dtype": str(dtype).removeprefix("torch."), "sizes": stats.sizes_of(case),
                  "unbounded": getattr(error, "unbounded", None)}
    if isinstance(error, survival.EndsCall | Unfair):
        return found
    if wording.differs(error):
        return found | {"error": "NotRepeatable", "property": judged and "repeatability"}
    if judged is None or case is None or tested is None:
        # Without a subject the case cannot be made simpler: the truth may be missed for the reasons of any property.
        of_truth = isinstance(error, compare.Mismatch) and error.field is not None
        return found | {"unusual": True} if of_truth else found
    found["choice"] = field in tested.choices
    if isinstance(error, compare.Mismatch) and found["choice"]:
        found["wrong"] = error.wrong
    if isinstance(error, compare.WrongTie):
        return found | {"property": "ties"}
    if isinstance(error, unchanged.ChangedInput) and field is None:
        return found | {"property": "repeatability"}
    if field is None:
        # Without an assertion, the call itself failed, before anything was compared.
        return found if isinstance(error, AssertionError) else found | {"property": "accuracy"}
    if not isinstance(error, Exception):
        return found
    of_state = getattr(error, "of_state", False)
    if of_state and judged in ("accuracy", "decisions"):
        judged = "state"
    found["property"] = attribution.property_of(
        tested, field, case, tested.module(twins.optimized), judged, type(error), of_state=of_state,
        wrong=found.get("wrong"),
    )
    if attribution.fails(tested, field, case, tested.module(twins.reference), type(error)):
        found["checker"] = True
    return found


def rerun(item: pytest.Item) -> str | None:
    """The command that runs a test of this package again, with the same implementation and examples; None for kvtwin's
    own implementation, and for tests outside of this package."""
    from hypothesis import core, settings

    implementation, place = item.config.getoption("kv_impl"), item.path.resolve()
    if implementation is None or FOLDER not in place.parents:
        return None
    module = ".".join((PACKAGE, *place.relative_to(FOLDER).with_suffix("").parts))
    options = [f"--kv-impl={implementation}", f"--kv-device={item.config.getoption('kv_device')}",
               f"--hypothesis-profile={settings.get_current_profile_name()}"]
    options += [] if core.global_force_seed is None else [f"--hypothesis-seed={core.global_force_seed}"]
    return shlex.join(["python", "-m", "pytest", "--pyargs", f"{module}::{item.nodeid.split('::', 1)[1]}", *options])


def test_id(item: pytest.Item) -> str:
    """The id of a test relative to this package, whatever pytest's root folder is."""
    place = item.path.resolve()
    if FOLDER not in place.parents:
        return item.nodeid
    return "::".join((place.relative_to(FOLDER).as_posix(), *item.nodeid.split("::")[1:]))


def _unwrapped(error: BaseException) -> BaseException:
    """The error that a test raised, of those that Hypothesis reports in a group: the first that is neither a limit of
    the interpreter nor Hypothesis' own."""
    inside = getattr(error, "exceptions", ())
    if not inside:
        return error
    return _unwrapped(min(inside, key=lambda one: (environment_limit(one) is not None, wording.differs(one))))


def _first_lines(error: BaseException, most: int = 4) -> str:
    """The message without the command that replays the case, and with the class of an error that no judge raises."""
    lines = [line for line in wording.plainly(error, FOLDER).splitlines() if "replay: kvtwin" not in line]
    return "\n".join(lines[:most])
