"""How-tos that change a package step by step, or add to it: they get the failures and verdicts that they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtwin.conformance.lab.docs_source import DOCS
from kvtwin.conformance.tool import new_packages

pytestmark = [
    pytest.mark.slow, pytest.mark.skipif(not DOCS.is_dir(), reason="docs/ is not in the wheel: its examples are there")
]
NAME = "fp8_keys"


def blocks(language: str, page: str = "paged-fp8-kernel.md") -> list[str]:
    text = (DOCS / "how-to" / page).read_text(encoding="utf-8")
    return [code for _, code in re.findall(rf"^```({language})\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


def written(folder: Path) -> None:
    """Write the files of the page."""
    for code in blocks("python"):
        path = re.match(r"# ([\w/]+\.py)\n", code)
        if path is not None:
            (folder / path[1]).parent.mkdir(exist_ok=True)
            (folder / path[1]).write_text(code, encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and the module."""
    made = tmp_path_factory.mktemp("pages")
    new_packages.write(made, NAME)
    written(made)
    (diff,) = blocks("diff")
    new_packages.patch(made, diff)
    return made


def verified(folder: Path, *arguments: str) -> tuple[int, str, dict]:
    return new_packages.verify(folder, NAME, *arguments, "-k", "paged")


def test_the_package_is_right_and_a_mistake_in_it_is_found(folder):
    code, text, report = verified(folder, NAME, "--hypothesis-profile=quick")
    assert code == 0, text
    assert report["coverage"][NAME]["judged"] == ["paged_attention", "paged_attention[fp8]"]
    found = report["verdicts"][NAME]
    names = ("accuracy", "repeatability", "independence", "free_slots", "extreme_numbers", "layouts")
    assert {name: found[name]["verdict"] for name in names} == dict.fromkeys(names, "right")
    path = folder / NAME / NAME / "pages_optimized.py"
    right = path.read_text(encoding="utf-8")
    try:
        for old, new, wrong in (
            ("output * value_scale.view(-1, 1, 1)", "output", "accuracy"),
            (".masked_fill(~held, 0)", "", "free_slots"),
        ):
            path.write_text(right, encoding="utf-8")
            new_packages.replace(path, old, new)
            code, text, report = verified(folder, NAME, "--hypothesis-profile=quick")
            found = report["verdicts"][NAME]
            assert code == 1 and found[wrong]["verdict"] == "wrong" and found[wrong]["follows"] is None, text
    finally:
        path.write_text(right, encoding="utf-8")


def test_the_module_is_judged_as_the_page_shows(folder):
    code, text, report = verified(folder, "longflow", "--impl=my_pages", "--hypothesis-profile=brief")
    assert code == 0, text
    page = (DOCS / "how-to" / "paged-fp8-kernel.md").read_text(encoding="utf-8")
    shown = re.findall(r"^    ((?:declared|judged|not provided).*(?:\n {6}.*)*)$", page, re.MULTILINE)
    shown = [" ".join(line.split()) for line in shown]  # the page breaks a long line of the verdict
    assert len(shown) == 3
    for line in shown[:2]:
        assert f"  {line}\n" in text, text
    lacking = shown[2].removeprefix("not provided: ").split(", ")
    assert set(report["coverage"]["longflow"]["not_provided"]) <= set(lacking)


def test_each_step_of_a_changed_method_fails_as_the_page_shows(tmp_path):
    """Of a step that fails, only the test that the page names is run. The last step is a whole verdict."""
    name, failed = "small_values", 0
    new_packages.write(tmp_path, name)
    for code in blocks("diff|text", "change-a-method.md"):
        if code.startswith("--- "):
            new_packages.patch(tmp_path, code)
            continue
        test = re.match(r"(test_\w+)\[", code)
        narrow = ["--hypothesis-profile=ci", "-k", test[1]] if test else ["--hypothesis-profile=quick"]
        status, text, _ = new_packages.verify(tmp_path, name, name, *narrow)
        assert status == (1 if test else 0), text
        printed = " ".join(re.sub(r"^[E|\s]*\s", "", text, flags=re.MULTILINE).split())
        for part in re.split(r"\.\.\.|\n(?=  \w|\w)", code):  # lines with four spaces go on
            assert " ".join(part.split()) in printed, f"{part!r} is not in:\n{text}"
        failed += status
    assert failed == 3
