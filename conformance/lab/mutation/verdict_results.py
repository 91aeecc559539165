"""The results of verdict_matrix.py: a line of JSON each while it runs, a stored file at the end, and their sums."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .kill_matrix import RUNS_WITH

HERE = Path(__file__).resolve().parent
STORED, REASONS = HERE / "verdict_matrix.json", HERE / "verdict_reasons.toml"
SCHEMA = 1

#: Statuses. wrong: found, under a property that fits; unfit: wrong under other properties alone; right and not covered:
#: not found; crashed: a signal ended the run, as it ends a user's; broken: the run ended without a verdict
#: for another reason; outside: no verdict on a CPU can see what the mutant changes; valid: not found, and the mutant is
#: a right implementation.
WRONG, UNFIT, RIGHT, NOT_COVERED, BROKEN, OUTSIDE = "wrong", "unfit", "right", "not covered", "broken", "outside"
CRASHED, VALID = "crashed", "valid"
STATUSES = (WRONG, UNFIT, RIGHT, NOT_COVERED, CRASHED, BROKEN, VALID, OUTSIDE)
#: What counts as judged, and what of it as found. An unchanged side that crashes is not right, which ends the command
#: with an error.
JUDGED, FOUND = (WRONG, UNFIT, RIGHT, NOT_COVERED, CRASHED, BROKEN), (WRONG, CRASHED)
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Row:
    """The verdict on a mutant, or on an unchanged side (what is empty).

    method: whose verdict; listed: the folder of its list. digest: of the substitution; sources: of kvtwin, the seed and
    the profile. properties: those found wrong; test, error: the first test that found a fitting one, and its exception.
    tests, cases, decisive: how many ran until then, and what they judged. seconds: wall time; cpu: of all its
    processes. detail: a message, or why there is no verdict.
    """

    name: str
    method: str
    side: str
    status: str
    listed: str = ""
    file: str = ""
    what: str = ""
    digest: str = ""
    sources: str = ""
    properties: tuple[str, ...] = ()
    test: str = ""
    error: str = ""
    tests: int = 0
    cases: int = 0
    decisive: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    detail: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Results with the same key need no second run."""
        return self.name, self.digest, self.sources

    @property
    def is_baseline(self) -> bool:
        return not self.what

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in ("", (), 0)}


def row_of(table: Mapping[str, Any]) -> Row:
    return Row(**{**table, "properties": tuple(table.get("properties", ()))})


