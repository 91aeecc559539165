"""Fixtures of the tests of kvtwin's own methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def pools(device: torch.device) -> Iterator[Any]:
    """``pools(ranks)``: that many processes with a process group, of one pool, which is started when it is needed."""
    from kvtwin.conformance.lab.pool import Part, Pool, most_ranks

    running: list[Pool] = []

    def pool(ranks: int) -> Part:
        most = min(4, most_ranks(device))
        if ranks > most:
            pytest.skip(f"needs {ranks} GPUs, and this machine has {most}")
        if not running:
            running.append(Pool(most, device.type).__enter__())
        return running[0].first(ranks)

    yield pool
    for one in running:
        one.__exit__()
