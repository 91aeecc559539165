"""The pages of command lines and pytest options, from what the programs print at --help."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any

from .markdown import escape, markdown_table
from .stored import read

#: Modules with a command line, in the order of their sections; the key names the page.
COMMANDS = {
    "verify": ("kvtwin.conformance",),
    "results": (
        "kvtwin.conformance.ledger", "kvtwin.conformance.capacity", "kvtwin.fixtures.accuracy",
        "kvtwin.fixtures.needle", "kvtwin.fixtures.counterfactual", "kvtwin.fixtures.record",
    ),
    "develop": (
        "kvtwin.conformance.lab.mutation", "kvtwin.conformance.lab.mutation verdict",
        "kvtwin.conformance.lab.mutation.power", "kvtwin.conformance.lab.hosts", "kvtwin.conformance.lab.soak",
        "kvtwin.conformance.lab.compile_only",
    ),
}  # fmt: skip
#: Where `main` is, of the packages among them.
MAINS = {
    "kvtwin.conformance": "kvtwin.conformance.__main__",
    "kvtwin.conformance.lab.mutation": "kvtwin.conformance.lab.mutation.mutate",
    "kvtwin.conformance.lab.mutation verdict": "kvtwin.conformance.lab.mutation.verdict_matrix",
}
TITLES = {"verify": "The command kvtwin", "results": "Claims, capacity, accuracy, traces", "develop": "Develop kvtwin"}


def command_pages() -> dict[str, str]:
    """One page per group of commands, and one of pytest's options."""
    found = {
        name: f"# {TITLES[name]}\n\n" + "\n".join(f"## `python -m {one}`\n\n{help_of(one)}" for one in modules)
        for name, modules in COMMANDS.items()
    }
    from kvtwin.conformance import cli

    helps = [("kvtwin", ["--help"]), *((f"kvtwin {name}", [name, "--help"]) for name in cli.COMMANDS)]
    own = "".join(
        f"## `{program}`\n\n```text\n{_printed(cli.main, arguments, program)}```\n\n" for program, arguments in helps
    )
    found["verify"] = found["verify"].replace("\n\n", f"\n\n{own}", 1)
    found["pytest"] = pytest_page()
    return found


def help_of(module: str) -> str:
    main = importlib.import_module(MAINS.get(module, module)).main
    return f"```text\n{_printed(main, ['--help'], f'python -m {module}')}```\n"


def _printed(main: Callable[[list[str]], Any], arguments: list[str], program: str) -> str:
    """What a command line prints at --help, 88 columns wide."""
    before, columns = sys.argv, os.environ.get("COLUMNS")
    sys.argv, os.environ["COLUMNS"] = [program], "88"
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            main(arguments)
    finally:
        sys.argv = before
        os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
    return printed.getvalue().rstrip() + "\n"


class _Options:
    """Stands in for pytest's parser: records the options that the plugin adds."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    def getgroup(self, *_: str) -> _Options:
        return self

    def addoption(self, name: str, **options: Any) -> None:
        if options.get("help") == argparse.SUPPRESS:
            return
        values = "{" + ",".join(options["choices"]) + "}" if "choices" in options else options.get("metavar", "")
        self.rows.append([f"`{name}={values}`" if values else f"`{name}`", escape(options["help"])])


def pytest_page() -> str:
    from kvtwin.conformance.harness import options

    seen = _Options()
    options.add(seen)  # type: ignore[arg-type]
    about = read("docs/notes/pytest-options.md")
    return f"# pytest options\n\n{about}\n{markdown_table(['option', 'meaning'], seen.rows)}\n"
