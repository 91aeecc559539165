"""The pytest plugin (entry point ``kvtwin``): its options, and the activation of the suite.

pytest loads an installed plugin in every run of its environment. So this module imports nothing heavy, defines no
fixtures and does not change the environment. ``suite.Suite`` does all that; it is registered only if the run includes
tests of this folder or uses a ``--kv-*`` option.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .harness import options

HERE = Path(__file__).resolve().parent
PACKAGE = "kvtwin.conformance"
NAME = "kvtwin"  # of the entry point
SUITE = options.SUITE


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add(parser)


# First, so that our Hypothesis profiles exist when Hypothesis's plugin looks for the one of --hypothesis-profile.
@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("help") or getattr(config.option, "version", 0):
        return
    if options.any_given(config) or any(_names_own_tests(config, argument) for argument in config.args):
        _activate(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> None:
    # Collected although the command line does not name it, for example through a symlink or another plugin.
    if HERE in file_path.resolve().parents:
        _activate(parent.config)


def _activate(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin(SUITE):
        from .harness import pytest_fixtures
        from .harness.suite import Suite

        config.pluginmanager.register(Suite(config), SUITE)
        config.pluginmanager.register(pytest_fixtures, f"{SUITE}-fixtures")


def _names_own_tests(config: pytest.Config, argument: str) -> bool:
    """True if a command line argument names the folder of this file, a parent of it, or a path inside it."""
    name = argument.split("::")[0]
    if config.getoption("pyargs") and (name == "kvtwin" or f"{name}.".startswith(f"{PACKAGE}.")):
        return True
    path = (config.invocation_params.dir / name).resolve()
    if path == HERE or HERE in path.parents:
        return True
    # A parent folder may contain kvtwin in a virtual environment, where pytest collects nothing.
    return path in HERE.parents and "site-packages" not in HERE.relative_to(path).parts
