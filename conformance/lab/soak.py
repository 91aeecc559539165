"""``python -m kvtwin.conformance.lab.soak``: run every test with drawn cases under many seeds.

A test with drawn cases may pass with one seed and fail with another. This command runs each such test once per seed and
writes one line of JSON per test. On correct code a failure is a false alarm, a defect of the test. The run can be
stopped at any time and resumed with the same --results. Runs with other seeds, or on other machines, may append to the
same file; the summary at the end covers all its lines.

Exit code 0 if no test failed under any seed, 1 if one did, and pytest's own codes for the rest.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from .. import plugin, stats
from ..cases import draws
from ..harness import options

SEEDS = "KVTWIN_SOAK_SEEDS"  # passes the seeds to the processes of pytest-xdist: "FIRST:COUNT"
RESULTS = "KVTWIN_SOAK_RESULTS"
PROFILE = "soak"
LEAST_EXAMPLES = 2  # with any seed, Hypothesis draws the simplest example first
MOST_FAILURES = 3  # of one test, before its remaining seeds are skipped
RECORD = "kvtwin_soak"  # the key in a report's user_properties


@dataclass
class Record:
    """The result of one test. ``shares``: the smallest and the largest decisive share over all seeds."""

    nodeid: str
    first: int
    count: int
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    least_decisions: int | None = None
    plain_rounds: int = 0  # seeds that needed plain rounds
    undecided: int = 0  # seeds with which masks settled every decision

    def add(self, counted: stats.Stats) -> None:
        if not counted.asked:
            return
        least = counted.decisive if self.least_decisions is None else self.least_decisions
        self.least_decisions = min(counted.decisive, least)
        self.plain_rounds += counted.plain_total > 0
        self.undecided += counted.total == 0
        if counted.total:
            share = counted.decisive / counted.total
            self.shares = [min([share, *self.shares]), max([share, *self.shares])]


class Soak:
    """A pytest plugin, loaded by name (``-p kvtwin.conformance.lab.soak``): pytest-xdist's processes load it too."""

    def __init__(self, config: pytest.Config) -> None:
        first, count = os.environ[SEEDS].split(":")
        self.seeds = range(int(first), int(first) + int(count))
        self.results = Path(os.environ[RESULTS])
        self.controls = not hasattr(config, "workerinput")
        wanted = (self.seeds.start, len(self.seeds))
        self.done = {
            record["nodeid"] for record in read(self.results)
            if (record["first"], record["count"]) == wanted and not record["failures"]
        }

    # Last: after the suite has ordered and deselected tests.
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        wanted = [item for item in items if item.nodeid not in self.done and draws.is_drawn(getattr(item, "obj", None))]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(wanted)])
        items[:] = wanted
        for item in wanted:
            draw_at_least(item.function, LEAST_EXAMPLES)  # type: ignore[attr-defined]

    # Inside the suite's wrapper, which replaces the test by its own callable.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Any:
        test = pyfuncitem.obj
        record = Record(pyfuncitem.nodeid, self.seeds.start, len(self.seeds))
        pyfuncitem.obj = lambda **arguments: over_seeds(test, arguments, self.seeds, record)
        try:
            return (yield)
        finally:
            pyfuncitem.obj = test
            pyfuncitem.user_properties.append((RECORD, vars(record)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = dict(report.user_properties).get(RECORD)
        if self.controls and report.when == "call" and found is not None:
            line = json.dumps({**found, "seconds": round(report.duration, 3)})  # type: ignore[dict-item]
            with self.results.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if SEEDS in os.environ:
        config.pluginmanager.register(Soak(config), "kvtwin-soak")


def draw_at_least(test: Any, examples: int) -> None:
    """Raise a test's max_examples to `examples` if it is lower."""
    from hypothesis import settings

    attribute = "_hypothesis_internal_use_settings"
    own = getattr(test, attribute, None)
    if own is not None and own.max_examples < examples:
        setattr(test, attribute, settings(own, max_examples=examples))


def over_seeds(test: Callable[..., Any], arguments: dict[str, Any], seeds: Iterable[int], record: Record) -> None:
    """Run a test once per seed, each time with new statistics, as pytest does. Raises AssertionError."""
    core: Any = importlib.import_module("hypothesis.core")

    from ..harness.enough import check_decided
    from ..refusals import NotProvided

    before = core.global_force_seed
    try:
        for seed in seeds:
            core.global_force_seed = seed
            with stats.collect() as counted:
                try:
                    test(**arguments)
                    check_decided(counted, None)
                except NotProvided:
                    raise
                except Exception as error:
                    record.failures.append(f"seed {seed}: {type(error).__name__}: {_first_lines(error)}")
                except pytest.fail.Exception as error:
                    record.failures.append(f"seed {seed}: {_first_lines(error)}")
            record.add(counted)
            if len(record.failures) == MOST_FAILURES:
                break
    finally:
        core.global_force_seed = before
    assert not record.failures, "\n".join(record.failures)


def _first_lines(error: BaseException) -> str:
    return "\n".join(str(error).splitlines()[:12])


def read(path: Path) -> list[dict[str, Any]]:
    """The last record of each test and range of seeds in a file of results; [] if the file does not exist.

    Skips incomplete lines.
    """
    if not path.is_file():
        return []
    found: dict[Any, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[record["nodeid"], record["first"], record["count"]] = record
    return list(found.values())


def summary(records: Sequence[dict[str, Any]]) -> list[str]:
    """The summary of all runs in a file, as lines to print."""
    seeds, failed, again = Counter[str](), [], set()
    for record in records:
        seeds[record["nodeid"]] += 0 if record["failures"] else record["count"]
        failed += [record] if record["failures"] else []
        again |= {record["nodeid"]} if record["plain_rounds"] else set()
    alarms, seconds = len({record["nodeid"] for record in failed}), sum(record["seconds"] for record in records)
    lines = [
        f"{len(seeds)} tests that draw, under {min(seeds.values(), default=0)} seeds or more each: {seeds.total()} "
        f"runs without a false alarm, {alarms} tests with one; {len(again)} tests drew plain cases under some seed; "
        f"{seconds:.0f} s"
    ]
    return lines + [f"  {record['nodeid']}: {record['failures'][0]}" for record in failed]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvtwin.conformance.lab.soak",
        description="Run every test with drawn cases under many seeds. Other arguments go to pytest (-k, -n, paths).",
    )
    parser.add_argument("--seeds", type=int, default=200, metavar="N", help="number of seeds (default: %(default)s)")
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="first seed (default: %(default)s)")
    parser.add_argument("--device", choices=options.DEVICES, default="auto", help="default: CUDA if it is available")
    parser.add_argument(
        "--results", type=Path, default=Path("kvtwin-soak.jsonl"), metavar="PATH",
        help="file with one line of JSON per test; tests already in it are skipped (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--profile", default=PROFILE, metavar="NAME", help="Hypothesis profile (default: %(default)s)")
    given, others = parser.parse_known_args(arguments)
    if given.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {given.seeds}")
    os.environ[SEEDS], os.environ[RESULTS] = f"{given.first}:{given.seeds}", str(given.results.resolve())
    # Run the whole suite unless paths of tests are given.
    places = [] if any(Path(part.split("::")[0]).exists() for part in others) else [str(plugin.HERE)]
    code = pytest.main([
        *places, "-p", "kvtwin.conformance.lab.soak", f"--kv-device={given.device}",
        f"--hypothesis-profile={given.profile}", "-q", *others,
    ])  # fmt: skip
    records = read(given.results)
    print("\n".join(summary(records)))
    if code == pytest.ExitCode.NO_TESTS_COLLECTED and records:  # all tests are in the file
        code = pytest.ExitCode.OK
    return int(code) or int(any(record["failures"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
