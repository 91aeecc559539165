"""The mutants that are listed in files, see mutate.py."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path

from ...judge.properties import PROPERTIES
from . import kill_matrix, others

HERE = Path(__file__).resolve().parents[2]  # the folder of all tests
TEXTS = ("name", "file", "what")
OPTIONAL = ("control", "crash", "class", "fits")
#: Classes of mistakes that tests can overlook as a whole, each with a letter.
CLASSES = {
    "a": "a tensor is walked by the strides of another",
    "b": "several representative heads whose order matters, offload, padded rows (SyncKV)",
    "c": "reorder or reset, or rows that differ",
    "d": "the second round of a loop",
    "e": "equal, huge or tiny keys, and odd windows (KeyDiff)",
    "f": "a default or a schedule that both sides share",
    "g": "a path that is chosen by the size of a GPU",
}


class MutantError(ValueError):
    """A file of mutants is invalid, or the suite fails without mutants."""


@dataclass(frozen=True)
class Mutant:
    """One ``[[mutant]]``; ``method`` is the name of its file. control: empty for those of claim_mutants.py. fits: the
    properties under which a verdict may call it wrong, empty: any."""

    name: str
    method: str
    file: str
    replace: tuple[tuple[str, str], ...]
    what: str
    killers: tuple[str, ...]
    control: str
    crash: bool = False
    of_class: str = ""
    fits: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Hash of the substitution; stored results belong to one substitution."""
        return hashlib.sha256(repr((self.file, self.replace)).encode()).hexdigest()[:12]

    def applied_to(self, source: str) -> str:
        """The mutated source. Raises MutantError unless each old text occurs in `source` exactly once."""
        mutated = source
        for old, new in self.replace:
            found = source.count(old)
            if found != 1 or mutated.count(old) != 1:
                raise MutantError(f"{self.file}: expected this text exactly once, found it {found} times: {old!r}")
            mutated = mutated.replace(old, new)
        if mutated == source:
            raise MutantError("changes nothing")
        return mutated


def is_of(test: str, named: str) -> bool:
    """Whether a test is `named`, one of its parameter sets, or a test of that file."""
    return test == named or test.startswith((f"{named}[", f"{named}::"))


def load(folder: Path = HERE) -> list[Mutant]:
    """All mutants by method, in the order of the files. Raises MutantError for an invalid file."""
    mutants = [mutant for file in sorted(folder.rglob(kill_matrix.MUTANTS)) for mutant in _load_file(file)]
    names = [mutant.name for mutant in mutants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise MutantError(f"names must be unique: {', '.join(twice)}")
    return mutants


def everyone() -> list[Mutant]:
    """The mutants of kvtwin's methods and of those of other packages. Raises MutantError for an invalid file."""
    return load() + [mutant for method, file in others.files().items() for mutant in _load_file(file, method)]


def _load_file(file: Path, method: str = "") -> list[Mutant]:
    """The mutants of a file. method: its method, by default the name of the folder."""
    method = method or file.parent.name
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    control = tables.get("control")
    found = []
    for number, table in enumerate(tables.get("mutant", []), start=1):
        where = f"{method}/{file.name}: {table.get('name', f'mutant {number}')}"
        unknown = set(table) - {*TEXTS, *OPTIONAL, "replace", "killers"}
        missing = [key for key in (*TEXTS, "replace", "killers") if not table.get(key)]
        if unknown or missing:
            raise MutantError(f"{where}: unknown {sorted(unknown)}, missing {missing}")
        if not all(isinstance(pair, list) and [type(text) for text in pair] == [str, str] for pair in table["replace"]):
            raise MutantError(f"{where}: replace must be a list of [old text, new text]")
        table = {"control": control, "of_class": table.pop("class", ""), "fits": [], **table}
        if table["of_class"] not in ("", *CLASSES):
            raise MutantError(f"{where}: class must be one of {', '.join(CLASSES)}, got {table['of_class']!r}")
        if not isinstance(table["fits"], list) or not set(table["fits"]) <= set(PROPERTIES):
            raise MutantError(f"{where}: fits must be a list of {', '.join(PROPERTIES)}, got {table['fits']!r}")
        if not isinstance(table["control"], str):
            raise MutantError(f"{where}: neither the mutant nor the file has a control")
        if table["control"] in table["killers"]:
            raise MutantError(f"{where}: the control is one of the killers")
        table["replace"] = tuple((old, new) for old, new in table["replace"])
        table["killers"], table["fits"] = tuple(table["killers"]), tuple(table["fits"])
        found.append(Mutant(method=method, **table))
    return found
