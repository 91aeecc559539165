"""A fork server for mutate.py: it imports the common packages once and forks a process for each run of pytest.

The import of torch, Triton and Hypothesis took half of a mutant's time. The server is a script that does not import the
package under test: each fork imports it from the mutated copy.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Modules that most tests import. Those that are not installed are skipped.
IMPORTS = (
    "numpy", "torch", "torch.library", "torch.testing", "torch._meta_registrations", "torch.export", "triton",
    "triton.language", "triton.runtime.interpreter", "hypothesis", "hypothesis.strategies",
    "hypothesis.internal.conjecture.engine", "pytest", "safetensors.torch",
)  # fmt: skip


class Server:
    """Runs pytest in forks of a process that has imported IMPORTS, one at a time. Call `close` at the end."""

    def __init__(self) -> None:
        # Triton reads the variable at import to decide whether its own functions are interpreted.
        environ = {"OMP_NUM_THREADS": "1", **os.environ, "TRITON_INTERPRET": "1"}
        # Byte code outside the copies would stay there: a mutant could run what another one left for the same path.
        environ.pop("PYTHONPYCACHEPREFIX", None)
        command = [sys.executable, "-P", __file__]
        self._process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def pytest(
        self, arguments: Sequence[str], *, root: Path, environ: Mapping[str, str], output: Path
    ) -> tuple[int, float]:
        """Run ``python -m pytest`` in the folder `root` with the variables `environ`, and write its output to `output`.

        Returns the exit code (negative: a signal) and CPU seconds including its children. Raises RuntimeError if the
        server has ended.
        """
        order = {"arguments": list(arguments), "root": str(root), "environ": dict(environ), "output": str(output)}
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the server of pytest processes ended with exit code {self._process.wait()}")
        code, seconds = json.loads(answer)
        return code, seconds

    def close(self) -> None:
        self._process.communicate()


def _serve() -> None:
    # Use a separate descriptor for answers, so that printed output cannot mix with them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            _become_pytest(order)
        _, status, used = os.wait4(child, 0)
        answers.write(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]) + "\n")
        answers.flush()


def _become_pytest(order: dict[str, Any]) -> None:
    """Run pytest like ``python -m pytest`` and exit; does not return."""
    code = 70
    try:
        with open(os.devnull) as nothing, open(order["output"], "w") as output:
            os.dup2(nothing.fileno(), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ.clear()
        os.environ.update(order["environ"])
        os.chdir(order["root"])
        folders = [order["root"], *filter(None, order["environ"].get("PYTHONPATH", "").split(os.pathsep))]
        sys.path[:0] = [folder for folder in folders if folder not in sys.path]
        sys.argv = ["pytest", *order["arguments"]]
        importlib.invalidate_caches()
        import pytest

        code = int(pytest.main(order["arguments"]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
