"""What surrounds the package in the repository: changelog, public names, citation, GitHub Action, container."""

from __future__ import annotations

import configparser
import importlib
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvtwin.conformance import api, discovery, plugin

ROOT = plugin.HERE.parent
ACTION = ROOT / ".github" / "actions" / "verify"
if not (ROOT / ".ci").is_dir():
    pytest.skip("needs the source tree", allow_module_level=True)


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"kvtwin_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


public, walks = (loaded(ROOT / ".ci" / f"{name}.py") for name in ("public_names", "walks"))
annotate = loaded(ACTION / "annotate.py")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


# The changelog and the public names -----------------------------------------------------------------------------------

NAMES = {"kvtwin.a.keep", "kvtwin verify --seed"}
TEXT = "# Changelog\n\n## [Unreleased]\n{}\n## [1.0.0] - 2026-01-01\n\n- `stays`, `--new`.\n"


@pytest.mark.parametrize(("names", "changelog", "says"), [
    (NAMES, TEXT.format(""), []),
    (NAMES | {"kvtwin.a.fresh"}, TEXT.format(""), ["kvtwin.a.fresh is new"]),
    (NAMES | {"kvtwin.a.fresh"}, TEXT.format("- `fresh` is new.\n"), []),
    (NAMES | {"kvtwin.a.fresh"}, TEXT.format("- `refresh`, `fresh-water`\n"), ["kvtwin.a.fresh is new"]),
    (NAMES | {"kvtwin verify --new"}, TEXT.format(""), ["kvtwin verify --new is new"]),
    (NAMES | {"kvtwin verify --new"}, TEXT.format("- `kvtwin verify --new`\n"), []),
    (set(), TEXT.format("- Removed: `keep`\n"), ["kvtwin verify --seed is gone"]),
    (NAMES, TEXT.format("").replace("1.0.0", "1.1.0"), ["expected the names of 1.1.0"]),
    (NAMES, TEXT.replace("Unreleased", "2.0.0"), ["the first section must be"]),
])  # fmt: skip
def test_a_public_name_that_comes_or_goes_needs_an_entry(names, changelog, says):
    stored = "\n".join((public.HEAD + "1.0.0", *sorted(NAMES)))
    found = public.faults(names, stored, changelog)
    assert len(found) == len(says)
    assert all(part in line for part, line in zip(says, found, strict=True))


def test_names_read_from_the_sources_are_those_of_the_package():
    found = public.now()
    for pair in discovery.built_in():
        for module in (pair.reference, pair.optimized):
            assert {name for name in found if name.rpartition(".")[0] == module.__name__} == {
                f"{module.__name__}.{name}" for name in module.__all__
            }
    assert {f"kvtwin.conformance.api.{name}" for name in api.__all__} < found
    assert {"kvtwin verify", "kvtwin methods", "kvtwin verify --impl", "pytest --kv-impl"} < found


@pytest.mark.slow
def test_each_cache_that_is_public_exists():
    pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")
    caches = [name.rpartition(".") for name in public.now() if ".hf." in name]
    assert len(caches) == 2 * len(discovery.built_in())
    for module, _, name in caches:
        assert getattr(importlib.import_module(module), name)


