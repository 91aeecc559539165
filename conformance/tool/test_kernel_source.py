"""Kernels contain nothing that only some of the supported Triton versions accept."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtwin.optimized

FOLDER = Path(kvtwin.optimized.__file__).parent
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py"))


def str_defaults(source: str) -> Iterator[str]:
    """The parameters of Triton's functions whose default is a str. Triton 3.6 raises an AttributeError for them."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        if any("jit" in ast.unparse(mark) for mark in function.decorator_list):
            for default in (*function.args.defaults, *function.args.kw_defaults):
                if isinstance(default, ast.Constant) and isinstance(default.value, str):
                    yield f"line {default.lineno}: {function.name}: {default.value!r}"


@pytest.mark.parametrize("file", FILES)
def test_no_parameter_of_a_kernel_defaults_to_a_str(file):
    assert not list(str_defaults((FOLDER / file).read_text(encoding="utf-8")))


def test_a_str_default_is_found():
    source = "@triton.jit\ndef f(x, CACHE: tl.constexpr = '.cg'): ...\ndef g(x='y'): ...\n"
    assert list(str_defaults(source)) == ["line 2: f: '.cg'"]
