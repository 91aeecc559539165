"""The same call in a fresh process, which answers with a digest of each field of the result: harness/fresh.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..cases.case import Case

#: What the process runs.
MODULE = "kvtwin.conformance.harness.fresh"
#: Odd factors of two sums of all elements, which wrap around: any order of addition gives the same bits.
FACTORS = (0x9E3779B97F4A7C15 - 2**64, 0xC2B2AE3D27D4EB4F - 2**64)


def bits(tensor: Tensor) -> Tensor:
    """The tensor as integers, so that NaN equals itself and -0 differs from 0."""
    if not tensor.is_floating_point():
        return tensor
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def digest(tensor: Tensor) -> list[Any]:
    """What two tensors of the same bits have in common, and others have not."""
    number = bits(tensor).long().flatten()
    place = torch.arange(1, number.numel() + 1, device=number.device)
    sums = [int((number * (place * factor ^ place >> 7)).sum()) for factor in FACTORS]
    return [str(tensor.dtype), list(tensor.shape), *sums]


def digests(fields: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    return {name: digest(tensor) for name, tensor in fields.items()}


class Process:
    """A process that calls functions of the implementation under test. Call `close` at the end."""

    def __init__(self, implementation: str | None) -> None:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, *filter(None, [implementation])], env=environ, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )

    def ask(self, subject: str, case: Case) -> None:
        """Send a call, whose answer is read by `answer`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"subject": subject, **case.described()}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The digests of the call's fields; {"error": text} if it raised, or if the process ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            return {"error": f"the process ended with exit code {self._process.wait()}"}
        answered: dict[str, Any] = json.loads(line)
        return answered

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
