"""Type stubs of the caches for transformers, which are made at run time: their options, for mypy and for editors.

python .ci/stubs.py           prints what differs from the files. Exit code 1 if anything does
python .ci/stubs.py --write   writes reference/hf/__init__.pyi and optimized/hf/__init__.pyi
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIDES = {"reference": (".", ".."), "optimized": ("...reference.hf.", "...reference.")}
HEAD = '''# ruff: noqa
# Written by .ci/stubs.py from the constructors of the caches and the configs of the methods.
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

'''


def stub(side: str) -> str:
    """The stub of kvtwin.SIDE.hf."""
    package = importlib.import_module(f"kvtwin.{side}.hf")
    hf, reference = SIDES[side]
    names = importlib.import_module("kvtwin.reference.hf.block_caches").names()
    caches = [getattr(package, name) for name in names.values()]
    own = sorted(one.__module__.rpartition(".")[2] for one in caches if one.__module__ != package.__name__)
    bases = sorted({base_of(one, package.__name__) for one in caches if one.__module__ == package.__name__})
    imports = [
        f"from {reference}contract.synckv.types import HeadClusters",
        f"from {reference}contract.thinkv.types import Thresholds",
        f"from {hf.rstrip('.') or '.'} import cache_adapter as cache_adapter",
        *(f"from {hf}{base.split('.')[-2]} import {base.split('.')[-1]}" for base in bases),
        *(["from ._captured import captured as captured"] if side == "optimized" else []),
        f"from . import {', '.join(own)}",
    ]
    public = ["cache", *(["captured"] if side == "optimized" else []), *names.values()]
    parts = [
        HEAD + "\n".join(imports), f"__all__ = {listed(public)}",
        f"def cache(\n    method: Literal{listed(names)},\n    model: Any, **options: Any,\n) -> StateCache: ...",
        *(cache_stub(one, package.__name__) for one in caches),
    ]
    return "\n\n".join(parts) + "\n"


def listed(names: Any) -> str:
    quoted = wrapped(f'"{name}"' for name in names)
    return f"[\n{quoted},\n    ]"


def wrapped(items: Iterable[str]) -> str:
    """The items in lines, each in one line."""
    text = textwrap.fill(", ".join(item.replace(" ", "\0") for item in items), 118, initial_indent=" " * 8,
                         subsequent_indent=" " * 8, break_long_words=False)
    return text.replace("\0", " ")


def base_of(cache: Any, package: str) -> str:
    """What a cache is in the stub: its own class, if that has a module, else its base."""
    one = cache if cache.__module__ != package else cache.__mro__[1]
    return f"{one.__module__}.{one.__name__}"


def cache_stub(cache: Any, package: str) -> str:
    first, *others = inspect.signature(cache).parameters.values()
    options = wrapped(f"{one.name}: {one.annotation} = ..." for one in others)
    module, _, name = base_of(cache, package).rpartition(".")
    base = f"{module.rpartition('.')[2]}.{name}" if cache.__module__ != package else name
    return (
        f"class {cache.__name__}({base}):\n    def __init__(\n        self, {first.name}: {first.annotation}, *,\n"
        f"{options},\n    ) -> None: ..."
    )


def main(arguments: list[str]) -> int:
    differs = False
    for side in SIDES:
        path, text = ROOT / side / "hf" / "__init__.pyi", stub(side)
        before = path.read_text(encoding="utf-8") if path.is_file() else ""
        if arguments == ["--write"]:
            path.write_text(text, encoding="utf-8")
        elif before != text:
            differs = True
            lines = difflib.unified_diff(before.splitlines(), text.splitlines(), str(path), "now", lineterm="")
            print("\n".join(lines))
    return int(differs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
