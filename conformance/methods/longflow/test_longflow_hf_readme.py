"""Run the README's example of generation with LongFlow, and compare its output with the README."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import re
import warnings

import pytest

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance import plugin

pytestmark = pytest.mark.whole

SNIPPET = "longflow-generate"


def readme() -> str:
    """README.md of the source tree, or the description in the metadata of the installed package."""
    source = plugin.HERE.parent / "README.md"
    if source.is_file():
        return source.read_text(encoding="utf-8")
    return importlib.metadata.metadata("kvtwin")["Description"]


def blocks(text: str, snippet: str) -> tuple[str, str]:
    """The Python block and the block of its output, between `<!-- snippet: x -->` and `<!-- /snippet: x -->`."""
    start, end = f"<!-- snippet: {snippet} -->", f"<!-- /snippet: {snippet} -->"
    assert text.count(start) == text.count(end) == 1, f"README.md has no part between {start} and {end}"
    found = re.findall(r"^```(\w+)\n(.*?)^```$", text.split(start)[1].split(end)[0], flags=re.M | re.S)
    assert [language for language, _ in found] == ["python", "text"]
    return found[0][1], found[1][1]


@pytest.mark.slow
@pytest.mark.kind("golden")
def test_the_readme_generates_what_it_shows():
    code, expected = blocks(readme(), SNIPPET)
    with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
        warnings.simplefilter("error")  # of the names that the suite passes over, too
        exec(compile(code, f"README.md, {SNIPPET}", "exec"), {"__name__": "readme"})
    assert printed.getvalue() == expected
