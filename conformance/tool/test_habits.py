"""What surrounds the package in the repository: changelog, public names, citation, GitHub Action, container."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import tomllib
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


public, annotate = loaded(ROOT / ".ci" / "public_names.py"), loaded(ACTION / "annotate.py")
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
