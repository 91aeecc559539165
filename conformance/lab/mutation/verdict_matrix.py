"""The verdict's own kill matrix: which mutants ``kvtwin verify METHOD --impl`` calls wrong.

``python -m kvtwin.conformance.lab.mutation verdict [METHOD...] [--only NAME] [--sample N] [--part 3/8] [--jobs N]``
takes each mutant of `optimized/` and `reference/` (see mutate.py) as somebody's implementation: a copy of the side
under another package name (verdict_copies.py). A run judges it with the tests, the profile and the seed of ``kvtwin
verify METHOD --impl``, and stops at the first property that is wrong (of those in the entry's ``fits``, if it has any).
Cases are not shrunk. Tests that are likely to find the mutant come first: the one that found it before, then its
killers.

The results are lines of JSON in the file ``--results``, written as they come. A mutant whose line is of the present
sources is not judged again, so a run that was interrupted continues, and files of several machines can be joined. Each
side is also judged unchanged, and must be right. A mutant that crashes the process counts as found. ``--store`` writes
the results to verdict_matrix.json, from which the documentation makes a page; verdict_reasons.toml says why mutants are
not found. Exit code 0 if all mutants were judged, whatever the verdict, 1 if some were not, or an unchanged side is not
right, 2 if a file of mutants or an argument is invalid.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...progress import bar, say
from . import verdict_copies as copies
from . import verdict_results as results
from .mutants import Mutant, MutantError, load
from .mutate import Tree, here
from .verdict_copies import Subject
from .verdict_results import Row
from .verdict_server import Order, Server, ServerError, StartError, read_answer

SECONDS = 600.0  # of one mutant
#: Exceptions of a mutant that cannot run, which any test detects.
CANNOT_RUN = ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError")
MOST_STARTS = 5  # of the server, without a result in between
#: The files whose tests come first, after those that are likely to find a mutant.
FIRST = tuple(f"suite/{file}.py" for file in ("test_properties", "test_lockstep", "test_laws"))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m kvtwin.conformance.lab.mutation verdict", description=(__doc__ or "").splitlines()[0]
    )
    made.add_argument("methods", nargs="*", metavar="METHOD", help="methods whose mutants are judged (default: all)")
    made.add_argument("--only", action="append", metavar="NAME", help="judge only this mutant; may be repeated")
    made.add_argument("--side", choices=copies.SIDES, help="judge only mutants of this side")
    made.add_argument("--sample", type=int, metavar="N", help="judge N mutants, drawn from each method in proportion")
    made.add_argument("--part", metavar="I/N", help="judge the I-th of N parts of the mutants")
    made.add_argument("--jobs", type=int, default=2, metavar="N", help="mutants at the same time (default: 2)")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="of the verdict's cases and of --sample (0)")
    made.add_argument("--profile", default="default", help="how many examples (default: default, as in a verdict)")
    made.add_argument("--seconds", type=float, default=SECONDS, help="of one mutant, at most (default: %(default)g)")
    made.add_argument("--minutes", type=float, help="start no mutant after this time, and end those that run")
    made.add_argument(
        "--results", type=Path, default=Path("verdict-matrix.jsonl"), metavar="FILE",
        help="where lines are added, and read to continue (default: %(default)s)",
    )
    made.add_argument("--again", action="store_true", help="judge mutants again that have a line in the results")
    made.add_argument("--store", action="store_true", help="write the results to verdict_matrix.json")
    return made


# What is judged -----------------------------------------------------------------------------------------------------


def part_of(mutants: Sequence[Mutant], text: str | None) -> list[Mutant]:
    """The mutants of a part "I/N": every N-th, so that each part has some of each method. Raises MutantError."""
    if text is None:
        return list(mutants)
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise MutantError(f"--part must be I/N with 1 <= I <= N, got {text!r}")
    return list(mutants[int(index) - 1::int(count)])


def sample_of(mutants: Sequence[Mutant], size: int | None, seed: int) -> list[Mutant]:
    """`size` mutants in proportion to the methods' numbers, but at least one of each method (as far as `size` allows),
    in their order; those of a smaller sample are among those of a larger one of the same seed."""
    if size is None or size >= len(mutants):
        return list(mutants)
    by_method: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_method.setdefault(mutant.method, []).append(mutant)
    ranked: list[tuple[float, str, Mutant]] = []
    for method, found in by_method.items():
        drawn = random.Random(f"{seed} {method}").sample(found, len(found))
        # The first of each method come first, then all in turn: the k-th of n stands at (k + 1/2) / n.
        ranked += [(0.0 if not k else (k + 0.5) / len(found), mutant.name, mutant) for k, mutant in enumerate(drawn)]
    kept = {mutant.name for _, _, mutant in sorted(ranked, key=lambda one: one[:2])[:size]}
    return [mutant for mutant in mutants if mutant.name in kept]


def chosen(options: argparse.Namespace) -> list[Mutant]:
    """The mutants that the command line asks for. Raises MutantError."""
    everyone = load()
    names = {mutant.method for mutant in everyone}, {mutant.name for mutant in everyone}
    unknown = ({*options.methods} - names[0]) | ({*(options.only or ())} - names[1])
    if unknown:
        raise MutantError(f"no such method or mutant: {', '.join(sorted(unknown))}; methods: "
                          f"{', '.join(sorted(names[0]))}")
    found = [
        mutant for mutant in everyone
        if (not options.methods or mutant.method in options.methods)
        and (not options.only or mutant.name in options.only)
        and (options.side is None or mutant.file.startswith(f"{options.side}/"))
    ]
    return part_of(sample_of(found, options.sample, options.seed), options.part)


def subjects(mutants: Iterable[Mutant], names: Sequence[str]) -> list[Subject]:
    """What is judged: the unchanged sides of the mutants' methods first, since they take longest, then the mutants."""
    found = [
        Subject(copies.method_of(mutant, names), mutant.file.partition("/")[0], mutant) for mutant in mutants
    ]
    sides = dict.fromkeys((one.method, one.side) for one in found)
    return [*(Subject(method, side) for method, side in sides), *found]