def test_changelog_and_citation_have_the_version_of_the_package():
    version = PROJECT["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"Version {version} is not released" in changelog or f"## [{version}]" in changelog
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


# Versions and linters -------------------------------------------------------------------------------------------------


def pins(path: Path) -> dict[str, str]:
    lines = (line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#"))
    return dict(line.split("==") for line in lines)


OLDEST, PINNED = pins(ROOT / ".ci" / "oldest.txt"), pins(ROOT / ".ci" / "constraints.txt")


def test_the_oldest_versions_are_the_lower_bounds():
    project = PROJECT["project"]
    extras = (project["optional-dependencies"][name] for name in ("calibrate", "test", "plots", "hf", "perf"))
    found = [re.match(r"([\w-]+)>=([\d.]+)", line) for line in [*project["dependencies"], *itertools.chain(*extras)]]
    assert {match[1]: match[2] for match in found if match} == OLDEST  # those without a bound are kvtwin's own extras


def test_the_page_on_installation_has_the_versions_that_are_tested():
    text = (ROOT / "docs" / "how-to" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \|$", text, flags=re.MULTILINE)
    assert len(rows) >= 4
    assert [(name, OLDEST[name], PINNED[name]) for name, *_ in rows] == rows


def test_hooks_before_a_commit_run_what_lint_runs():
    hooks = re.findall(r"^ +entry: (.*)$", (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"), flags=re.M)
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    commands = [line.removesuffix(" .") for line in tox["testenv:lint"]["commands"].split("\n") if line]
    assert hooks == [line for line in commands if not line.startswith("check-jsonschema")]


# README.md and other pages, walked through in an empty environment ----------------------------------------------------


def test_the_readme_is_read_step_by_step():
    text = "```sh\na\nb  # exits with 3\n```\n```text\nx\n```\n```python\nc\n```\n\n```text\nd\n```\n" \
        "```python\ne\n```\nWords.\n```text\nf\n```\n```python\n# g/h.py\n```\n```diff\n--- i\n```\n"
    assert list(walks.steps(text)) == [
        ("command", "a", 0), ("command", "b  # exits with 3", 3), ("python", "c\n", "d\n"), ("python", "e\n", None),
        ("file", "g/h.py", "# g/h.py\n"), ("diff", "--- i\n", None),
    ]
    for name, kinds in (
        ("readme", {"command", "python", "file"}), ("kernel-engineer", {"command", "python", "file"}),
        ("library-user", {"command", "python"}), ("author", {"command", "diff"}),
    ):
        found: list[str] = []
        for page, first, last in walks.WALKS[name]:
            text = walks.part_of((ROOT / page).read_text(encoding="utf-8"), first, last)
            found += [kind for kind, *_ in walks.steps(text)]
        assert set(found) == kinds, name
    with pytest.raises(SystemExit, match="no heading '## b'"):
        walks.part_of("\n## a\n", "", "## b")
    with pytest.raises(SystemExit, match="a block of yaml is neither"):
        list(walks.steps("```yaml\n```\n"))


@pytest.mark.parametrize(("text", "says"), [
    ("```sh\ntrue\nfalse  # exits with 1\n```\n```python\nprint(1)\n```\n\n```text\n1\n```\n", None),
    ("```python\nx = 2\nprint(x)\n```\n```python\nprint(x + 1)\n```\n\n```text\n3\n```\n", None),
    ("```python\n# a/b.py\nx\n```\n```diff\n--- a/b.py\n-x\n+y\n```\n```sh\ngrep y a/b.py\n```\n", None),
    ("```python\n# a/b.py\nx\n```\n```diff\n--- a/b.py\n-z\n+y\n```\n", r"a/b.py has 0 times 'z\\n'"),
    ("```sh\nfalse\n```\n", "'false' exits with 1, expected 0"),
    ("```sh\ntrue  # exits with 1\n```\n", "exits with 0, expected 1"),
    ("```python\nprint(1)\n```\n\n```text\n2\n```\n", r"printed '1\\n', not '2\\n'"),
    ("```python\nraise SystemExit(4)\n```\n", "exit code 4"),
    ("```python\nimport warnings\nwarnings.warn('x', FutureWarning)\n```\n", "exit code 1"),
])  # fmt: skip
def test_a_step_that_does_something_else_is_an_error(text, says, tmp_path):
    with nullcontext() if says is None else pytest.raises(SystemExit, match=says):
        walks.walk("README.md", text, tmp_path, dict(os.environ))


# The GitHub Action and the container ----------------------------------------------------------------------------------


def result(**changes: Any) -> dict[str, Any]:
    place = {"artifactLocation": {"uri": "a,b.py"}, "region": {"startLine": 7}}
    made = {"ruleId": "free_slots", "level": "error", "message": {"text": "50 % wrong:\nhere, there"}}
    return {**made, "locations": [{"physicalLocation": place}], **changes}


@pytest.mark.parametrize(("results", "lines"), [
    ([], []),
    ([result()], ["::error title=kvtwin%3A free slots,file=a%2Cb.py,line=7::50 %25 wrong:%0Ahere, there"]),
    ([result(level="warning", locations=[], message={"text": "x"})], ["::warning title=kvtwin%3A free slots::x"]),
    ([result(suppressions=[{"kind": "external"}])], []),
])  # fmt: skip
def test_each_result_is_an_annotation(results, lines):
    assert list(annotate.annotations({"runs": [{"results": results}]})) == lines


@pytest.mark.parametrize(("code", "wrong"), [
    (0, "[]"), (1, '[{"ruleId": "ties", "level": "error", "message": {"text": "x"}}]'),
])  # fmt: skip
def test_the_action_verifies_annotates_and_keeps_the_exit_code(code, wrong, tmp_path):
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which transformers brings")
    *_, step = yaml.safe_load((ACTION / "action.yml").read_text(encoding="utf-8"))["runs"]["steps"]
    (tmp_path / "kvtwin").write_text(f"""#!{sys.executable}
import os, pathlib, sys
print(os.environ["PYTHONPATH"], *sys.argv[1:])
pathlib.Path("out.sarif").write_text('{{"runs": [{{"results": {wrong}}}]}}')
sys.exit({code})
""")
    (tmp_path / "kvtwin").chmod(0o755)
    given = {"IMPL": "theirs", "METHODS": "longflow tova", "FOLDER": "src", "OPTIONS": "--seed 0", "SARIF": "out.sarif"}
    assert set(given) == set(step["env"])
    path = os.pathsep.join((str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]))
    ran = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", step["run"]], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, **given, "PATH": path, "GITHUB_ACTION_PATH": str(ACTION)},
    )
    assert ran.returncode == code, ran.stderr
    first, *others = ran.stdout.splitlines()
    assert first == "src verify longflow tova --impl theirs --sarif out.sarif --seed 0"
    assert [line for line in others if line] == (["::error title=kvtwin%3A ties::x"] if code else [])


def test_the_container_has_what_the_wheel_is_built_from():
    lines = (ROOT / ".ci" / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = {part for line in lines if line.startswith("COPY ") for part in line.split()[1:-1]}
    packages = {folder.partition("/")[0] for folder in PROJECT["tool"]["setuptools"]["package-dir"].values()}
    assert copied == packages | {"pyproject.toml", "README.md", "LICENSE", ".ci/constraints.txt"}
    assert all((ROOT / path).exists() for path in copied)
