"""``kvtwin new NAME [FOLDER]``: write a package with a method of its own (see own_methods.py).

It copies the files of template/ and replaces the name key_norm. The method keeps the tokens with the smallest key
norms. All tests of the new package pass. Its author then changes the method step by step.
"""

from __future__ import annotations

import importlib.util
import keyword
import shutil
from collections.abc import Sequence
from pathlib import Path

from . import discovery
from .command_line import Parser, words

TEMPLATE = Path(__file__).resolve().parent / "template"
SUFFIX = ".template"
#: The name of the method in the template, and of its classes without Config and State.
NAME, CLASS = "key_norm", "KeyNorm"


def check_name(name: str) -> None:
    """ValueError unless `name` can be the name of a new package and of its method."""
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name):
        raise ValueError(f"NAME must be a Python identifier, such as my_method, got {name!r}")
    if name.startswith("_") or not name.strip("_0123456789"):
        raise ValueError(f"NAME must begin with a letter, got {name!r}")
    if name in discovery.taken():
        raise ValueError(f"NAME {name!r} is the name of a module of kvtwin")
    if importlib.util.find_spec(name) is not None:
        raise ValueError(f"NAME {name!r} is the name of an installed module")


def class_name(name: str) -> str:
    """The name of the method's classes without Config and State: "key_norm" -> "KeyNorm"."""
    return "".join(part[0].upper() + part[1:] for part in name.split("_") if part)


def files(name: str) -> dict[str, str]:
    """The files of the package: their paths in its folder, and their texts."""
    def renamed(text: str) -> str:
        return text.replace(NAME, name).replace(CLASS, class_name(name))

    paths = sorted(TEMPLATE.rglob(f"*{SUFFIX}"))
    return {
        renamed(path.relative_to(TEMPLATE).as_posix().removesuffix(SUFFIX)): renamed(path.read_text(encoding="utf-8"))
        for path in paths
    }


def write(name: str, folder: Path) -> None:
    """Write the package. ValueError for a NAME that cannot be one, FileExistsError if `folder` exists, another OSError
    if it cannot be written."""
    check_name(name)
    if folder.exists() or folder.is_symlink():
        raise FileExistsError(f"FOLDER {folder} exists: name a new one")
    try:
        for path, text in files(name).items():
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
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=words, help="a new folder; default: NAME")
    options = parser.parse_args(arguments)
    folder = Path(options.folder or options.name)
    try:
        write(options.name, folder)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"wrote {folder}\nnext: python -m pip install -e '{folder}[test]' && kvtwin verify {options.name}")
    return 0
