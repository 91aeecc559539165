"""``python -m kvtwin.conformance [METHOD...]``: verify the methods here; a table, a report, an exit code.

The tests of the rooms suite/, and in a source tree of methods/ and papers/, less those that are marked ``whole``, for
people who need not know pytest. The profile quick leaves out more: see ``--hypothesis-profile``.
With ``--impl MODULE`` only the tests run that judge a property of an implementation, and a verdict is printed. Exit
codes: 0 right, 1 wrong, 2 wrong usage of the command line or interrupted, 3 internal error, 4 the run cannot start
(pytest's usage error: for example, MODULE cannot be imported), 5 no test ran, 6 not covered (harness/verdict.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from . import discovery, interpreter, plugin
from .command_line import Parser, number, unknown, words
from .harness import environment, naming, options, results, suite, survival, watch
from .own_methods import MethodError

DEFAULT_REPORT = Path("kvtwin-report.html")
MOST_JOBS, MOST_ASKED = 4, 256  # by default, as each takes about a GB; and with --jobs
#: The profiles whose cases do not depend on the seed, and the number of seeds.
DERANDOMIZED, MOST_SEEDS = ("quick", "brief", "ci"), 1_000_000
QUERIES = 40  # of each task, with --accuracy


class MainJob:
    """Prints the header that pytest leaves out when it is quiet, and sees whether anything was verified."""

    def __init__(self) -> None:
        self.verified = False

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        print("\n".join(_suite_of(session).pytest_report_header()), flush=True)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.verified = any(result.outcome == "passed" for result in _suite_of(session).collector.results)


def _suite_of(session: pytest.Session) -> suite.Suite:
    running: suite.Suite | None = session.config.pluginmanager.get_plugin(plugin.SUITE)
    assert running is not None, "the command line names our own tests"
    return running


PROG = "python -m kvtwin.conformance"


def parser(prog: str = PROG) -> argparse.ArgumentParser:
    names = [pair.name for pair in discovery.pairs()]
    made = Parser(
        prog=prog,
        description="Verify implementations of KV-cache methods against float64 arithmetic.",
        epilog=f"Methods: {', '.join(names)}. All of pytest's options: pytest --pyargs kvtwin.conformance --help",
    )
    made.add_argument("methods", nargs="*", metavar="METHOD", help="which to verify; all of them if none is named")
    made.add_argument("--impl", type=words, metavar="MODULE", help="verify this module instead of kvtwin.optimized")
    made.add_argument("--device", choices=options.DEVICES, default="auto", help="default: CUDA if there is one")
    made.add_argument(
        "--report",
        type=_path,
        default=DEFAULT_REPORT,
        metavar="PATH",
        help="PATH.html writes a page and JSON beside it, PATH.json JSON alone (default: %(default)s)",
    )
    made.add_argument("--sarif", type=_path, metavar="FILE", help="also write what is wrong as SARIF: FILE.sarif")
    made.add_argument(
        "-j",
        "--jobs",
        type=number(1, MOST_ASKED),
        metavar="N",
        help=f"processes (default: one per core, at most {MOST_JOBS})",
    )
    made.add_argument(
        "--hypothesis-profile", metavar="NAME", help="quick, brief, ci, gpu, default or thorough: how many examples; "
        "without --impl, quick leaves out slow tests and, if no METHOD is named, most kinds of tests"
    )
    made.add_argument(
        "--seed", type=number(0, 2**64), metavar="N", help="draw other cases, or those of the run that printed N; "
        "default with --impl: another each time",
    )
    made.add_argument(
        "-k", dest="keyword", type=_expression, metavar="EXPRESSION",
        help="only the tests whose names match, as in pytest",
    )
    made.add_argument(
        "--accuracy", action="store_true", help="with --impl: also let kvtwin's small model answer questions with it, "
        "as in kvtwin accuracy"
    )
    made.add_argument(
        "--call-limit", type=number(0.001, survival.MOST_SECONDS, whole=False), metavar="S",
        help=f"with --impl: longest time of a call in seconds ({survival.SECONDS:g})",
    )
    made.add_argument(
        "--time-limit", type=number(0.001, survival.MOST_SECONDS, whole=False), metavar="S",
        help=f"with --impl: judge what this time allows ({survival.SECONDS_IN_ALL:g})",
    )
    made.add_argument(
        "--sanitize", nargs="?", choices=watch.TOOLS, const="memcheck", metavar="TOOL",
        help=f"with --impl: run under {watch.PROGRAM} (memcheck)",
    )
    made.add_argument("--xfails", type=_path, metavar="FILE", help="tests that are expected to fail, a line each")
    made.set_defaults(watched=False)
    made.add_argument("-x", dest="first", action="store_true", help="stop at the first failure")
    made.add_argument("-v", dest="verbose", action="store_true", help="one line per test")
    return made


def _path(text: str) -> Path:
    """The type of an option that names a file."""
    return Path(words(text))


def _expression(text: str) -> str:
    """The type of -k: what pytest takes. Raises argparse.ArgumentTypeError."""
    from _pytest.mark.expression import Expression  # pytest has no public function that tells

    try:
        Expression.compile(words(text))
    except argparse.ArgumentTypeError:
        raise
    except Exception as error:
        raise argparse.ArgumentTypeError(f"expected names with and, or, not, got {text!r}: {error}") from None
    return text


def default_jobs() -> int:
    """How many processes: each keeps one core busy, on a GPU too, where most of the time goes into compiling."""
    if importlib.util.find_spec("xdist") is None:
        return 1
    return min(MOST_JOBS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def pytest_arguments(chosen: argparse.Namespace) -> list[str]:
    """The command line that pytest gets."""
    names = [pair.name for pair in discovery.built_in()]
    arguments = [
        *map(str, _rooms(judges=chosen.impl is not None)),
        *(str(pair.declared.folder) for pair in discovery.methods() if pair.declared and pair.name in chosen.methods),
        *(f"--ignore={folder}" for folder in _folders(name for name in names if name not in chosen.methods)),
        # The tests lie in the installed package: neither a configuration file above it, nor one of the project in
        # the current folder, is meant for them, and nothing is to be written there.
        *("-c", os.devnull, "--rootdir", str(plugin.HERE), "-p", plugin.NAME),
        *("-p", "no:cacheprovider", "-p", "no:logging"),  # logging: see pyproject.toml
        *("--import-mode", "importlib", "--strict-markers", "--tb", "short", "-o", "filterwarnings=error"),
        # This module has imported the plugin before pytest could rewrite its asserts. It has none that tests rely on.
        *("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"),
        f"--kv-device={chosen.device}",
        f"--kv-report={chosen.report}",
        f"--kv-methods={','.join(chosen.methods)}",
        "-v" if chosen.verbose else "-q",
    ]
    if chosen.jobs > 1 or (chosen.impl is not None and chosen.watched):
        arguments += ["-n", str(chosen.jobs), "--dist", "worksteal"]
        arguments += [f"--max-worker-restart={survival.MOST_RESTARTS}"] if chosen.impl is not None else []
        arguments += ["-p", "no:faulthandler"] if chosen.watched else []  # of a process that ends the report says all
    profile = chosen.hypothesis_profile
    if chosen.impl is not None:
        arguments += [f"--kv-impl={chosen.impl}", "--kv-properties"]
        arguments += [f"--kv-required={','.join(chosen.required)}"] if chosen.required else []
        if not chosen.verbose:  # the verdict shows one case per cause
            arguments += ["--tb=no", "-rN"]
        profile = profile or "default"
        if chosen.seed is None:
            chosen.seed = 0 if profile in DERANDOMIZED else secrets.randbelow(MOST_SEEDS)
    elif profile == "quick":
        arguments += ["-m", "not slow and not whole" + ("" if chosen.required else " and (main or claim)")]
    else:
        arguments += ["-m", "not whole"]
    if profile:
        arguments += ["--hypothesis-profile", profile]
    if chosen.seed is not None:
        arguments += [f"--hypothesis-seed={chosen.seed}"]
    if chosen.sarif:
        arguments += [f"--kv-sarif={chosen.sarif}"]
    if chosen.xfails:
        arguments += [f"--kv-xfails={chosen.xfails}"]
    if chosen.keyword:
        arguments += ["-k", chosen.keyword]
    return [*arguments, "-x"] if chosen.first else arguments


def _rooms(*, judges: bool) -> list[Path]:
    """The folders with the tests that judge an implementation, and, unless that is all (`judges`), with those of
    kvtwin's own methods and of the papers' claims, which an installed kvtwin does not have."""
    rooms = (plugin.HERE / room for room in results.ROOMS)
    return [room for room in rooms if room.name == results.SUITE or (not judges and (room / "__init__.py").exists())]


def _folders(methods: Iterable[str]) -> Iterator[Path]:
    """The folders of tests of these methods alone."""
    return (plugin.HERE / room / name for name in methods for room in results.ROOMS)


def add_accuracy(chosen: argparse.Namespace) -> None:
    """Measure the small model's accuracy with the implementation, print it, and write the report again with it."""
    import json

    import torch

    from ..fixtures import accuracy_of
    from .harness.report import write_report

    device = "cuda" if chosen.device != "cpu" and torch.cuda.is_available() else "cpu"
    if device == "cpu":
        interpreter.turn_on()
    methods = chosen.required or None
    try:
        rows = accuracy_of.evaluate(chosen.impl, plan=accuracy_of.plan(QUERIES), methods=methods, device=device)
    except accuracy_of.NothingToMeasure as error:
        print(f"accuracy: {error}")
        return
    print(accuracy_of.table(rows))
    report = json.loads(chosen.report.with_suffix(".json").read_text(encoding="utf-8"))
    write_report({**report, "accuracy": accuracy_of.plain(rows)}, chosen.report)


