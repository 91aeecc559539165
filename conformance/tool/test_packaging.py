"""The installation: the wheel has what users need of the tree and nothing else, works from any directory, and installs
only kvtwin."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from kvtwin.conformance import cli, plugin
from kvtwin.fixtures import tasks

pytestmark = pytest.mark.first

ROOT = plugin.HERE.parent
FOLDERS = ("reference", "optimized", "conformance", "fixtures")
#: The rooms of conformance/ that are not installed, but for the tables that commands print.
OUTSIDE, PRINTED = ("methods", "papers", "tool", "lab"), ("claims.toml", "readings.toml")
#: What is installed as the top level of kvtwin, relative to conformance/.
TOP = "command"


def python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )


def in_tree(folder: Path) -> set[str]:
    """The paths of files below ``folder``, without those that Python and tools create."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    left = ("__pycache__", ".")
    return {path.as_posix() for path in paths if not any(part.startswith(left) for part in path.parts)}


def outside(path: Path) -> bool:
    """Whether kvtwin/conformance/ROOM/... is in a room that is not installed."""
    return path.parts[1] == "conformance" and path.parts[2] in OUTSIDE


@pytest.fixture(scope="module")
def source() -> Path:
    """The source tree, whose pyproject.toml determines the contents of the wheel."""
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("needs the source tree, and these tests are installed")
    return ROOT


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """The wheel, built from a copy. A build in the tree would leave folders there that later builds would include."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(source / name, copy)
    for name in FOLDERS:
        shutil.copytree(source / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    # Call the build backend directly, as pip does.
    code = "import setuptools.build_meta as backend; print(backend.build_wheel('.'))"
    built = python("-c", code, folder=copy)
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(copy / built.stdout.splitlines()[-1]) as opened:
        yield opened


@pytest.mark.slow
def test_the_wheel_holds_the_tree(source, wheel):
    """An unlisted sub-package works in an editable install, but is missing from the wheel."""
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {f"kvtwin/{folder}/{path}" for folder in FOLDERS for path in in_tree(source / folder)}
    expected = {path for path in expected if not outside(Path(path)) or path.endswith(PRINTED)}
    expected -= {f"kvtwin/fixtures/texts/{name}.txt" for name in tasks.TRAINING_TEXTS}
    expected = {path for path in expected if "/known_results/" not in path}     # for the documentation
    expected = {path.replace(f"kvtwin/conformance/{TOP}/", "kvtwin/") for path in expected}
    assert files == expected, "see packages and package-data in pyproject.toml"
    assert in_tree(source / "conformance" / TOP) == {"__init__.py", "__main__.py"}


@pytest.mark.slow
def test_the_wheel_installs_no_name_but_ours(wheel):
    assert {name.split("/")[0].split("-")[0] for name in wheel.namelist()} == {"kvtwin"}


@pytest.mark.slow
def test_the_wheel_carries_licence_plugin_and_types(wheel):
    metadata = {name.split(".dist-info/")[1]: name for name in wheel.namelist() if ".dist-info/" in name}
    assert "licenses/LICENSE" in metadata or "LICENSE" in metadata
    assert "kvtwin = kvtwin.conformance.plugin" in wheel.read(metadata["entry_points.txt"]).decode()
    assert {f"kvtwin/{folder}/py.typed" for folder in FOLDERS} <= set(wheel.namelist())


def test_every_package_is_listed(source):
    listed = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    found = {
        ".".join(("kvtwin", *path.parent.relative_to(source).parts))
        for folder in FOLDERS
        for path in (source / folder).rglob("__init__.py") if not outside("kvtwin" / path.relative_to(source))
    }
    assert set(listed) == (found - {f"kvtwin.conformance.{TOP}"}) | {"kvtwin"}


@pytest.mark.parametrize("command", [["methods"], ["claims", "nothing"]], ids=["right", "wrong"])
def test_python_m_kvtwin_is_the_command(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    ran = python("-m", "kvtwin", *command, folder=tmp_path)
    try:
        code = cli.main(command)
    except SystemExit as stopped:
        code = stopped.code
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, *capsys.readouterr())
    assert ran.stdout or ran.stderr


def test_the_package_says_what_it_is_without_torch(tmp_path):
    code = "import kvtwin, sys; print(kvtwin.__doc__.count(chr(10)) > 3, 'torch' in sys.modules, kvtwin.__version__)"
    number = importlib.metadata.version("kvtwin")
    assert python("-c", code, folder=tmp_path).stdout.split() == ["True", "False", number]
    assert python("-m", "kvtwin", "--version", folder=tmp_path).stdout == f"kvtwin {number}\n"
    assert "cannot import name" in python("-c", "from kvtwin import nothing", folder=tmp_path).stderr


def test_everything_is_installed_below_kvtwin(tmp_path):
    """No import statement finds reference, fixtures, ... from a directory that is not the source tree."""
    code = f"import importlib.util; print([name for name in {FOLDERS!r} if importlib.util.find_spec(name)])"
    assert python("-c", code, folder=tmp_path).stdout.strip() == "[]"


def test_the_entry_point_is_the_plugin():
    (entry,) = importlib.metadata.entry_points(group="pytest11", name=plugin.NAME)
    assert entry.value == plugin.__name__


@pytest.mark.slow
def test_collects_from_any_directory(tmp_path):
    """Like ``pytest --pyargs kvtwin.conformance`` outside of the tree: it collects every test file without errors."""
    ran = python(
        *("-m", "pytest", "--pyargs", "kvtwin.conformance", "--collect-only", "-q", "--import-mode", "importlib"),
        *("-p", "no:cacheprovider", "--kv-device", "cpu"),
        folder=tmp_path,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    collected = {line.split("::")[0].split("/")[-1] for line in ran.stdout.splitlines() if "::" in line}
    files = {path.name: path.read_text(encoding="utf-8") for path in plugin.HERE.rglob("test_*.py")}
    assert collected <= set(files)
    # A file may skip itself if its subject is not installed; tests of served sizes are deselected on a CPU.
    left_out = r"^pytest\.importorskip|allow_module_level|^pytestmark = pytest\.mark\.served"
    for name in set(files) - collected:
        assert re.search(left_out, files[name], flags=re.MULTILINE), name


def blocks(text: str) -> list[str]:
    """The Python blocks of a Markdown file."""
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_the_readme_is_true(source, tmp_path):
    """The library code in the docs runs, and the functions that it asks users to write have the signatures that we
    call."""
    states, adapter, readme = (
        blocks((source / name).read_text(encoding="utf-8"))
        for name in ("docs/how-to/states.md", "docs/how-to/test-your-kernel.md", "README.md")
    )
    theirs = [block for block in [*adapter, *readme] if block.startswith("# my_kernels/longflow.py")]
    assert len(theirs) == 2
    # test_longflow_hf_readme.py runs the README's other example, with transformers.
    assert [block for block in readme if block not in theirs and "transformers" not in block] == []
    assert len(states) == 3
    # Without scales, a function takes no FP8, and its tests are not provided.
    check = (
        "import inspect\n"
        "ours = [name for name in inspect.signature(decode_attention).parameters if not name.endswith('_scale')]\n"
    ) + "".join(
        f"exec({block!r})\nassert list(inspect.signature(decode_attention).parameters) == ours\n"
        for block in theirs
    )
    ran = python("-c", "\n".join([*states, check]), folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
