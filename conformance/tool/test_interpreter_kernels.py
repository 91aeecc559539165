"""For every kernel, the accelerated interpreter computes the same bits as the plain one.

lab/compile_only.py lists the kernels. A kernel that no call launches fails the test, which names it (see
kernel_launches.py). All of them can be interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from kvtwin.conformance import interpreter
from kvtwin.conformance.tool import kernel_launches

pytestmark = pytest.mark.first


def started(module: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"kvtwin.conformance.{module}", *arguments], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )


def lines(process: subprocess.Popen[str]) -> list[str]:
    out, error = process.communicate()
    assert process.returncode == 0, error
    return out.splitlines()


def first_differences(fast: Sequence[str], plain: Sequence[str]) -> list[str]:
    """For each kernel, the number of the first launch after which tensors differ. Later differences may follow from
    it."""
    found: dict[str, str] = {}
    for number, (one, other) in enumerate(zip(fast, plain, strict=False)):
        if one != other:
            found.setdefault(one.split()[0], f"launch {number}: accelerated {one}, plain {other}")
    return list(found.values())


@pytest.mark.slow
def test_every_kernel_computes_the_same_bits_accelerated_and_plain():
    plain = started("tool.kernel_launches", **{interpreter.VARIABLE: "plain"})
    listed = set(lines(started(
        "lab.compile_only", "--list", "--head-dim", str(kernel_launches.HEAD_DIM), **{interpreter.INTERPRET: "0"}
    )))  # fmt: skip
    mode, *fast = lines(started("tool.kernel_launches", **{interpreter.VARIABLE: "fast"}))
    assert mode.startswith("accelerated "), mode
    launched = {line.split()[0] for line in fast}
    assert len(listed) > 50, "compile_only lists no kernels"
    assert not listed - launched, "nothing launches these kernels: add a call to kernel_launches.py"
    mode, *other = lines(plain)
    assert mode.startswith("plain "), mode
    assert not first_differences(fast, other)
    assert len(other) == len(fast)


def test_the_first_launch_that_differs_is_named_for_each_kernel():
    fast, plain = ["a 1", "b 2", "a 3", "b 4", "c 5"], ["a 1", "b 0", "a 0", "b 0", "c 5"]
    assert first_differences(fast, plain) == [
        "launch 1: accelerated b 2, plain b 0", "launch 2: accelerated a 3, plain a 0"
    ]