def _sanitized(chosen: argparse.Namespace) -> list[str]:
    """The command line of the process that compute-sanitizer watches."""
    return [
        *chosen.methods, f"--impl={chosen.impl}", "--device=cuda", "--jobs=1", f"--report={chosen.report}",
        f"--hypothesis-profile={chosen.hypothesis_profile or 'brief'}", f"-k={chosen.keyword or watch.TESTS}",
        *([] if chosen.seed is None else [f"--seed={chosen.seed}"]),
        *([] if chosen.sarif is None else [f"--sarif={chosen.sarif}"]),
    ]


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    try:
        made = parser(prog)
    except MethodError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    chosen = made.parse_args(arguments)
    names = [pair.name for pair in discovery.pairs()]
    wrong = [name for name in chosen.methods if name not in names]
    if wrong:
        made.error(unknown("method", wrong, names))
    if chosen.hypothesis_profile not in (None, *environment.PROFILES):
        made.error(f"--hypothesis-profile: {unknown('profile', [chosen.hypothesis_profile], environment.PROFILES)}")
    if chosen.accuracy and chosen.impl is None:
        made.error("--accuracy needs --impl; kvtwin accuracy prints the stored results of kvtwin's own methods")
    for name, limit in (("--call-limit", chosen.call_limit), ("--time-limit", chosen.time_limit)):
        if limit is not None and chosen.impl is None:
            made.error(f"{name} needs --impl; calls of kvtwin's own methods have no limit")
    if chosen.sanitize is not None:
        if chosen.impl is None:
            made.error("--sanitize needs --impl; python -m tox -e sanitize watches kvtwin's own kernels")
        lacking = "--device=cpu has no kernels" if chosen.device == "cpu" else watch.missing()
        if lacking is not None:
            made.error(f"--sanitize: {lacking}")
        return watch.run(chosen.sanitize, _sanitized(chosen), Path("kvtwin-sanitizer"))
    chosen.required, chosen.methods = chosen.methods, chosen.methods or names
    chosen.jobs = chosen.jobs or default_jobs()
    under_tool = watch.WATCHED in os.environ
    chosen.watched = chosen.impl is not None and not under_tool and importlib.util.find_spec("xdist") is not None
    if chosen.impl is not None and not chosen.watched and not under_tool:
        print("note: without pytest-xdist, a call that ends its process ends this run", file=sys.stderr)
    job = MainJob()
    if chosen.impl is not None and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as "python -m" does: the implementation may be a module of this folder
    limits = chosen.call_limit or survival.SECONDS, chosen.time_limit or survival.SECONDS_IN_ALL
    with naming.typed("--impl"), survival.watching(*limits) if chosen.watched else nullcontext():
        status = int(pytest.main(pytest_arguments(chosen), plugins=[job]))
    if chosen.accuracy and status not in (
        pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        add_accuracy(chosen)
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        chose = f" that -k {chosen.keyword!r} matches" if chosen.keyword else ""
        print(f"{made.prog}: error: there is no test{chose}", file=sys.stderr)
    if status == pytest.ExitCode.OK and not job.verified:
        print("error: no test of the implementation passed: nothing is verified", file=sys.stderr)
        return int(pytest.ExitCode.NO_TESTS_COLLECTED)
    return status


if __name__ == "__main__":
    sys.exit(main())
