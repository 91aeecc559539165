"""Raises a usage error if the tests run without kvtwin's plugin, or against another copy of kvtwin."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    here = Path(__file__).resolve().parent
    try:
        from kvtwin.conformance import plugin
    except ModuleNotFoundError:
        raise pytest.UsageError("kvtwin is not installed; in its folder: python -m pip install -e '.[test]'") from None
    if here != plugin.HERE:
        raise pytest.UsageError(
            f"the tests in {here} would test the kvtwin installed from {plugin.HERE.parent}; install this copy "
            "(python -m pip install -e .), or run the installed tests: pytest --pyargs kvtwin.conformance"
        )
    if not config.pluginmanager.has_plugin(plugin.NAME):
        raise pytest.UsageError("these tests need kvtwin's pytest plugin, which is not loaded: add -p kvtwin")
