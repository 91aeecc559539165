"""``python -m kvtwin.conformance.lab.mutation.power``: detection of planted faults, and false alarms.

Each fault of lab/implementations/faults.py and each right implementation of lab/implementations/right is judged with
each seed, as ``kvtwin verify METHOD --impl MODULE --seed N`` judges it, less shrinking. The verdict on a fault ends
with the first failure. Each line of the results is one verdict; verdicts that are in the file are not made again, so a
run can be stopped and resumed. --store writes the counts to power.json, from which the documentation has its tables.

Exit code 0; 1 if a right implementation was not called right, or a process ended without a verdict.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ...harness import environment
from ...progress import bar, say
from ..implementations import right
from .verdict_server import Order, Server, read_answer

STORED = Path(__file__).with_name("power.json")
DEFAULT_RESULTS = Path("kvtwin-power.jsonl")
SCHEMA = 1
RUNS_WITH = ("torch", "triton", "hypothesis", "pytest")
IMPLEMENTATIONS = "kvtwin.conformance.lab.implementations"
FAULTS, RIGHT = "faults", "right"
#: How many processes share a GPU's memory, for cases/gpu_memory.py.
SHARED = "PYTEST_XDIST_WORKER_COUNT"


def rows() -> dict[str, dict[str, tuple[str, str, str]]]:
    """The method and the module of each fault, and of each right implementation, by name ("keydiff loops"), and the
    property under which a fault is likely to be found."""
    from ..implementations.faults import FAULTS as planted  # imports torch

    return {
        FAULTS: {name: (fault.method, f"{IMPLEMENTATIONS}.planted", fault.shows) for name, fault in planted.items()},
        RIGHT: {
            f"{method} {module}": (method, f"{IMPLEMENTATIONS}.right.{module}", "")
            for module, style in right.RIGHT.items() for method in style.methods
        },
    }


def orders(kinds: Sequence[str], only: Sequence[str] | None, seeds: Iterable[int], device: str) -> list[Order]:
    """The verdicts that are asked for, seed by seed. Raises ValueError for an unknown name in `only`."""
    from ..implementations import planting

    chosen = {kind: found for kind, found in rows().items() if kind in kinds}
    names = [name for found in chosen.values() for name in found]
    unknown = sorted({*(only or ())} - {*names})
    if unknown:
        raise ValueError(f"no {', '.join(unknown)}; there are: {', '.join(names)}")
    return [
        Order(
            key=json.dumps([device, kind, name, seed]), method=method, module=module, seed=seed, likely=shows,
            fits=() if kind == FAULTS else None,
            environ={planting.NAME: name, planting.SEED: str(seed)} if kind == FAULTS else {},
        )
        for seed in seeds for kind, found in chosen.items() for name, (method, module, shows) in found.items()
        if not only or name in only
    ]


def run(orders: Sequence[Order], *, device: str, jobs: int, done: Callable[[dict[str, Any]], None]) -> None:
    """Make all verdicts, `jobs` at a time. device: "cpu" or "cuda". done: called with the record of each, in the order
    in which they end. Raises StartError or ServerError."""
    methods = list(dict.fromkeys(order.method for order in orders))
    waiting, running = list(reversed(orders)), dict[int | str, Order]()
    with (
        tempfile.TemporaryDirectory(prefix="kvtwin-verdicts-", ignore_cleanup_errors=True) as folder,
        Server(Path(folder), device=device, methods=methods) as server,
    ):
        server.start()
        while waiting or running:
            while waiting and len(running) < jobs:
                order = waiting.pop()
                place, environ = tempfile.mkdtemp(dir=folder), {SHARED: str(jobs), **order.environ}
                running[order.key] = replace(order, folder=place, environ=environ)
                server.order(running[order.key])
            answer = server.answer()
            order = running.pop(answer["key"])
            done(record(order, read_answer(Path(order.folder), answer), answer["seconds"]))


def record(order: Order, found: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The record of an order: `verdict` ("right", "wrong", "not covered", or "broken" if there is none), `property`,
    `test` and `message` of the first failure, `tests` and `cases` until then, and `seconds`. found: as from `taken`."""
    made = {"key": order.key, "seed": order.seed}
    if "verdict" not in found:
        return made | {"verdict": "broken", "message": next(iter(found.values()))}
    first = {name: found["found"][0][name] for name in ("property", "test", "message")} if found["found"] else {}
    return made | {
        "verdict": found["verdict"], **first, "tests": found["touched"], "cases": found["judged"], "seconds": seconds,
    }


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file; the last of each key. A line that was cut off is left out."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        found[record["key"]] = record
    return list(found.values())


