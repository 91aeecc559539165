"""Print the results of a SARIF file as GitHub's workflow commands, which annotate the lines of a pull request."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: SARIF's levels, and those of annotations.
LEVELS = {"error": "error", "warning": "warning", "note": "notice", "none": "notice"}


def escaped(text: str, *, of_property: bool = False) -> str:
    """A text as workflow commands take it."""
    for character in "%\r\n" + (":," if of_property else ""):
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def annotations(log: dict[str, Any]) -> Iterator[str]:
    """A workflow command for each result that is not suppressed."""
    for result in (one for run in log["runs"] for one in run["results"] if not one.get("suppressions")):
        known = {"title": f"kvtwin: {result['ruleId'].replace('_', ' ')}"}
        for place in (one["physicalLocation"] for one in result.get("locations", ())):
            known |= {"file": place["artifactLocation"]["uri"], "line": str(place["region"]["startLine"])}
        given = ",".join(f"{name}={escaped(text, of_property=True)}" for name, text in known.items())
        yield f"::{LEVELS[result['level']]} {given}::{escaped(result['message']['text'])}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    if path.is_file():  # otherwise the run has not started, and says why
        print("\n".join(annotations(json.loads(path.read_text(encoding="utf-8")))))
