"""The verdict as SARIF 2.1.0 (``--kv-sarif``): what is wrong, at the line of the function or state that is.

A wrong property that is no consequence of another is an error; its consequences, and methods that are not covered, are
warnings. What is right has no result, since readers such as GitHub's code scanning show each result as an alert.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..judge.properties import ALL, PAGES
from .report import write_whole
from .verdict import NOT_COVERED, WRONG, Judgement, MethodVerdict

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
SUFFIX = ".sarif"
#: The rules beside the properties: id -> what it says of a method.
NOT_JUDGED, OTHER_TESTS = "not_covered", "other_tests"
RULES = {
    **ALL, NOT_JUDGED: "enough of it was judged for a verdict", OTHER_TESTS: "tests that judge no single property pass",
}
TREE = Path(__file__).resolve().parents[2]  # an installed kvtwin has no docs/ there
ROOT = "%SRCROOT%"
#: What holds the function of a decorated one: functools.wraps, triton.jit, torch.library.custom_op.
INNER = ("__wrapped__", "fn", "_init_fn")

Place = tuple[Path, int]
#: method -> where to look for its functions, in order.
Modules = Callable[[str], Sequence[Any]]


def write_sarif(
    verdicts: Mapping[str, MethodVerdict], path: Path, *, modules: Modules, folder: Path, exit_status: int
) -> None:
    """Write the verdicts to `path`. folder: places in it are relative to it."""
    made = build_sarif(verdicts, modules=modules, folder=folder, exit_status=exit_status)
    write_whole(path, json.dumps(made, indent=1, allow_nan=False) + "\n")


def build_sarif(
    verdicts: Mapping[str, MethodVerdict], *, modules: Modules, folder: Path, exit_status: int
) -> dict[str, Any]:
    """The SARIF log of one run, as plain values."""
    results = [
        {**result, "ruleIndex": list(RULES).index(result["ruleId"]),
         "locations": _locations(modules(one.method), result["properties"], folder)}
        for one in verdicts.values() for result in _results(one)
    ]
    driver = {
        "name": "kvtwin", "version": importlib.metadata.version("kvtwin"),
        "rules": [_rule(name, says) for name, says in RULES.items()],
    }
    run = {
        "tool": {"driver": driver}, "results": results, "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": True, "exitCode": int(exit_status)}],
        "originalUriBaseIds": {ROOT: {"uri": folder.resolve().as_uri() + "/"}},
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(name: str, says: str) -> dict[str, Any]:
    """A property, and the page that explains it: a link to it where the source tree is there."""
    page = PAGES.get(name, "docs/how-to/test-your-kernel.md#the-verdict")
    file, _, section = page.partition("#")
    rule = {"id": name, "shortDescription": {"text": says}, "help": {"text": f"kvtwin's documentation: {page}"}}
    there = (TREE / file).is_file()
    return {**rule, "helpUri": f"{(TREE / file).as_uri()}#{section}"} if there else rule


def _results(found: MethodVerdict) -> Iterator[dict[str, Any]]:
    """What is wrong with a method; or that it is not covered."""
    for name, judged in found.properties.items():
        if judged.verdict == WRONG:
            yield _wrong(found.method, name, judged)
    if found.others["failed"]:
        count = found.others["failed"]
        yield _result(OTHER_TESTS, "error", f"{found.method}: {count} failed tests judge no single property", found)
    if found.verdict == NOT_COVERED:
        open_ = ", ".join(f"{name} ({_why(found, name)})" for name in found.open)
        yield _result(NOT_JUDGED, "warning", f"{found.method} is not covered: {open_}", found)


def _why(found: MethodVerdict, name: str) -> str:
    judged = found.properties[name.replace(" ", "_")]
    return judged.why or judged.verdict


def _wrong(method: str, name: str, judged: Judgement) -> dict[str, Any]:
    first = judged.findings[0]
    text = f"{first.get('subject') or method}: {name.replace('_', ' ')} is wrong: {first['message']}"
    text += f"\nIt may follow from {judged.follows.replace('_', ' ')}." if judged.follows else ""
    text += "".join(f"\n{key}: {first[key]}" for key in ("case", "replay") if first.get(key))
    known = {key: first[key] for key in ("subject", "field", "dtype", "case", "replay") if first.get(key)}
    made = {
        "ruleId": name, "level": "warning" if judged.follows else "error", "message": {"text": text},
        "properties": {"method": method, **known},
    }
    expected = {"kind": "external", "justification": "--kv-xfails expects it"}
    return {**made, "suppressions": [expected]} if judged.expected else made


def _result(rule: str, level: str, text: str, found: MethodVerdict) -> dict[str, Any]:
    return {"ruleId": rule, "level": level, "message": {"text": text}, "properties": {"method": found.method}}


def _locations(modules: Sequence[Any], known: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Where the function or state is that a result is about; the method's module if that is not known; else nowhere."""
    name = str(known.get("subject", "")).removeprefix(f"{known['method']}.").partition("[")[0]
    functions = [getattr(one, name, None) for one in modules]
    found = next((place for place in map(place_of, [*functions, *modules]) if place is not None), None)
    if found is None:
        return []
    (path, line), folder = found, folder.resolve()
    where = {"uri": path.as_uri()}
    if path.is_relative_to(folder):
        where = {"uri": quote(path.relative_to(folder).as_posix()), "uriBaseId": ROOT}
    return [{"physicalLocation": {"artifactLocation": where, "region": {"startLine": line}}}]


def place_of(found: Any) -> Place | None:
    """The file and line of a function, class or module, inside of its decorators; None if it has none."""
    for _ in range(20):  # decorators around it
        inner = next((vars(found)[name] for name in INNER if name in getattr(found, "__dict__", ())), None)
        inner = found.func if isinstance(found, functools.partial) else inner
        if inner is None:
            break
        found = inner
    try:
        path = inspect.getsourcefile(found)
        line = 1 if inspect.ismodule(found) else inspect.getsourcelines(found)[1]
    except (TypeError, OSError):  # built in, or without a source
        return None
    return None if path is None else (Path(path).resolve(), line)