def counts(records: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By device and kind the counts of each row: seeds, wrong, right, the properties that were wrong first, and the
    medians of tests and seconds. Broken verdicts do not count."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for record in records:
        device, kind, name, _ = json.loads(record["key"])
        if record["verdict"] != "broken":
            groups.setdefault((device, kind, name), []).append(record)
    for (device, kind, name), own in sorted(groups.items()):
        verdicts = Counter(record["verdict"] for record in own)
        properties = Counter(record["property"] for record in own if record.get("property"))
        found.setdefault(device, {}).setdefault(kind, {})[name] = {
            "seeds": len(own), "wrong": verdicts["wrong"], "right": verdicts["right"],
            "properties": dict(properties.most_common()),
            **{what: round(median(record[what] for record in own), 1) for what in ("tests", "cases", "seconds")},
        }
    return found


def lines(found: dict[str, dict[str, dict[str, Any]]]) -> Iterator[str]:
    """A line per row of `counts`."""
    for device, kinds in found.items():
        for kind, named in kinds.items():
            for name, one in named.items():
                count = f"{one['wrong']} of {one['seeds']} found" if kind == FAULTS else (
                    f"{one['right']} of {one['seeds']} right"
                )
                where = ", ".join(f"{name} {number}" for name, number in one["properties"].items())
                yield f"{device:4} {name:30} {count:18} {one['seconds']:6.1f} s  {where}"


def store(found: dict[str, dict[str, dict[str, Any]]], machines: dict[str, str], path: Path = STORED) -> None:
    """Write the counts of each device in `found` in place of those that are stored. machines: by device, what it is."""
    old = json.loads(path.read_text(encoding="utf-8"))["devices"] if path.is_file() else {}
    versions = {"python": platform.python_version()} | {name: environment.version(name) for name in RUNS_WITH}
    new = {device: {"machine": machines[device], "versions": versions, **kinds} for device, kinds in found.items()}
    path.write_text(_laid_out({"schema": SCHEMA, "devices": old | new}, 4) + "\n", encoding="utf-8")


def _laid_out(value: Any, depth: int, indent: str = "") -> str:
    """JSON with a line per key of the outer `depth` levels."""
    if depth == 0 or not isinstance(value, dict):
        return json.dumps(value)
    lines = [f"{indent} {json.dumps(key)}: {_laid_out(one, depth - 1, indent + ' ')}" for key, one in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _seeds(text: str) -> range:
    first, _, last = text.partition("-")
    found = range(int(first), int(last or first) + 1)
    if not found:
        raise ValueError
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvtwin.conformance.lab.mutation.power", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{FAULTS} or {RIGHT} (default: both)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--seeds", type=_seeds, default=range(1, 21), metavar="N-M", help="default: 1-20")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this fault or implementation; repeatable")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="parallel processes (default: 2)")
    parser.add_argument(
        "--results", type=Path, default=DEFAULT_RESULTS, metavar="FILE", help="lines of JSON (default: %(default)s)"
    )
    parser.add_argument("--store", metavar="MACHINE", help="write the counts to power.json, as those of this machine")
    options = parser.parse_args(arguments)
    kinds = options.kinds or [FAULTS, RIGHT]
    if set(kinds) - {FAULTS, RIGHT}:
        parser.error(f"KIND must be {FAULTS} or {RIGHT}, got {', '.join(kinds)}")
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    try:
        wanted = orders(kinds, options.only, options.seeds, options.device)
    except ValueError as error:
        parser.error(str(error))
    made = {record["key"] for record in read(options.results) if record["verdict"] != "broken"}
    missing = [order for order in wanted if order.key not in made]
    if missing:
        with bar(len(missing), "verdict") as progress, options.results.open("a", encoding="utf-8") as file:
            def done(record: dict[str, Any]) -> None:
                print(json.dumps(record), file=file, flush=True)
                if record["verdict"] == "broken":
                    say(f"broken: {record['key']}: {record['message']}")
                progress.update()

            run(missing, device=options.device, jobs=options.jobs, done=done)
    keys = {order.key for order in wanted}
    records = [record for record in read(options.results) if record["key"] in keys]
    found = counts(records)
    print("\n".join(lines(found)))
    if options.store:
        store(found, {options.device: options.store})
    alarms = [record for record in records if json.loads(record["key"])[1] == RIGHT and record["verdict"] != "right"]
    broken = [record for record in records if record["verdict"] == "broken"]
    for record in [*alarms, *broken]:
        print(f"{record['key']}: {record['verdict']}: {record.get('test', '')} {record.get('message', '')}")
    return 1 if alarms or broken else 0


if __name__ == "__main__":
    sys.exit(main())
