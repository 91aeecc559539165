"""The verdicts in the tutorial and in README are those of the kernels in them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtwin.conformance.judge.properties import PROPERTIES
from kvtwin.conformance.lab.docs_source import DOCS

pytestmark = [
    pytest.mark.slow, pytest.mark.skipif(not DOCS.is_dir(), reason="docs/ is not in the wheel: its verdicts are there")
]
NAMES = "|".join(name.replace("_", " ") for name in PROPERTIES)
VERDICTS = "right|wrong|not covered|convention|environment"


def kernels(page: Path) -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [block for block in blocks if block.startswith("# my_kernels/longflow.py")]


def printed(page: Path) -> list[str]:
    blocks = re.findall(r"```text\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [block for block in blocks if block.startswith("longflow of my_kernels:")]


def facts(text: str) -> tuple[str, dict[str, str], list[tuple[str, str]]]:
    """The verdict, that on each property, and each cause with what it explains; without numbers."""
    (overall,) = re.findall(r"^longflow of my_kernels: (.*)$", text, re.MULTILINE)
    rows = re.findall(rf"^  ({NAMES}) +({VERDICTS}) ", text, re.MULTILINE)
    causes = re.findall(rf"^  ({NAMES}): (.*)$", text, re.MULTILINE)
    return overall, dict(rows), [(name, "".join(re.findall("may explain .*", said))) for name, said in causes]


@pytest.fixture(scope="module", params=[0, 1], ids=["first", "last"])
def ran(request, tmp_path_factory) -> tuple[int, str]:
    """The number of the tutorial's kernel, and the verdict on it."""
    folder = tmp_path_factory.mktemp("tutorial")
    package = folder / "my_kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    kernel = kernels(DOCS / "tutorial" / "verify.md")[request.param]
    (package / "longflow.py").write_text(kernel, encoding="utf-8")
    made = subprocess.run(
        [sys.executable, "-m", "kvtwin.conformance", "longflow", "--impl=my_kernels", "--device=cpu", "--jobs=1",
         "--seed=0"],
        cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    assert made.returncode == 1 - request.param, made.stdout + made.stderr
    return request.param, made.stdout


def test_the_tutorial_prints_the_verdict(ran):
    number, text = ran
    page = printed(DOCS / "tutorial" / "verify.md")
    assert len(page) == 2
    assert facts(text) == facts(page[number])
    assert set(facts(text)[1]) == {name.replace("_", " ") for name in PROPERTIES}


def test_readme_prints_a_part_of_it(ran):
    number, text = ran
    readme = DOCS.parent / "README.md"
    assert kernels(readme) == kernels(DOCS / "tutorial" / "verify.md")[:1]
    (page,) = printed(readme)
    if number == 0:
        overall, rows, causes = facts(page)
        assert rows
        assert facts(text) == (overall, {**facts(text)[1], **rows}, causes)
