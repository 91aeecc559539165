"""``kvtwin``, or ``python -m kvtwin``: one command for verifying, replaying, starting a method and reading results.

``kvtwin COMMAND --help`` explains each command.

Each command imports what it needs when it runs, so that ``kvtwin --help`` is fast and works without torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from importlib.metadata import version

from . import discovery, ledger
from .command_line import Parser, number, unknown, words
from .own_methods import MethodError

#: What the extra "test" installs, and some commands import.
NEEDED = ("hypothesis", "pytest", "safetensors", "tqdm")

#: Of `accuracy --impl`: answers per task, by default and at most.
QUERIES, MOST_QUERIES = 40, 100_000

Command = Callable[[Sequence[str], str], int]


def verify(arguments: Sequence[str], prog: str) -> int:
    """verify methods: run the tests, print a table, write a report"""
    from . import __main__

    return __main__.main(arguments, prog=prog)


def replay(arguments: Sequence[str], prog: str) -> int:
    """judge a failing case again, from the file that a run saved"""
    from .harness import replay as module

    return module.main(arguments, prog=prog)


def methods(arguments: Sequence[str], prog: str) -> int:
    """list the methods and their configuration classes"""
    _parser(prog, methods).parse_args(arguments)
    for pair in discovery.methods():
        shown = [export for export in pair.exports if export.endswith("Config")] or pair.exports
        print(f"{pair.name:16}{pair.reference_name}, {pair.optimized_name}: {', '.join(shown)}")
    return 0


def new(arguments: Sequence[str], prog: str) -> int:
    """write a package with a method of your own, in which all tests pass"""
    from . import new_method

    return new_method.main(arguments, prog=prog)


def claims(arguments: Sequence[str], prog: str) -> int:
    """print the ledger of the papers' claims, as Markdown"""
    found = ledger.load()
    chosen = _methods(arguments, _parser(prog, claims), sorted({claim.method for claim in found}))
    left_out = (one for one in ledger.omitted() if one.method in chosen)
    print(ledger.table((claim for claim in found if claim.method in chosen), left_out, ledger.sources()))
    return 0


def capacity(arguments: Sequence[str], prog: str) -> int:
    """count how many requests fit on a GPU, by method"""
    from . import capacity as module

    return module.main(arguments, prog=prog)


def accuracy(arguments: Sequence[str], prog: str) -> int:
    """print how kvtwin's own small model answers with each method, or measure it with --impl"""
    from ..fixtures import accuracy_plot

    model = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    model.add_argument("--model")
    if model.parse_known_args(arguments)[0].model not in (None, "small"):
        from ..fixtures import known_accuracy

        return known_accuracy.main(arguments, prog)

    stored = json.loads((resources.files("kvtwin.fixtures") / "accuracy.json").read_text(encoding="utf-8"))
    parser = _parser(prog, accuracy)
    parser.epilog = "Without --impl the stored results are printed. python -m kvtwin.fixtures.accuracy stores new ones."
    parser.add_argument("--model", choices=("small", "known"), help="known: measures a public one, see its --help")
    parser.add_argument("--impl", type=words, metavar="MODULE", help="measure with this module's states or functions")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="of --impl; default: cpu")
    parser.add_argument(
        "--queries", type=number(1, MOST_QUERIES), metavar="N",
        help="with --impl: least number of answers per task (40)",
    )
    names = sorted({_method_of(row) for row in stored["rows"]})
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"),
        help="of the model with --impl; default: the first of these that the module supports",
    )
    chosen = _methods(arguments, parser, names)
    options = parser.parse_args(arguments)
    if options.impl is not None:
        return _measure(options, parser)
    for name in ("device", "queries", "dtype"):
        if getattr(options, name) is not None:
            parser.error(f"--{name} needs --impl: without it the stored results are printed")
    print(accuracy_plot.table({**stored, "rows": [row for row in stored["rows"] if _method_of(row) in chosen]}))
    return 0


def _method_of(row: Mapping[str, object]) -> str:
    """The method of a row, whose name may end with options in parentheses."""
    return str(row["method"]).split(" (")[0]


def _measure(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """The accuracy with --impl. Exit code 1 if it raised an error."""
    import os

    from . import interpreter

    device = options.device or "cpu"
    if device == "cpu":
        interpreter.turn_on()
    import pytest
    import torch

    from ..fixtures import accuracy_of
    from .harness import naming
    from .progress import say

    if device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda, but torch {torch.__version__} sees no CUDA device here")

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as "python -m" does: the implementation may be a module of this folder
    try:
        with naming.typed("--impl"):
            rows = accuracy_of.evaluate(
                options.impl, plan=accuracy_of.plan(options.queries or QUERIES), methods=options.methods or None,
                device=device, dtype=options.dtype, progress=lambda line: say(line, sys.stderr),
            )
    except (accuracy_of.NothingToMeasure, pytest.UsageError) as error:
        parser.error(str(error))
    print(accuracy_of.table(rows))
    return int(any(row.failed for row in rows))


COMMANDS: dict[str, Command] = {
    command.__name__: command for command in (verify, replay, methods, new, claims, capacity, accuracy)
}


def _parser(prog: str, command: Command) -> Parser:
    said = command.__doc__ or ""
    return Parser(prog=prog, description=f"{said[0].upper()}{said[1:]}.")


def _methods(arguments: Sequence[str], parser: argparse.ArgumentParser, names: Sequence[str]) -> Sequence[str]:
    """The methods that the command line names, all of `names` if none. Exits with 2 for a name that is not there."""
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="which methods to print; default: all")
    chosen: list[str] = parser.parse_args(arguments).methods
    wrong = [name for name in chosen if name not in names]
    if wrong:
        parser.error(unknown("method", wrong, names))
    return chosen or names


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Exit code 2 for wrong usage; otherwise the command's own."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(
        prog="kvtwin", usage="kvtwin [-h] [--version] COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Verify KV-cache compression methods against float64 arithmetic.",
        epilog="commands:\n" + "\n".join(f"  {name:10}{command.__doc__}" for name, command in COMMANDS.items())
        + "\n\nkvtwin COMMAND --help explains a command.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"kvtwin {version('kvtwin')}")
    parser.add_argument("command", metavar="COMMAND", help="one of the commands below")
    if not given:
        parser.print_help(sys.stderr)
        return 2
    name = parser.parse_args(given[:1]).command
    if name not in COMMANDS:
        parser.error(unknown("command", [name], list(COMMANDS)))
    try:
        return COMMANDS[name](given[1:], f"kvtwin {name}")
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        parser.error(f"kvtwin {name} needs {error.name}: python -m pip install 'kvtwin[test]'")
    except MethodError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
