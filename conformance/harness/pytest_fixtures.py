"""The fixtures of kvtwin's tests, registered together with suite.Suite: other projects' runs do not get them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from .impl import Twins
from .options import SUITE

if TYPE_CHECKING:
    import torch

    from .suite import Suite


def _suite(request: pytest.FixtureRequest) -> Suite:
    suite: Suite | None = request.config.pluginmanager.get_plugin(SUITE)
    assert suite is not None, "registered together with this module"
    return suite


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of the implementation under test; its tensors must be on it."""
    return _suite(request).backend.device


@pytest.fixture(scope="module")
def pools(device: torch.device) -> Iterator[Any]:
    """``pools(ranks)``: a pool of `ranks` processes, started when it is needed. One at a time, since each has processes
    of its own."""
    from ..ranks.pool import Pool, most_ranks

    running: list[Pool] = []

    def pool(ranks: int) -> Pool:
        if ranks > most_ranks(device):
            pytest.skip(f"needs {ranks} GPUs, and this machine has {most_ranks(device)}")
        if running and running[0].size != ranks:
            running.pop().__exit__()
        if not running:
            running.append(Pool(ranks, device.type).__enter__())
        return running[0]

    yield pool
    for one in running:
        one.__exit__()


@pytest.fixture(scope="session")
def twins(request: pytest.FixtureRequest) -> Twins:
    """``twins.reference`` and ``twins.optimized``, the implementation under test."""
    return _suite(request).twins
