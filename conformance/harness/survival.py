"""Calls that do not return: an abort, a signal, an exit, an endless loop, no memory, an illegal access on a GPU.

``kvtwin verify --impl`` runs its tests in worker processes of pytest-xdist, which replaces one that has ended. Before
each call a worker writes down what it calls and with which case, and starts a timer that ends the process. From that
file the controlling process makes the result of the test: its property `survives` is wrong. Further tests of the same
function and property do not call it, and no test does after MOST_ENDS ended processes.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ..judge.properties import SURVIVES

#: The folder of the files, the seconds that a call and that all tests may take, and the time at which these are over:
#: set by the command, read by the workers.
FOLDER, LIMIT, TOTAL, END = "KVTWIN_CALLS", "KVTWIN_CALL_LIMIT", "KVTWIN_TIME_LIMIT", "KVTWIN_END"
SECONDS, SECONDS_IN_ALL, MOST_SECONDS = 120.0, 1200.0, 86_400.0  # by default, and at most
#: A function may end so many processes, where a call that does not return counts as OF_A_LOOP; all functions so many.
MOST_ENDS, OF_A_LOOP, MOST_RESTARTS = 12, 6, 64
ENDS, LOOPS = "ends.txt", "did not return"
#: What seeks the smallest case, in a process of its own, and the seconds for what is not the call: to import it.
SMALLEST, START = f"{__package__}.smallest", 60.0
ALL_RETURNED = 77  # its exit code if no call ended it


class EndsCall(Exception):
    """Raised in place of what the implementation raises instead of an answer: SystemExit, or out of memory."""

    shows = SURVIVES


class Watch:
    """Watches the calls of one worker process."""

    def __init__(self, folder: Path, limit: float) -> None:
        self.folder, self.limit = folder, limit
        self.running: dict[str, Any] = {}
        worker = os.environ["PYTEST_XDIST_WORKER"]
        self.file, self.tensors = folder / f"{worker}.json", folder / f"{worker}.safetensors"
        self.trace = (folder / f"{worker}.txt").open("w", encoding="utf-8")
        self._written: tuple[Any, ...] = ()
        self._size, self._ends = -1, Counter[str]()

    def test(self, nodeid: str, facts: dict[str, Any]) -> None:
        """A test begins."""
        self.running = {"test": nodeid, "facts": {**facts}}

    def idle(self) -> None:
        """No call runs."""
        faulthandler.cancel_dump_traceback_later()

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Raises pytest's Skipped if the function has ended too many processes."""
        ends = self.ends()
        if ends[name] >= MOST_ENDS or ends[_line(name, self.running)]:
            pytest.skip(f"{name} ends its process")
        self._write(name)
        faulthandler.dump_traceback_later(self.limit, exit=True, file=self.trace)
        try:
            yield
        except Exception as error:
            # After such an error nothing works on the GPU, but after one of what a capture in a CUDA graph forbids.
            if type(error).__name__ == "AcceleratorError" and "captur" not in str(error).splitlines()[0]:
                self.trace.write(f"{str(error).splitlines()[0]}\n")
                self.trace.close()
                os._exit(1)
            raise
        finally:
            self.idle()
            if _uses_cuda():  # the kernel may still run
                faulthandler.dump_traceback_later(self.limit, exit=True, file=self.trace)

    def ends(self) -> Counter[str]:
        """How many processes each function has ended, in all and per property: by its name, and by `_line`."""
        path = self.folder / ENDS
        size = path.stat().st_size if path.exists() else 0
        if size != self._size:
            self._size = size
            lines = path.read_text(encoding="utf-8").splitlines() if size else []
            self._ends = Counter([*lines, *(line.partition(" ")[0] for line in lines)])
        return self._ends

    def _write(self, name: str) -> None:
        from ..cases import case as cases

        case = cases.latest()
        what = (name, self.running.get("test"), case)
        if what == self._written:
            return
        self._written = what
        described = None if case is None else case.described()
        if case is not None and case.content == "given":
            case.save(self.tensors)
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps({**self.running, "call": name, "case": described}), encoding="utf-8")
        part.rename(self.file)


_watch: list[Watch] = []


def over() -> str | None:
    """How long the run was to take, if this time is over: "1200 s"."""
    end = os.environ.get(END)
    return f"{float(os.environ[TOTAL]):g} s" if end is not None and time.time() > float(end) else None


def start() -> Watch | None:
    """Watch the calls of this process, if it is a worker of the command."""
    folder = os.environ.get(FOLDER)
    watch = Watch(Path(folder), float(os.environ[LIMIT])) if folder and "PYTEST_XDIST_WORKER" in os.environ else None
    _watch[:] = [watch] if watch else []
    return watch


