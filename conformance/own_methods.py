"""Methods of other packages, which the suite tests as it tests kvtwin's.

A package declares an entry point of the group ``kvtwin.methods``. It names a `Method`::

    [project.entry-points."kvtwin.methods"]
    key_norm = "key_norm:METHOD"

``kvtwin new NAME`` writes such a package. This module imports neither torch nor pytest. Finding a method imports the
module of its entry point, and no module that the `Method` names.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

GROUP = "kvtwin.methods"
MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Method:
    """A method of another package: its name, and where its parts are. All fields are strings.

    - name: the name of the method and of its entry point, a Python identifier without a leading underscore.
    - reference: the module of the reference, in plain PyTorch. Its ``__all__``, a literal, has one ``*Config``, one
      ``*State`` and the method's functions, if it has any; or functions alone. It accepts float64.
    - optimized: the module with the same ``__all__`` and the same signatures.
    - checker: the module with the error bounds, and what else ``kvtwin.conformance.judge.checkers`` lists.
    - configs: "module:function", a function (most, window) that returns a Hypothesis strategy of the config's keyword
      arguments: a budget from 1 to `most`, and all options but `scale`. `window` is the largest observation window.
      Not needed without a state.

    The modules are imported when a test needs them. A wrong declaration raises `MethodError`.
    """

    name: str
    reference: str
    optimized: str
    checker: str
    configs: str = ""


class MethodError(ValueError):
    """An entry point of the group is no method. The message names the package, the entry point and the part."""


@dataclass(frozen=True)
class Declared:
    """A method, and where it was declared. exports: the ``__all__`` of its reference; folder: that of the module of the
    entry point, which has the tests, mutants.toml and traces."""

    method: Method
    entry: str
    exports: tuple[str, ...]
    folder: Path

    def fail(self, part: str, problem: str) -> MethodError:
        return MethodError(f"{self.entry}: {part}: {problem}")


def declared() -> Iterator[Declared]:
    """The methods of all installed packages, sorted by name. Raises MethodError."""
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        package = f"package {entry.dist.name} {entry.dist.version}" if entry.dist is not None else "a package"
        where = f"{package}, entry point {entry.name!r} of {GROUP}"
        try:
            found = _declared(entry, where)
        except _Problem as problem:
            raise MethodError(f"{where}: {problem}") from problem.__cause__
        yield found


class _Problem(Exception):
    """The part and the problem, without the entry point."""


def _declared(entry: EntryPoint, where: str) -> Declared:
    try:
        method = entry.load()
    except Exception as error:
        raise _Problem(f"cannot import {entry.value}: {type(error).__name__}: {error}") from error
    if not isinstance(method, Method):
        raise _Problem(f"{entry.value} must be a kvtwin.conformance.Method, got {type(method).__name__}")
    for field in fields(method):
        value = getattr(method, field.name)
        if not isinstance(value, str) or not (value or field.name == "configs"):
            raise _Problem(f"{field.name}: expected a string, got {value!r}")
    if not method.name.isidentifier() or method.name.startswith("_"):
        raise _Problem(f"name: expected a Python identifier without a leading underscore, got {method.name!r}")
    if method.name != entry.name:
        raise _Problem(f"name: expected the name of the entry point, got {method.name!r}")
    exports = _read("reference", method.reference, literal_all)
    functions_alone = bool(exports) and not any(str(name).endswith(("Config", "State")) for name in exports)
    for suffix in () if functions_alone else ("Config", "State"):
        if sum(str(name).endswith(suffix) for name in exports) != 1:
            got = ", ".join(map(str, exports)) or "no names"
            raise _Problem(f"reference: __all__ of {method.reference} needs one *{suffix}, got {got}")
    _source("optimized", method.optimized)
    _source("checker", method.checker)
    if method.configs or not functions_alone:
        _check_configs(method)
    return Declared(method, where, exports, _source("entry point", entry.module).parent)


def _check_configs(method: Method) -> None:
    module, colon, function = method.configs.partition(":")
    if not colon or not function.isidentifier():
        raise _Problem(f"configs: expected \"module:function\", got {method.configs!r}")
    if function not in _read("configs", module, _top_level):
        raise _Problem(f"configs: {module} has no {function!r}")


def _source(part: str, module: str) -> Path:
    """The source file of a module, which is not imported. Its parent packages are."""
    if not MODULE.fullmatch(module):
        raise _Problem(f"{part}: expected the name of a module, got {module!r}")
    try:
        spec = importlib.util.find_spec(module)
    except Exception as error:
        raise _Problem(f"{part}: cannot import {module}: {type(error).__name__}: {error}") from error
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise _Problem(f"{part}: there is no module {module}")
    return Path(spec.origin)


def _read(part: str, module: str, read: Callable[[Path], Collection[str]]) -> Any:
    """What `read` finds in the source of a module."""
    source = _source(part, module)
    try:
        return read(source)
    except (SyntaxError, ValueError, TypeError) as error:
        raise _Problem(f"{part}: cannot read {module}: {type(error).__name__}: {error}") from error


def literal_all(source: Path) -> tuple[str, ...]:
    """The literal ``__all__`` of a module, empty if it has none."""
    for node in _parsed(source).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return tuple(ast.literal_eval(node.value))
    return ()


def _top_level(source: Path) -> set[str]:
    """The names that a module's statements define or import."""
    found: set[str] = set()
    for node in _parsed(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def _parsed(source: Path) -> ast.Module:
    return ast.parse(source.read_text(encoding="utf-8"), filename=str(source))
