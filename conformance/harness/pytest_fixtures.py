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
    """``pools(ranks)``: that many processes with a process group, of one pool, which is started when it is needed."""
    from ..ranks.pool import Part, Pool, most_ranks

    running: list[Pool] = []

    def pool(ranks: int) -> Part:
        most = min(4, most_ranks(device))
        if ranks > most:
            pytest.skip(f"needs {ranks} GPUs, and this machine has {most}")
        if not running:
            running.append(Pool(most, device.type).__enter__())
        return running[0].of(ranks)

    yield pool
    for one in running:
        one.__exit__()


@pytest.fixture(scope="session")
def twins(request: pytest.FixtureRequest) -> Twins:
    """``twins.reference`` and ``twins.optimized``, the implementation under test."""
    return _suite(request).twins
