"""Judge a saved case again: `python -m kvtwin.conformance.judge.replay FILE`.

A failing test saves its case (cases/failures.py) and prints this command.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

from . import checkers, lockstep
from ..cases import case as cases
from ..discovery import OPTIMIZED


def judged(case: cases.Case, side: Any) -> Iterator[str]:
    """Judge a case with every check that applies to it. Yields a line per passed check; raises AssertionError.

    side: the implementation under test, like `twins.optimized`.
    """
    if isinstance(case, cases.StateTrace):
        summary = lockstep.run(case, checkers.module(side, checkers.pair(case.method)))
        yield f"lockstep of {case.method}: right, {summary}"
    for name, judge in checkers.every().items():
        if type(case) in getattr(judge, "CASES", ()):
            yield from judge.replay(case, checkers.module(side, checkers.pair(name)))


def main(arguments: list[str] | None = None) -> int:
    """Replay files; 0 if every verdict is right, 1 if not."""
    parser = argparse.ArgumentParser(
        prog="python -m kvtwin.conformance.judge.replay", description=__doc__.splitlines()[0]
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a case saved by a failing test")
    parser.add_argument("--impl", default=OPTIMIZED, metavar="MODULE", help="the implementation under test")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args(arguments)
    import torch

    from .. import interpreter
    from ..harness.impl import NotProvided, Twins

    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        # Before the kernels import triton.
        os.environ.setdefault(interpreter.INTERPRET, "1")
    try:
        prepared = interpreter.prepare()  # the arithmetic of the run that saved the case
    except ValueError as error:
        parser.error(str(error))
    if prepared is not None and not prepared.in_order:
        print(f"interpreter: {prepared}", file=sys.stderr)
    side = Twins(None if options.impl == OPTIMIZED else options.impl).optimized
    failures = 0
    for file in options.files:
        case = cases.load(file, device)
        print(f"{file}: {case!r}")
        try:
            for line in judged(case, side):
                print(f"  {line}")
        except NotProvided as error:
            failures += 1
            print(f"  {error}")
        except AssertionError as error:
            failures += 1
            print(f"  {error}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