@contextmanager
def ending_calls(name: str) -> Iterator[None]:
    """Around a call of the implementation under test. Raises EndsCall or gpu_memory.TakenMemory."""
    try:
        if _watch:
            with _watch[0].call(name):
                yield
        else:
            yield
    except SystemExit as error:
        raise EndsCall(f"{name} calls sys.exit({error.code!r})") from error
    except MemoryError as error:
        raise EndsCall(f"{name}: out of memory: {error}") from error
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise _out_of_memory(name, str(error).splitlines()[0]) from error
        raise


def _out_of_memory(name: str, said: str) -> Exception:
    """The error for a call that ran out of a GPU's memory: EndsCall, unless it is other processes that hold it."""
    from ..cases import gpu_memory

    held = gpu_memory.bytes_of_others() if _uses_cuda() else 0
    if not held:
        return EndsCall(f"{name}: {said}")
    holds = f"of which other processes hold {held / 2**30:.0f} GiB"
    return gpu_memory.TakenMemory(f"{name} ran out of the GPU's memory, {holds}: {said}")


def _uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


# In the controlling process ------------------------------------------------------------------------------------------


def explain(report: pytest.TestReport, worker: str, folder: Path) -> None:
    """Make the report of a test whose process has ended that of a call that does not return."""
    try:
        running = json.loads((folder / f"{worker}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # before the first call
    if running.get("test") != report.nodeid:
        return
    how, facts = _how(folder / f"{worker}.txt"), running["facts"]
    with (folder / ENDS).open("a", encoding="utf-8") as ends:
        ends.write(f"{_line(running['call'], running)}\n" * (OF_A_LOOP if how.startswith(LOOPS) else 1))
    described = _smallest(running["case"], facts["subject"], folder / f"{running['call']}.json")
    message = f"{running['call']} {how}"
    case, replay = _saved(described, folder / f"{worker}.safetensors", report.nodeid, facts)
    finding = {
        "property": SURVIVES, "subject": facts["subject"], "field": None, "error": "EndsCall",
        "message": message, "case": case, "replay": replay,
    }
    report.when, report.longrepr = "call", message
    report.kvtwin = facts | {"finding": finding, "touched": True}  # type: ignore[attr-defined]


def _line(call: str, running: Mapping[str, Any]) -> str:
    return f"{call} {running['facts']['judges']}"


def _how(trace: Path) -> str:
    said = ""
    with suppress(OSError):
        said = trace.read_text(encoding="utf-8", errors="replace")
    if said.startswith("Timeout"):
        return f"{LOOPS} within {float(os.environ[LIMIT]):g} s"
    return f"ended in {said.splitlines()[0]}" if said else "ended its process: an abort, an exit or a signal"


def _smallest(described: dict[str, Any] | None, subject: str | None, known: Path) -> dict[str, Any] | None:
    """The smallest case that ends a process, if simpler ones than this can be made. known: that of the function, once
    it has been found."""
    if described is None or subject is None or described["content"] == "given":
        return described
    if not known.exists():
        known.write_text(json.dumps(described) + "\n", encoding="utf-8")
        _seek(subject, known)
    found: dict[str, Any] = json.loads(known.read_text(encoding="utf-8").splitlines()[-1])
    return found


def _seek(subject: str, path: Path) -> None:
    """Let another process call the function with smaller cases than that in a file, until it ends: see
    harness/smallest.py. The last line of the file is the case then."""
    from ..cases import failures

    first, limit = path.read_text(encoding="utf-8"), float(os.environ[LIMIT])
    command = [sys.executable, "-m", SMALLEST, subject, str(path), *failures.options(), "--limit", str(limit)]
    with suppress(subprocess.TimeoutExpired):
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
            timeout=START + 2 * limit,
        )
        if ended.returncode == ALL_RETURNED:
            path.write_text(first, encoding="utf-8")


def _saved(
    described: dict[str, Any] | None, tensors: Path, test: str, facts: Mapping[str, Any]
) -> tuple[str | None, str | None]:
    """The case as text, and the command that replays it."""
    if described is None:
        return None, None
    from ..cases import failures, saved

    case = saved.load(tensors) if described["content"] == "given" else saved.from_description(described)
    return repr(case), failures.save(case, test, facts["subject"])


def folder() -> Path | None:
    """The folder of the calls of this run; None if they are not watched."""
    found = os.environ.get(FOLDER)
    return Path(found) if found else None


@contextmanager
def watching(limit: float, total: float) -> Iterator[None]:
    """Inside the ``with`` block workers watch their calls. limit, total: seconds of a call, and of all tests."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="kvtwin-calls-", ignore_cleanup_errors=True) as made:
        ours = {FOLDER: made, LIMIT: str(limit), TOTAL: str(total), END: str(time.time() + total)}
        os.environ |= ours
        try:
            yield
        finally:
            for name in ours:
                del os.environ[name]
