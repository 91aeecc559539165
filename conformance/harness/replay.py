"""Judge a saved case again: ``kvtwin replay FILE``.

A failing test saves its case (cases/failures.py) and prints this command.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from .. import capabilities
from ..cases import case as cases
from ..cases import saved
from ..cases.state_trace import StateTrace
from ..command_line import Parser, words
from ..discovery import OPTIMIZED
from ..judge import calls, checkers, lockstep, subjects
from ..judge.fields import MissingField
from ..judge.subjects import Subject
from ..progress import bar, say

PROG = "kvtwin replay"


def judged_fields(case: cases.Case, side: Any, subject: Subject) -> Iterator[tuple[str, str | None]]:
    """Judge every field of the function or state that the case was saved for, then, of a function, what calls and rows
    do to each other: (what is judged, what is wrong or None)."""
    module = subject.module(side)
    for name in subject.fields:
        try:
            subject.check(module, case, name)
        except Exception as error:
            yield f"{subject}.{name}", message_of(error).removeprefix(f"{name}: ")
        else:
            yield f"{subject}.{name}", None
    if isinstance(subject, subjects.StateSubject) or case.content == "given":  # no other contents can be drawn
        return
    checks = {"the same call again": calls.leaves_nothing_behind}
    if subject.batched and case.batch > 1:
        checks["rows apart from each other"] = calls.rows_are_apart
    for what, check in checks.items():
        try:
            check(subject, module, case)
        except Exception as error:
            yield f"{subject}, {what}", message_of(error)
        else:
            yield f"{subject}, {what}", None


def message_of(error: BaseException) -> str:
    """The message of an error, with its class if the implementation raised it, not the judge."""
    judges = isinstance(error, AssertionError | MissingField) or type(error).__name__ == "NotProvided"
    return str(error) if judges else f"{type(error).__name__}: {error}"


def judge_case(case: cases.Case, side: Any) -> Iterator[str]:
    """Judge a case with every check that applies to it. Yields a line per passed check; raises AssertionError.

    side: the implementation under test, like `twins.optimized`.
    """
    if isinstance(case, StateTrace):
        summary = lockstep.run(case, checkers.module(side, checkers.pair(case.method)))
        yield f"lockstep of {case.method}: right, {summary}"
    for name, judge in checkers.every().items():
        if type(case) in getattr(judge, "CASES", ()):
            yield from judge.replay(case, checkers.module(side, checkers.pair(name)))


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Replay files. Returns 0 if every verdict is right, 1 if not; exits with 2 for wrong usage."""
    parser = Parser(
        prog=prog, description="Judge a failing case again, from the file that a run saved."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a case saved by a failing test")
    parser.add_argument(
        "--impl", type=words, metavar="MODULE", help=f"default: the module that the file names, else {OPTIMIZED}"
    )
    devices = ("auto", "cpu", "cuda")
    parser.add_argument("--device", choices=devices, default="auto", help="default: CUDA if there is one")
    options = parser.parse_args(arguments)
    missing = [file for file in options.files if not os.path.isfile(file)]  # False for names that the system refuses
    if missing:
        folders = [file for file in missing if os.path.isdir(file)]
        parser.error(f"{'a folder' if folders else 'no such file'}: {', '.join(map(repr, folders or missing))}")
    import torch

    from .. import interpreter

    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda, but torch {torch.__version__} sees no CUDA device here")
    if device == "cpu":
        interpreter.turn_on()
    try:
        prepared = interpreter.prepare()  # the arithmetic of the run that saved the case
    except ValueError as error:
        parser.error(str(error))
    if prepared is not None and not prepared.in_order:
        print(f"interpreter: {prepared}", file=sys.stderr)
    sides: dict[str, Any] = {options.impl: _twins(options.impl, parser, None)} if options.impl else {}
    failures = 0
    with bar(len(options.files), "file") as progress:
        for file in options.files:
            try:
                case, about = saved.load(file, device), saved.about(file)
            except ValueError as error:
                parser.error(str(error))
            named = options.impl or about["implementation"] or OPTIMIZED
            if named not in sides:
                sides[named] = _twins(named, parser, None if options.impl else file)
            say(f"{named}, {file}: {case!r}")
            if about["version"] not in (None, cases.version()):
                say(f"  saved by kvtwin {about['version']}, judged by {cases.version()}")
            failures += _replay(case, about["subject"], sides[named])
            progress.update()
    return 1 if failures else 0


def _twins(name: str, parser: argparse.ArgumentParser, file: str | None) -> Any:
    """The module `name` as the implementation under test; exits with 2 if it cannot be imported. file: of the case that
    names it, None if the command line does."""
    import pytest

    from . import naming
    from .impl import Twins

    if name != OPTIMIZED and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as "python -m" does: the implementation may be a module of this folder
    try:
        with naming.typed("--impl"):
            return Twins(None if name == OPTIMIZED else name)
    except pytest.UsageError as error:
        where = f" ({file} was saved for it; --impl names another)" if file else ""
        parser.error(f"{error}{where}")


def _replay(case: cases.Case, label: str | None, twins: Any) -> int:
    """Judge a case and print the results. label: of the function or state. Returns how many are wrong."""
    from ..refusals import NotProvided

    failures = 0
    subject = next((one for one in subjects.every() if str(one) == label), None)
    try:
        if subject is None:
            for line in judge_case(case, twins.optimized):
                say(f"  {line}")
            return 0
        with capabilities.use(twins.capabilities(subject.method)):
            for name, wrong in judged_fields(case, twins.optimized, subject):
                failures += wrong is not None
                say(f"  {name}: {'right' if wrong is None else wrong}")
    except (NotProvided, Exception) as error:
        failures += 1
        say(f"  {message_of(error)}")
    return failures


if __name__ == "__main__":
    sys.exit(main())
