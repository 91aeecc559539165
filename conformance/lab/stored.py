"""``python -m kvtwin.conformance.lab.stored``: the verdict of the command on every stored implementation.

Each implementation of implementations/stored.py is written into a folder as a stranger's package, together with those
that it is made of. Then ``kvtwin verify METHOD --impl theirs`` judges it with each seed, in a process of its own, with
the tests that the table names. Its exit code, property and cause must be those of the table, and no text of the report
may be another tool's. A line for each verdict; exit code 1 if one of them is another.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from ..progress import bar, say
from .implementations import stored
from .implementations.run import FOREIGN
from .implementations.stored import Row

HERE = Path(__file__).parent / "implementations"
#: What the implementations are made of.
PARTS = ("__init__.py", "longflow.py", "longflow_states.py", "exploits", "right/__init__.py", "right/loops.py")
#: What ends the process of a call, by name: in place of the first line of a function that is right.
ENDS = {
    "abort": "os.abort()", "exit": "os._exit(0)", "signal": "ctypes.string_at(0)", "sys.exit": "sys.exit(3)",
    "loop": "while True: pass", "memory": "raise MemoryError('no room')",
}
ON_A_GPU = {
    "wild-read": "torch.empty(0, device='cuda'); wild(query)", "over-read": "past(key)",
    "gpu-memory": "torch.empty(2**44, device='cuda')",
}
FACADE = """
import types
from kvtwin.conformance import Capabilities
from {module} import {name} as implementation
CAPABILITIES = Capabilities(validates_arguments=False)
{method} = types.ModuleType("theirs.{method}")
{method}.{function} = implementation{call}
"""
CRASHES = """
import ctypes, os, sys, types
import torch, triton, triton.language as tl
from kvtwin.conformance import Capabilities
from .own.longflow import Decode
CAPABILITIES = Capabilities(validates_arguments=False)
right = Decode()

@triton.jit
def read(source, offset, out):
    tl.store(out, tl.load(source + offset).to(tl.float32))

def wild(tensor):
    read[(1,)](tensor, 2**40, torch.empty(1, device=tensor.device))
    torch.cuda.synchronize()

def past(tensor):
    if tensor.is_contiguous():
        read[(1,)](tensor, tensor.numel(), torch.empty(1, device=tensor.device))
        torch.cuda.synchronize()

def decode_attention(query, key, *rest, **options):
    {how}
    return right(query, key, *rest, **options)

longflow = types.ModuleType("theirs.longflow")
longflow.decode_attention = decode_attention
"""


class Order(NamedTuple):
    """An implementation. text: of its package; property: the wrong one, "" if it is right; says: a part of a cause."""

    name: str
    text: str
    method: str
    tests: str
    property: str
    says: str = ""


def orders(device: str) -> Iterator[Order]:
    """All of them, for a device."""
    for row in (*stored.FOUND, *stored.FAULTS, *stored.RIGHT):
        yield Order(row.id, _facade(row), row.method, row.tests, row.shows, _theirs(row.says))
    for name, how in (ENDS | (ON_A_GPU if device == "cuda" else {})).items():
        yield Order(name, CRASHES.replace("{how}", how), "longflow", SURVIVING, "survives")


SURVIVING = "(test_numbers_are_within or test_large_tensors) and decode_attention-output and not fp8 and not paged"


def _facade(row: Row) -> str:
    own = isinstance(row.exploit, type) and not row.name.endswith("State")
    module = row.exploit.__module__.replace("kvtwin.conformance.lab.implementations", ".own")
    return FACADE.format(
        module=module, name=row.exploit.__name__, method=row.method, function=row.name, call="()" if own else "",
    )


def _theirs(text: str) -> str:
    return text.replace("kvtwin.conformance.lab.implementations", "theirs.own")


def write(order: Order, folder: Path) -> None:
    """The package `theirs`, in a folder."""
    package = folder / "theirs"
    for part in PARTS:
        source, target = HERE / part, package / "own" / part
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    for path in package.rglob("*.py"):
        path.write_text(path.read_text(encoding="utf-8").replace("from .... ", "from kvtwin.conformance "), "utf-8")
    (package / "__init__.py").write_text(order.text, encoding="utf-8")


def judged(order: Order, device: str, seed: int) -> tuple[str, list[str]]:
    """The verdict of the command, and what is wrong with it."""
    with tempfile.TemporaryDirectory(prefix="kvtwin-stored-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write(order, folder)
        ran = subprocess.run(
            [sys.executable, "-m", "kvtwin", "verify", order.method, "--impl=theirs", f"--device={device}", "--jobs=1",
             f"--seed={seed}", "--hypothesis-profile=default", "--call-limit=20", "-k", order.tests,
             "--report=kvtwin-report.json"],
            cwd=folder, capture_output=True, text=True, check=False,
        )
        path = folder / "kvtwin-report.json"
        if not path.is_file():
            return "none", [f"no report; exit code {ran.returncode}: {(ran.stderr or ran.stdout)[-300:]}"]
        report = json.loads(path.read_text(encoding="utf-8"))
    overall, found = report["overall"][order.method], report["verdicts"][order.method]
    causes = {one["property"] for one in overall["causes"]}
    expected = {order.property} - {""}
    wrong = [] if causes == expected else [f"causes {', '.join(sorted(causes)) or 'none'}"]
    wrong += [] if (ran.returncode == 1) == bool(expected) else [f"exit code {ran.returncode}"]
    texts = [str(one[key]) for one in found.values() for key in ("message", "why") if one.get(key)]
    if order.says not in " ".join(texts):
        wrong.append(f"it does not say {order.says!r}: {texts[:2]}")
    if order.property != "fair_play":  # which names what the implementation calls
        wrong += [f"foreign text: {text}" for text in texts if FOREIGN.search(text)]
    return overall["verdict"], wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="at the same time (default: 2)")
    options = parser.parse_args(arguments)
    chosen = [one for one in orders(options.device) if not options.names or one.name in options.names]
    failed = 0
    with ThreadPoolExecutor(options.jobs) as pool, bar(len(chosen) * len(options.seeds), "verdict") as progress:
        made = {
            pool.submit(judged, one, options.device, seed): (one, seed) for seed in options.seeds for one in chosen
        }
        for done in as_completed(made):
            (one, seed), (verdict, wrong) = made[done], done.result()
            failed += bool(wrong)
            say(f"{one.name} {seed}: {verdict} [{one.property}]" + "".join(f"\n  {text}" for text in wrong))
            progress.update()
    print(f"{len(made)} verdicts, {failed} are not as expected")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
