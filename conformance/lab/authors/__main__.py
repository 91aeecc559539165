"""``python -m kvtwin.conformance.lab.authors``: see the package."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from . import lane
from .checkout import COMMIT_FILE, Project
from .projects import everyone

FOLDER = "KVTWIN_AUTHORS"
SCHEMA = 1
VERSIONS = ("torch", "triton", "numpy")


def main(arguments: Sequence[str] | None = None, projects: Sequence[Project] | None = None) -> int:
    """Exit code 0 if no comparison fails, 1 if one does, 2 if nothing could be compared. projects: by default all."""
    projects = everyone() if projects is None else projects
    names = [project.name for project in projects]
    parser = argparse.ArgumentParser(
        prog="python -m kvtwin.conformance.lab.authors",
        description="Compare our references with the authors' own code.",
        epilog=f"{FOLDER} is the folder with their checkouts: {', '.join(names)}. In a checkout without .git, the file "
        f"{COMMIT_FILE} states the commit.",
    )
    parser.add_argument("only", nargs="*", metavar="PROJECT", help="compare these; by default all")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result to a file")
    options = parser.parse_args(arguments)
    for name in options.only:
        if name not in names:
            parser.error(f"no project {name!r}: expected some of {', '.join(names)}")
    root = os.environ.get(FOLDER, "")
    if not Path(root).is_dir() or not root:
        parser.error(f"{FOLDER} must name the folder with the authors' checkouts, got {root or 'nothing'}")
    # The comparison runs on the CPU, LongFlow's kernel in Triton's interpreter.
    os.environ["TRITON_INTERPRET"] = "1"
    return report([one for one in projects if not options.only or one.name in options.only], Path(root), options.json)


def report(projects: Sequence[Project], root: Path, path: Path | None) -> int:
    """Compare, print, write the result to `path`. Returns the exit code."""
    known, outcomes = lane.known_readings(), []
    for outcome in lane.run(projects, root):
        outcomes.append(outcome)
        print("\n".join(lane.lines(outcome, known)), flush=True)
    if path is not None:
        path.write_text(json.dumps(document(outcomes, known), indent=1) + "\n", encoding="utf-8")
    there = [one for one in outcomes if one.status in (lane.COMPARED, lane.BROKEN)]
    faults = [f"{one.project.name}: {fault}" for one in outcomes for fault in one.faults(known)]
    total = sum(each.plain.judged for one in outcomes for each in one.comparisons)
    print(f"\n{len(there)} of {len(outcomes)} projects, {total:,} decisions and numbers, {len(faults)} failures")
    print("".join(f"  {fault}\n" for fault in faults), end="")
    if not there:
        print(f"Nothing was compared: there is no checkout in {root}", file=sys.stderr)
        return 2
    return int(bool(faults))


def document(outcomes: Sequence[lane.Outcome], known: set[str]) -> dict[str, object]:
    """What --json writes. The documentation's page is made from such a file, `authors.json` beside this one."""
    versions = {"python": platform.python_version()} | {name: version(name) for name in VERSIONS}
    return {
        "schema": SCHEMA, "date": datetime.date.today().isoformat(), "versions": versions,
        "projects": lane.as_json(outcomes, known),
    }


if __name__ == "__main__":
    sys.exit(main())