def read(path: Path) -> list[Row]:
    """The rows of a file of lines. A last line that was cut off is left out, as is what a later line replaces."""
    if not path.is_file():
        return []
    rows: dict[str, Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = row_of(json.loads(line))
        except (ValueError, TypeError):
            continue
        rows[row.name] = row
    return list(rows.values())


def append(path: Path, row: Row) -> None:
    """Add a row to a file of lines, at once: a run may end at any time."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row.as_dict()) + "\n")


def store(rows: Iterable[Row], order: Sequence[str], *, seed: int, profile: str, path: Path = STORED) -> None:
    """Write the rows of mutants to the stored file, one line each, in the order of their names. What a stranger sees of
    those that were found, a message and a case, is left out."""
    by_name = {row.name: row for row in rows if not row.is_baseline}
    kept = [by_name[name] for name in order if name in by_name]
    tables = [(replace(row, detail="") if row.status == WRONG else row).as_dict() for row in kept]
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in RUNS_WITH}
    head = json.dumps({
        "schema": SCHEMA, "command": "python -m kvtwin.conformance.lab.mutation verdict --store", "seed": seed,
        "profile": profile, "versions": versions, "cpu_seconds": round(sum(row.cpu for row in kept)),
    }, indent=1).removesuffix("\n}")
    lines = ",\n  ".join(json.dumps(table) for table in tables)
    path.write_text(f'{head},\n "mutants": [\n  {lines}\n ]\n}}\n', encoding="utf-8")


def stored(path: Path = STORED) -> list[Row]:
    """The stored rows; none without a stored file."""
    if not path.is_file():
        return []
    return [row_of(table) for table in json.loads(path.read_text(encoding="utf-8"))["mutants"]]


def reasons(path: Path = REASONS) -> dict[str, tuple[str, str]]:
    """Why mutants are not found: VALID or OUTSIDE, and a sentence, by their names. One that has no reason is open."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    kinds = {"valid": VALID, "elsewhere": OUTSIDE}
    return {name: (kinds[kind], text) for kind, table in tables.items() for name, text in table.items()}


def explained(rows: Iterable[Row], why: Mapping[str, tuple[str, str]]) -> list[Row]:
    """The rows, with VALID or OUTSIDE for those that were not found and have a reason. why: as from `reasons`."""
    return [
        replace(row, status=why[row.name][0], detail=why[row.name][1])
        if row.name in why and row.status in (RIGHT, NOT_COVERED) else row
        for row in rows
    ]


# Sums ---------------------------------------------------------------------------------------------------------------


@dataclass
class Share:
    """How many mutants of a method were judged, and how many called wrong."""

    method: str
    statuses: Counter[str] = field(default_factory=Counter)
    properties: Counter[str] = field(default_factory=Counter)

    @property
    def judged(self) -> int:
        return sum(self.statuses[status] for status in JUDGED)

    @property
    def found(self) -> int:
        return sum(self.statuses[status] for status in FOUND)

    @property
    def with_valid(self) -> float:
        """The share of those found if right implementations count as not found."""
        return self.found / max(1, self.judged + self.statuses[VALID])

    @property
    def interval(self) -> tuple[float, float]:
        """The exact interval (Clopper and Pearson) of the share, for a random sample of mutants."""
        from scipy.stats import binomtest

        limits = binomtest(self.found, self.judged).proportion_ci(CONFIDENCE, method="exact")
        return float(limits.low), float(limits.high)

    def shown(self) -> str:
        """The share and its interval."""
        if not self.judged:
            return "-"
        low, high = self.interval
        return f"{self.found / self.judged:.1%} ({low:.0%} to {high:.0%})"


def shares(rows: Iterable[Row]) -> list[Share]:
    """The sums of mutants' rows by method, and of all of them at the end."""
    made: dict[str, Share] = {}
    everything = Share("all")
    for row in rows:
        if row.is_baseline:
            continue
        for share in (made.setdefault(row.method, Share(row.method)), everything):
            share.statuses[row.status] += 1
            share.properties.update(row.properties[:1] if row.status == WRONG else ())
    return [*(made[name] for name in sorted(made)), everything]


def not_found(rows: Iterable[Row]) -> list[Row]:
    """The mutants that were judged, and neither called wrong under a property that fits, nor crashed."""
    return [row for row in rows if not row.is_baseline and row.status in JUDGED and row.status not in FOUND]


def summary(rows: Sequence[Row]) -> str:
    """Sums per method, and the names of the mutants that were not found, that no verdict can judge, and of unchanged
    sides that are not right."""
    mutants = [row for row in rows if not row.is_baseline]
    width = max((len(row.method) for row in mutants), default=3)
    lines = [f"{'method':{width}}  wrong  judged  {'share (95 %)':22} unfit  right  not covered  crashed  "
             "broken  valid  outside  median s"]
    for share in shares(mutants):
        of_it = sorted(row.seconds for row in mutants if share.method in (row.method, "all") and row.status == WRONG)
        count = share.statuses
        lines.append(
            f"{share.method:{width}}  {count[WRONG]:5}  {share.judged:6}  {share.shown():22} {count[UNFIT]:5}  "
            f"{count[RIGHT]:5}  {count[NOT_COVERED]:11}  {count[CRASHED]:7}  "
            f"{count[BROKEN]:6}  {count[VALID]:5}  {count[OUTSIDE]:7}  "
            f"{of_it[len(of_it) // 2] if of_it else 0:8.1f}"
        )
    found = shares(mutants)[-1].properties
    lines += ["", "found by: " + (", ".join(f"{name} {count}" for name, count in found.most_common()) or "nothing")]
    errors = Counter(row.error for row in mutants if row.status == WRONG)
    lines += [f"exceptions: {', '.join(f'{name} {count}' for name, count in errors.most_common()) or 'none'}"]
    for row in rows:
        if row.is_baseline and row.status != RIGHT:
            lines += ["", f"the copy is not right: {row.name}: {row.status} {', '.join(row.properties)} {row.detail}"]
    apart = {title: [row for row in mutants if row.status == title] for title in (VALID, OUTSIDE)}
    for title, listed in {"not found": not_found(mutants), **apart}.items():
        lines += ["", f"{title}: {len(listed)}"] if listed else []
        for row in listed:
            said = f" [{', '.join(row.properties)}]" if row.properties else ""
            said += f": {row.detail}" if row.detail else ""
            lines.append(f"  {row.status:11} {row.method}: {row.name} ({row.what}){said}")
    return "\n".join(lines)
