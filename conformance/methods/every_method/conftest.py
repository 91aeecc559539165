"""Fixtures of the tests of `kvtwin.optimized.hf.captured`."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture
def graphs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has no CUDA graphs."""
    from kvtwin.conformance.methods.support import stand_in

    stand_in.install(device, monkeypatch)


@pytest.fixture
def model(device: torch.device) -> Any:
    from kvtwin.conformance.methods.support.captured_cases import made

    return made("qwen3", device)
