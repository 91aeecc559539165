"""``kvtwin new NAME [FOLDER] [--kind KIND]``: write a package with a method of its own (see own_methods.py).

It copies the files of template/common and of template/KIND, inserts the parts that several kinds have, and replaces the
name key_norm. All tests of the new package pass. Its author then changes the method step by step.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from . import discovery
from .command_line import Parser, words

TEMPLATE = Path(__file__).resolve().parent / "template"
SUFFIX = ".template"
#: The name of the method in the template, and of its classes without Config and State.
NAME, CLASS = "key_norm", "KeyNorm"
#: What a method of each kind does, in place of WHAT. The first is the default.
KINDS = {
    "evicts": "after each block of tokens, a cache keeps the tokens with the smallest key norms",
    "selects": "a cache keeps every token, and a step attends to those with the smallest key norms",
    "quantizes": "a cache keeps every token in 8 bits per number",
    "function": "a function scores tokens by the norms of their keys",
}
WHAT = "WHAT_IT_DOES"
#: A line that stands for the text of template/parts of this name.
INSERTED = re.compile(r"^# insert: (\w+)\n", flags=re.MULTILINE)


def check_name(name: str) -> None:
    """ValueError unless `name` can be the name of a new package and of its method."""
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name):
        raise ValueError(f"NAME must be a Python identifier, such as my_method, got {name!r}")
    if name.startswith("_") or not name.strip("_0123456789"):
        raise ValueError(f"NAME must begin with a letter, got {name!r}")
    if name in discovery.reserved_names():
        raise ValueError(f"NAME {name!r} is the name of a module of kvtwin")
    if importlib.util.find_spec(name) is not None:
        raise ValueError(f"NAME {name!r} is the name of an installed module")


def class_name(name: str) -> str:
    """The name of the method's classes without Config and State: "key_norm" -> "KeyNorm"."""
    return "".join(part[0].upper() + part[1:] for part in name.split("_") if part)


def files(name: str, kind: str = "evicts") -> dict[str, str]:
    """The files of the package: their paths in its folder, and their texts."""
    def part(match: re.Match[str]) -> str:
        return (TEMPLATE / "parts" / f"{match[1]}{SUFFIX}").read_text(encoding="utf-8")

    def renamed(text: str) -> str:
        return text.replace(NAME, name).replace(CLASS, class_name(name))

    found = {
        path.relative_to(folder).as_posix().removesuffix(SUFFIX): path.read_text(encoding="utf-8")
        for folder in (TEMPLATE / "common", TEMPLATE / kind) for path in sorted(folder.rglob(f"*{SUFFIX}"))
    }
    return {
        renamed(path): renamed(INSERTED.sub(part, text).replace(WHAT, KINDS[kind])) for path, text in found.items()
    }


def write(name: str, folder: Path, kind: str = "evicts") -> None:
    """Write the package. ValueError for a NAME that cannot be one, FileExistsError if `folder` exists, another OSError
    if it cannot be written."""
    check_name(name)
    if folder.exists() or folder.is_symlink():
        raise FileExistsError(f"FOLDER {folder} exists: name a new one")
    try:
        for path, text in files(name, kind).items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)  # nothing is left half-written
        if isinstance(error, OSError):
            raise OSError(f"FOLDER {folder} cannot be written: {error.strerror}") from None
        raise


def main(arguments: Sequence[str] | None = None, prog: str = "kvtwin new") -> int:
    parser = Parser(
        prog=prog,
        description="Write a package with a method of your own: reference, Triton version, checker, tests and mutants.",
    )
    parser.add_argument("name", metavar="NAME", help="of the package and of its method, a Python identifier")
    parser.add_argument(
        "--kind", choices=KINDS, default="evicts", help="what the method does with tokens; function: it has no state, "
        "and one function (default: %(default)s)",
    )
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=words, help="a new folder; default: NAME")
    options = parser.parse_args(arguments)
    folder = Path(options.folder or options.name)
    try:
        write(options.name, folder, options.kind)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"wrote {folder}\nnext: python -m pip install -e '{folder}[test]' && kvtwin verify {options.name}")
    return 0
