"""Run the comparisons of the projects that are there, and say what came out."""

from __future__ import annotations

import contextlib
import io
import textwrap
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import readings
from .checkout import COMMIT_FILE, Checkout, Project
from .comparison import Comparison

#: What can be said of a project.
COMPARED, NOT_THERE, NO_CHECKOUT, BROKEN = "compared", "not there", "no checkout", "broken"


@dataclass
class Outcome:
    """A project, what can be said of it, and what was compared."""

    project: Project
    status: str
    note: str = ""
    commit: str = ""
    comparisons: list[Comparison] = field(default_factory=list)

    def faults(self, known: set[str]) -> list[str]:
        """Why the lane fails here; `known`: the readings that there are, "method.id"."""
        broken = [self.note] if self.status == BROKEN else []
        if self.status == COMPARED and not self.comparisons:
            broken = ["nothing was compared"]
        return broken + [f"{one.what}: {one.fault(known)}" for one in self.comparisons if one.fault(known)]


def known_readings() -> set[str]:
    """All readings of readings.toml files, "method.id"."""
    return {f"{one.method}.{one.id}" for one in readings.load()}


def run(projects: Sequence[Project], root: Path) -> Iterator[Outcome]:
    """The outcomes of the projects, in their order. What the authors' code prints is not shown."""
    for project in projects:
        yield _run(project, root)


def _run(project: Project, root: Path) -> Outcome:
    folder = root / project.name
    if not folder.exists():
        return Outcome(project, NOT_THERE, project.clone(root))
    lacking = [name for name in project.files if not (folder / name).is_file()]
    if lacking:
        return Outcome(project, NO_CHECKOUT, f"{folder} has no {', '.join(lacking)}: expected {project.repository}")
    checkout = Checkout(folder)
    outcome = Outcome(project, COMPARED, _about(checkout.commit, project), checkout.commit)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome.comparisons += project.compare(checkout)
    except Exception as error:  # whatever others' code raises is a result
        *_, at = traceback.extract_tb(error.__traceback__)
        outcome.status = BROKEN
        outcome.note = f"{type(error).__name__}: {error} ({Path(at.filename).name}, line {at.lineno})"
    return outcome


def _about(commit: str, project: Project) -> str:
    """How the commit relates to the one that the comparison was written for."""
    if not commit:
        return f"commit unknown: {COMMIT_FILE} in the folder can state it"
    if commit != project.commit:
        return f"commit {commit[:7]}, another than {project.commit[:7]}, for which the comparison was written"
    return f"commit {commit[:7]}"


def lines(outcome: Outcome, known: set[str]) -> list[str]:
    """What the terminal shows of a project."""
    status = "" if outcome.status == COMPARED else f"{outcome.status}: "
    found = [line for one in outcome.comparisons for line in _line(one, known)]
    return [f"{outcome.project.name}: {status}{outcome.note}", *found]


def _line(one: Comparison, known: set[str]) -> list[str]:
    differ = f"{one.plain.differ:,} differ" if one.plain.differ else "all agree"
    text = f"{one.what}: {one.plain.judged:,} {one.unit}, {differ}"
    if one.readings:
        text += f" (readings {', '.join(one.readings)}); {one.under.judged:,} with {one.how}: "
        text += f"{one.under.differ:,} differ" if one.under.differ else "all agree"
    fault = one.fault(known)
    return textwrap.wrap(
        f"{'FAILS, ' + fault + ': ' if fault else ''}{text}", 118, initial_indent="  ", subsequent_indent="      "
    )


def as_json(outcomes: Sequence[Outcome], known: set[str]) -> dict[str, Any]:
    """The result by project: its repository, status and commit, and its comparisons."""
    return {
        one.project.name: {
            "repository": one.project.repository, "status": one.status, "note": one.note, "commit": one.commit,
            "comparisons": [
                {
                    "what": each.what, "unit": each.unit, "judged": each.plain.judged, "differ": each.plain.differ,
                    "readings": list(each.readings), "how": each.how, "judged_under": each.under.judged,
                    "differ_under": each.under.differ, "fault": each.fault(known),
                }
                for each in one.comparisons
            ],
        }
        for one in outcomes
    }
