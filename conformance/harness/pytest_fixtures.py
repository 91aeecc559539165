"""The fixtures of kvtwin's tests, registered together with suite.Suite: other projects' runs do not get them."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


@pytest.fixture(scope="session")
def twins(request: pytest.FixtureRequest) -> Twins:
    """``twins.reference`` and ``twins.optimized``, the implementation under test."""
    return _suite(request).twins
