"""Copies of kvtwin's two sides under another package name, so that a verdict judges them as anybody's implementation.

``kvtwin verify METHOD --impl MODULE`` judges a stranger's module. A mutant therefore lies in a package of its own,
`PACKAGE`, and kvtwin itself stays as it is: neither the oracle, nor the parts of `kvtwin.optimized` that some tests
import directly, are ever the mutant.
"""

from __future__ import annotations

import ast
import hashlib
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ... import discovery
from .mutants import Mutant

#: The name of the copied package.
PACKAGE = "kvtwin_mutant"
SIDES = ("optimized", "reference")
IGNORED = ("__pycache__", "hf")  # not copied: no verdict calls the caches for transformers

#: Appended to the package: kvtwin's own code has what other implementations must declare.
ALL_READINGS = """

from kvtwin.conformance import Capabilities, capabilities
CAPABILITIES = Capabilities(options=capabilities.ALL)
"""
#: Folders with a module, or a folder, per method.
GROUPS = ("baselines", "contract")
#: Classes of arguments, beside the configurations: a test makes one of them for both sides.
SHARED = ("HeadClusters", "Pages", "Quantized", "Thought")

#: Why no verdict judges a mutant: by the beginning of its file, and by the name of all files of its killers.
OUTSIDE_FILES = {
    "conformance/": "it changes the suite, not an implementation",
    "optimized/hf/": "it changes a cache for transformers, which no verdict calls",
    "reference/hf/": "it changes a cache for transformers, which no verdict calls",
}
OUTSIDE_SHARED = "it changes the class of an argument, which every implementation takes from kvtwin.reference"
OUTSIDE_TESTS = {
    r"test_.*_ranks\.py": "it shows in heads spread over several processes, which no verdict starts",
    r"test_interruptions\.py": "it shows after an interrupted call, and no verdict interrupts one",
}


@dataclass(frozen=True)
class Subject:
    """What a verdict judges: a mutant, or, without one, the copy of a side. method: of which method."""

    method: str
    side: str
    mutant: Mutant | None = None

    @property
    def name(self) -> str:
        return f"{self.side} of {self.method}, unchanged" if self.mutant is None else self.mutant.name

    @property
    def digest(self) -> str:
        return "" if self.mutant is None else self.mutant.digest

    @property
    def module(self) -> str | None:
        """The name of the mutated module in the copy."""
        if self.mutant is None:
            return None
        parts = self.mutant.file.removesuffix(".py").split("/")[1:]
        return ".".join([PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)])


def outside(mutant: Mutant, source: str) -> str | None:
    """Why no verdict can judge a mutant; None if one can. source: the text of its file, unchanged."""
    for beginning, reason in OUTSIDE_FILES.items():
        if mutant.file.startswith(beginning):
            return reason
    if mutant.file.partition("/")[0] not in SIDES:
        return "it lies in another package"
    if mutant.file.startswith("reference/") and _own_part(source) == _own_part(mutant.applied_to(source)):
        return OUTSIDE_SHARED
    files = {killer.partition("::")[0].rpartition("/")[2] for killer in mutant.killers}
    return next((
        reason for pattern, reason in OUTSIDE_TESTS.items() if all(re.fullmatch(pattern, file) for file in files)
    ), None)


def method_of(mutant: Mutant, names: Iterable[str]) -> str:
    """The method whose verdict judges a mutant: the one that its file belongs to, else the folder of the list, unless
    its killers name other methods alone. names: of all methods."""
    inside = mutant.file.removesuffix(".py").split("/")[1:]
    inside = inside[1:] if inside[0] in GROUPS else inside
    found = _named("/".join(inside), names)
    own = found & {inside[0]}
    if own:
        return own.pop()
    by_killer = [_named(killer, names) for killer in mutant.killers]
    if any(mutant.method in one or not one for one in by_killer):
        return mutant.method
    return sorted(set().union(*by_killer))[0]


def _named(text: str, names: Iterable[str]) -> set[str]:
    return {name for name in names if re.search(rf"(?<![a-z]){name}(?![a-z])", text)}


def names() -> list[str]:
    """The names of kvtwin's own methods."""
    return [pair.name for pair in discovery.built_in()]


def _shared(tree: ast.Module) -> list[ast.ClassDef]:
    """The classes of arguments that a file of the reference defines."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [node for node in classes if node.name.endswith("Config") or node.name in SHARED]


def _own_part(source: str) -> str:
    """The syntax tree of a file of the reference without its classes of arguments."""
    tree = ast.parse(source)
    shared = _shared(tree)
    tree.body = [node for node in tree.body if node not in shared]
    return ast.dump(tree)


def rewritten(source: str, place: str) -> str:
    """The text of the file `place`, such as "optimized/longflow/_ops.py", as a part of `PACKAGE`.

    The optimized side imports classes of arguments, results and checks from the reference, and goes on doing so. A copy
    of the reference takes its classes of arguments from kvtwin, since the tests make these.
    """
    if not place.startswith("optimized/"):
        module = ".".join(["kvtwin", *place.removesuffix(".py").removesuffix("/__init__").split("/")])
        lines = source.splitlines(keepends=True)
        for node in _shared(ast.parse(source)):  # right after the definition: a class below may hold it
            assert node.end_lineno is not None
            lines[node.end_lineno - 1] += f"\n\nfrom {module} import {node.name}\n"
        return "".join(lines)
    dots = r"\." * len(place.split("/"))
    source = re.sub(rf"^(\s*from ){dots}reference\b", r"\1kvtwin.reference", source, flags=re.MULTILINE)
    return source.replace('"kvtwin::', f'"{PACKAGE}::').replace("torch.ops.kvtwin.", f"torch.ops.{PACKAGE}.")


def copy(side: str, folder: Path, root: Path) -> None:
    """Write the copy of a side: root/PACKAGE. folder: the side's folder."""
    for file in sorted(folder.rglob("*.py")):
        inner = file.relative_to(folder)
        if any(part in IGNORED or part.startswith(".") for part in inner.parts):
            continue
        target = root / PACKAGE / inner
        target.parent.mkdir(parents=True, exist_ok=True)
        text = rewritten(file.read_text(encoding="utf-8"), f"{side}/{inner.as_posix()}")
        target.write_text(text, encoding="utf-8")
    package = root / PACKAGE / "__init__.py"
    before = package.read_text(encoding="utf-8") if package.is_file() else ""
    package.write_text(before + ALL_READINGS, encoding="utf-8")


def mutated(mutant: Mutant, source: str, pristine: Path, root: Path) -> None:
    """Write root/PACKAGE, a copy with the mutant. pristine: what `copy` wrote; source: the file's text, unchanged."""
    shutil.copytree(pristine / PACKAGE, root / PACKAGE)
    target = root / PACKAGE / mutant.file.partition("/")[2]
    target.write_text(rewritten(mutant.applied_to(source), mutant.file), encoding="utf-8")
    for stale in target.parent.glob(f"__pycache__/{target.stem}.*"):
        stale.unlink()


def digest_of(folders: Iterable[Path]) -> str:
    """Hash of all Python files of folders: results belong to one state of the sources."""
    made = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            inner = file.relative_to(folder)
            if "meta" not in inner.parts and inner.parts[0] != "mutation":
                made.update(f"{folder.name}/{inner.as_posix()}".encode() + b"\0" + file.read_bytes())
    return made.hexdigest()[:12]
