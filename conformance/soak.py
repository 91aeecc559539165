"""``python -m kvtwin.conformance.soak``: every test that draws, under many seeds.

A test of drawn cases may be right for one seed and wrong for another. This runs each such test once for each of many
seeds and writes one line of JSON per test. A test that fails under a seed, on code that is right, raises a false alarm:
that is a defect of the test. The run can be stopped at any time; started again with the same --results, it goes on.
Runs of other seeds, of other machines too, may be added to the same file: the summary at the end is of all its lines.

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

from .cases import draws
from .harness import options
from .judge import stats
from . import plugin

SEEDS = "KVTWIN_SOAK_SEEDS"  # how the processes of pytest-xdist learn which seeds there are: "FIRST:COUNT"
RESULTS = "KVTWIN_SOAK_RESULTS"
PROFILE = "soak"
LEAST_EXAMPLES = 2  # the first that Hypothesis draws is the simplest one, whatever the seed
MOST_FAILURES = 3  # of one test; then it runs no further seeds
RECORD = "kvtwin_soak"  # the name among a report's user_properties


@dataclass
class Record:
    """What became of one test. ``shares`` are the least and the largest decisive share that a seed gave."""

    nodeid: str
    first: int
    count: int
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    least_decisions: int | None = None
    plain_rounds: int = 0  # seeds that needed further rounds of plain cases
    undecided: int = 0  # seeds under which masks decided everything

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
    """A pytest plugin, loaded by name (``-p kvtwin.conformance.soak``): pytest-xdist's processes load it too."""

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

    # Last: the suite has ordered and deselected by then.
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        wanted = [item for item in items if item.nodeid not in self.done and draws.is_drawn(getattr(item, "obj", None))]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(wanted)])
        items[:] = wanted
        for item in wanted:
            draw_at_least(item.function, LEAST_EXAMPLES)  # type: ignore[attr-defined]

    # Inside of the suite's wrapper, which has put its own callable in the test's place.
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
    """Let a test draw that many examples; it may draw more already."""
    from hypothesis import settings

    attribute = "_hypothesis_internal_use_settings"
    own = getattr(test, attribute, None)
    if own is not None and own.max_examples < examples:
        setattr(test, attribute, settings(own, max_examples=examples))


def over_seeds(test: Callable[..., Any], arguments: dict[str, Any], seeds: Iterable[int], record: Record) -> None:
    """Run a test once for each seed, as a run of pytest would: with statistics of its own. Raises AssertionError."""
    core: Any = importlib.import_module("hypothesis.core")

    from .harness.impl import NotProvided
    from .harness.suite import check_decided

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
    """The records of a file of results, of each test and range of seeds the last one; [] if there is no file.

    A line that was cut off is left out.
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
    """What all runs of a file found, in lines to print."""
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
        prog="python -m kvtwin.conformance.soak",
        description="Run every test that draws under many seeds. All further arguments go to pytest (-k, -n, paths).",
    )
    parser.add_argument("--seeds", type=int, default=200, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="the first seed (default: %(default)s)")
    parser.add_argument("--device", choices=options.DEVICES, default="auto", help="default: CUDA if there is one")
    parser.add_argument(
        "--results", type=Path, default=Path("kvtwin-soak.jsonl"), metavar="PATH",
        help="one line of JSON per test; tests that it has already are left out (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--profile", default=PROFILE, metavar="NAME", help="Hypothesis profile (default: %(default)s)")
    given, others = parser.parse_known_args(arguments)
    if given.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {given.seeds}")
    os.environ[SEEDS], os.environ[RESULTS] = f"{given.first}:{given.seeds}", str(given.results.resolve())
    # Paths of tests, if any are named, take the place of the whole suite.
    places = [] if any(Path(part.split("::")[0]).exists() for part in others) else [str(plugin.HERE)]
    code = pytest.main([
        *places, "-p", "kvtwin.conformance.soak", f"--kv-device={given.device}",
        f"--hypothesis-profile={given.profile}", "-q", *others,
    ])  # fmt: skip
    records = read(given.results)
    print("\n".join(summary(records)))
    if code == pytest.ExitCode.NO_TESTS_COLLECTED and records:  # all of it was done before
        code = pytest.ExitCode.OK
    return int(code) or int(any(record["failures"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
