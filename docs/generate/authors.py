"""The page of the comparison with the authors' own code, from conformance/lab/authors/authors.json."""

from __future__ import annotations

import json
from typing import Any

from .markdown import escape, markdown_table
from .stored import read

ABOUT = """# Beside the authors' own code

`python -m tox -e authors` runs the code that the authors of the papers released, unchanged, beside kvtwin's
references: both sides get the same numbers, on the CPU, and every token that is kept or evicted, every code of a
quantizer and every output is compared. Of the released code, the functions and classes that decide are loaded from
checkouts; what only runs a model is replaced by stand-ins. Nothing of it is part of kvtwin.

```sh
git clone https://github.com/FasterDecoding/SnapKV /path/SnapKV      # one folder per project, named like the repository
KVTWIN_AUTHORS=/path python -m tox -e authors
```

A project that is not there is named, with the commands that bring it. If a folder is not a git checkout, a file
`COMMIT` in it can state the commit. Arguments after `--` select projects.

A *decision* is whether an eviction keeps a token (or a page). The tokens are random, so no two scores are equal, and
the order in which `topk` returns equal scores does not matter. *Outputs* agree if they are within the bound of float32
arithmetic, in which the authors' softmax is computed. Where the two sides differ, the table names the
[readings](../../explanation/ledger.md#readings) that explain it, and the count with both sides under these readings.
A difference that no reading explains fails, and so does one that a reading leaves over. The two counts can differ: a
token counts at an eviction if one of the two caches still has it.
"""


def authors_page(result: Any = None) -> str:
    """result: the content of authors.json; by default the stored one."""
    result = json.loads(read("conformance/lab/authors/authors.json")) if result is None else result
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    parts = [ABOUT, summary(result), f"Run on {result['date']} with {versions}.\n"]
    for name, project in sorted(result["projects"].items(), key=lambda item: item[0].lower()):
        where = project["repository"]
        parts.append(f"## {name}\n\n[{where.removeprefix('https://')}]({where}), {escape(project['note'])}.\n")
        if project["comparisons"]:
            rows = [row(one) for one in project["comparisons"]]
            parts += [markdown_table(["what", "compared", "differ", "explained by", "under that reading"], rows), ""]
    return "\n".join(parts)


def summary(result: Any) -> str:
    """What all projects come to, in one sentence."""
    found = [one for project in result["projects"].values() for one in project["comparisons"]]
    there = sum(bool(project["comparisons"]) for project in result["projects"].values())
    judged, differ = (sum(one[name] for one in found) for name in ("judged", "differ"))
    plain = [one for one in found if not one["readings"]]
    left = sum(one["differ_under"] for one in found) + sum(one["differ"] for one in plain)
    return (
        f"Of {judged:,} decisions and numbers of {there} projects, {differ:,} differ with kvtwin's defaults, all for "
        f"the readings that the tables name; under these readings, {left or 'none'} of them.\n"
    )


def row(one: Any) -> list[str]:
    """A comparison as a row of its project's table."""
    explained = ", ".join(f"[`{name}`](../methods/{name.split('.')[0]}.md)" for name in one["readings"])
    under = f"{one['differ_under']:,} of {one['judged_under']:,}: {escape(one['how'])}" if one["readings"] else ""
    return [escape(one["what"]), f"{one['judged']:,} {one['unit']}", f"{one['differ']:,}", explained, under]