# Running ------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a bench judges with. sources: as in `Row`; hints: the test that found a mutant before, by its name."""

    jobs: int
    seed: int
    profile: str
    seconds: float
    sources: str
    hints: Mapping[str, str]
    deadline: float | None = None

    @property
    def over(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline


class Bench:
    """Judges subjects in the children of a server, which is started again if it ends."""

    def __init__(
        self, tree: Tree, root: Path, run: Run, *, judge: Tree | None = None, tests: Sequence[str] = ()
    ) -> None:
        """tree: with the sides that are judged; judge: with the suite, by default the same; tests: as in `Server`."""
        self.tree, self.root, self.run, self.tests = tree, root, run, tests
        (judge or tree).copy(root / "kvtwin-copy")
        for side in copies.SIDES:
            copies.copy(side, tree.folders[side], root / side)
        self._server: Server | None = None
        self._starts = 0

    def judge(self, todo: Sequence[Subject]) -> Iterator[Row]:
        """The rows of subjects, in the order in which they end. Ends early when the time of the run is over."""
        waiting = list(enumerate(todo))
        running: dict[int, Subject] = {}
        suspects: set[int] = set()  # ran when the server ended: each is tried again, alone
        try:
            while (waiting and not self.run.over) or running:
                try:
                    server = self._running()
                    while waiting and not self.run.over and len(running) < self._most(waiting, running, suspects):
                        number, subject = waiting.pop(0)
                        running[number] = subject
                        server.order(self._order(number, subject))
                    answer = server.answer()
                except ServerError as error:
                    self.close()
                    if self._starts >= MOST_STARTS:
                        raise
                    say(f"{error}; starting it again", sys.stderr)
                    if len(running) == 1 and suspects >= running.keys():
                        (subject,) = running.values()
                        yield self._row(subject, {"broken": "the server ended twice while this ran"}, 0.0, 0.0)
                    else:
                        waiting[:0] = running.items()
                        suspects |= running.keys()
                    running.clear()
                    continue
                self._starts = 1
                subject, found = running.pop(answer["key"]), read_answer(self._folder(answer["key"]), answer)
                if answer["late"] and self.run.over and answer["seconds"] < self.run.seconds:
                    continue  # it ran out of the run's time, not of its own
                yield self._row(subject, found, answer["seconds"], answer["cpu"])
        finally:
            self.close()

    def _most(self, waiting: Sequence[tuple[int, Subject]], running: Mapping[int, Subject], suspects: set[int]) -> int:
        """How many may run, with the next one that waits."""
        return 1 if suspects & {waiting[0][0], *running} else self.run.jobs

    def _running(self) -> Server:
        if self._server is None:
            self._starts += 1
            self._server = Server(
                self.root / "server", profile=self.run.profile, root=self.root / "kvtwin-copy", tests=self.tests,
            )
            ready = self._server.start()
            say(f"{ready['tests']} tests collected in {ready['seconds']:.0f} s", sys.stderr)
        return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _folder(self, number: int) -> Path:
        return self.root / f"work-{number}"

    def _order(self, number: int, subject: Subject) -> Order:
        """Prepare the folder of a child. Returns the order for the server."""
        folder, path, mutant = self._folder(number), self.root / subject.side, subject.mutant
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        first: list[str] = []
        if mutant is not None:
            path = folder / "implementation"
            path.mkdir()
            copies.mutated(mutant, self.tree.source(mutant.file), self.root / subject.side, path)
            first = list(dict.fromkeys(filter(None, (self.run.hints.get(subject.name), *mutant.killers))))
        left = self.run.seconds
        if self.run.deadline is not None:
            left = min(left, max(1.0, self.run.deadline - time.monotonic()))
        return Order(
            number, subject.method, copies.PACKAGE, self.run.seed, path=str(path), mutated=subject.module,
            folder=str(folder), first=[*first, *FIRST], fits=mutant.fits if mutant is not None else (), seconds=left,
            wall=left,
        )

    def _row(self, subject: Subject, found: Mapping[str, Any], seconds: float, cpu: float) -> Row:
        return row_of_run(subject, found, sources=self.run.sources, seconds=seconds, cpu=cpu)


def row_of_run(subject: Subject, found: Mapping[str, Any], *, sources: str, seconds: float, cpu: float) -> Row:
    """The row of a subject from what its run found (verdict_server.read_answer)."""
    mutant = subject.mutant
    facts: dict[str, Any] = {
        "name": subject.name, "method": subject.method, "side": subject.side, "sources": sources, "seconds": seconds,
        "cpu": cpu,
    }
    if mutant is not None:
        facts |= {"listed": mutant.method, "file": mutant.file, "what": mutant.what, "digest": mutant.digest}
    for status in (results.BROKEN, results.CRASHED):
        if status in found:
            return Row(**facts, status=status, detail=found[status])
    facts |= {name: found[name] for name in ("tests", "cases", "decisive")}
    wrong = found["found"]
    if not wrong:
        if not found["imported"]:
            return Row(**facts, status=results.OUTSIDE, detail=f"no test of {subject.method} imports {subject.module}")
        return Row(**facts, status=found["verdict"], detail=", ".join(found["open"]))
    fits = mutant.fits if mutant is not None else ()
    fitting = [one for one in wrong if not fits or one["property"] in fits]
    shown = (fitting or wrong)[0]
    if shown["error"] in CANNOT_RUN:
        return Row(**facts, status=results.BROKEN, test=shown["test"], error=shown["error"], detail=shown["message"])
    properties = dict.fromkeys([shown["property"], *(one["property"] for one in wrong)])
    return Row(
        **facts, status=results.WRONG if fitting else results.UNFIT, properties=tuple(map(str, properties)),
        test=shown["test"], error=shown["error"], detail=f"{shown['message']} {shown['case'] or ''}".strip()[:500],
    )


# The command --------------------------------------------------------------------------------------------------------


def _sources(tree: Tree, options: argparse.Namespace) -> str:
    digest = copies.digest_of(tree.folders[name] for name in ("reference", "optimized", "conformance"))
    return hashlib.sha256(f"{digest} {options.seed} {options.profile}".encode()).hexdigest()[:12]


def _outside(mutants: Iterable[Mutant], reasons: Mapping[str, str | None], sources: str) -> list[Row]:
    """The rows of mutants that no verdict can judge. reasons: by name, None of the others."""
    return [
        Row(
            mutant.name, mutant.method, mutant.file.partition("/")[0], results.OUTSIDE, mutant.method, mutant.file,
            mutant.what, mutant.digest, sources, detail=reason,
        )
        for mutant in mutants if (reason := reasons[mutant.name]) is not None
    ]


def _judge(mutants: Sequence[Mutant], options: argparse.Namespace) -> list[Row]:
    """The rows of mutants and of their unchanged sides: those that the results have, and those that are made now."""
    names, tree = copies.names(), here()
    tree.check(mutants)
    sources = _sources(tree, options)
    reasons = {mutant.name: copies.outside(mutant, tree.source(mutant.file)) for mutant in mutants}
    todo = subjects((mutant for mutant in mutants if reasons[mutant.name] is None), names)
    old = {row.key: row for row in results.read(options.results)}
    earlier = [*results.stored(), *old.values()]
    hints = {row.name: row.test for row in earlier if row.test and row.status == results.WRONG}
    keys = {one.name: (one.name, one.digest, sources) for one in todo}
    done = [] if options.again else [old[key] for key in keys.values() if key in old]
    finished = {row.name for row in done}
    todo = [one for one in todo if one.name not in finished]
    print(f"{len(todo)} to judge, {len(done)} are in {options.results}", flush=True)
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    run = Run(options.jobs, options.seed, options.profile, options.seconds, sources, hints, deadline)
    with tempfile.TemporaryDirectory(prefix="kvtwin-verdict-", ignore_cleanup_errors=True) as folder:
        if todo:
            bench = Bench(tree, Path(folder), run)
            with bar(len(todo), "mutant") as progress:
                for row in bench.judge(todo):
                    results.append(options.results, row)
                    done.append(row)
                    say(f"{row.status:11} {row.method}: {row.name} [{', '.join(row.properties)}] {row.seconds:.1f} s")
                    progress.update()
    return [*done, *_outside(mutants, reasons, sources)]


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser()
    options = made.parse_args(arguments)
    if options.jobs < 1:
        made.error(f"--jobs must be at least 1, got {options.jobs}")
    started = time.monotonic()
    try:
        mutants = chosen(options)
        rows = _judge(mutants, options)
    except MutantError as error:
        print(error, file=sys.stderr)
        return 2
    except (ServerError, StartError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\n{results.summary(results.explained(rows, results.reasons()))}\n\n{time.monotonic() - started:.0f} s")
    if options.store:
        results.store(rows, [mutant.name for mutant in mutants], seed=options.seed, profile=options.profile)
    judged = {row.name for row in rows}
    left = [mutant.name for mutant in mutants if mutant.name not in judged]
    if left:
        print(f"{len(left)} mutants are left: run the command again", file=sys.stderr)
    return int(bool(left) or any(row.is_baseline and row.status != results.RIGHT for row in rows))


if __name__ == "__main__":
    sys.exit(main())
