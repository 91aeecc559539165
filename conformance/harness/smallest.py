"""The smallest case in which a call does not return: ``python -m kvtwin.conformance.harness.smallest SUBJECT FILE``.

FILE holds a case, as JSON, whose call ended a process. This process makes the call with simpler and larger cases in
turn, up to this one, and adds each to the file before its call. So the last one in the file is that of the call that
ended this process, too. Exit code ALL_RETURNED if none did: a call may exit with 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..cases import saved
from ..cases.case import Case

#: Also in harness/survival.py.
ALL_RETURNED = 77
#: Sizes that are tried, as far as the case has more.
SOME = tuple(2**number + 1 for number in range(20))


def simpler(subject: Any, case: Case) -> Iterator[Case]:
    """Ordinary cases, and cases like this one, the smallest first; this one at the end."""
    from ..judge.attribution import SIZES, resized
    from ..judge.subjects import neutral

    names = {one.name for one in dataclasses.fields(case)}
    for base in (neutral(subject, case), case):
        for name in SIZES:
            if name in names:
                yield from (resized(base, name, size) for size in SOME if size < getattr(base, name))
        yield base


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subject")
    parser.add_argument("file", type=Path)
    parser.add_argument("--impl", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--limit", type=float, required=True)
    options = parser.parse_args(arguments)
    from .. import capabilities, interpreter

    if options.device == "cpu":
        interpreter.turn_on()
    interpreter.prepare()
    sys.path.insert(0, os.getcwd())
    from ..judge import subjects
    from .impl import Twins

    subject = next(one for one in subjects.every() if str(one) == options.subject)
    twins = Twins(options.impl)
    with capabilities.use(twins.capabilities(subject.method)), options.file.open("a", encoding="utf-8") as file:
        case = saved.from_description(json.loads(options.file.read_text(encoding="utf-8")))
        for one in simpler(subject, case):
            print(json.dumps(one.described()), file=file, flush=True)
            faulthandler.dump_traceback_later(options.limit, exit=True)
            with suppress(Exception):  # of another kind: a test says so
                subject.call(subject.module(twins.optimized), one)
            faulthandler.cancel_dump_traceback_later()
    return ALL_RETURNED


if __name__ == "__main__":
    sys.exit(main())
