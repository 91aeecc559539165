"""Methods of other packages: what their declarations must have, and the package that ``kvtwin new`` writes.

test_own_methods_installed.py installs such a package and runs its tests.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import settings

from kvtwin.conformance import Method, MethodError, cli, discovery, new_method, own_methods, plugin
from kvtwin.conformance import __main__ as main_job
from kvtwin.conformance.harness import impl
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.lab.mutation import mutate, mutate_probe, others

pytest_plugins = ["pytester"]

EXAMPLE = plugin.HERE.parent / "examples" / "own_method"
#: What a declaration says, for modules of the package `theirs`.
GOOD = {
    "name": "theirs", "reference": "theirs.reference", "optimized": "theirs.optimized", "checker": "theirs.checker",
    "configs": "theirs.checker:configs",
}
FILES = {
    "__init__.py": "from kvtwin.conformance import Method\nMETHOD = Method(**{fields!r})\n",
    "reference.py": "__all__ = ['TheirConfig', 'TheirState']\nraise AssertionError('imported too early')\n",
    "optimized.py": "raise AssertionError('imported too early')\n",
    "checker.py": "def configs(most, window): ...\nraise AssertionError('imported too early')\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install the package `theirs`, version 1.2, with these fields of its Method and these files."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(files=None, *, entry="theirs = theirs:METHOD", **fields):
        given = {name: value for name, value in {**GOOD, **fields}.items() if value is not None}
        for name, text in {**FILES, **(files or {})}.items():
            path = tmp_path / "theirs" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text.replace("{fields!r}", repr(given)))
        info = tmp_path / "their_package-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{own_methods.GROUP}]\n{entry}\n")
        return tmp_path / "theirs"

    yield install
    for name in [name for name in sys.modules if name.partition(".")[0] == "theirs"]:
        del sys.modules[name]


@pytest.fixture
def undiscovered(monkeypatch):
    """Discovery without its cache, in this test."""
    monkeypatch.setattr(discovery, "_found", discovery._found.__wrapped__)


def test_a_declared_method_is_a_pair(package, undiscovered):
    """Its modules are not imported before a test needs them."""
    folder = package()
    (pair,) = (pair for pair in discovery.methods() if pair.name == "theirs")
    assert pair.is_method and not pair.is_baseline
    assert (pair.path, pair.exports) == ("theirs", ("TheirConfig", "TheirState"))
    assert (pair.reference_name, pair.optimized_name) == ("theirs.reference", "theirs.optimized")
    assert pair.declared.folder == folder
    assert "theirs.reference" not in sys.modules
    assert pair not in discovery.built_in()
    assert {one.name for one in discovery.methods()} >= {one.name for one in discovery.built_in()}


def test_a_method_may_have_functions_alone(package, undiscovered):
    """It needs no configs then. Tests of states leave it out."""
    package({"reference.py": "__all__ = ['their_function']"}, configs=None)
    (pair,) = (pair for pair in discovery.methods() if pair.name == "theirs")
    assert pair.is_method and not pair.has_state
    assert pair not in discovery.with_state()


def test_its_modules_are_found_by_its_name(package, undiscovered):
    package({
        "reference.py": "__all__ = ['TheirConfig', 'TheirState']", "optimized.py": "SIDE = 'optimized'",
        "checker.py": "SMALL = {'a': 1}\ndef configs(most, window): return most",
    })
    twins = impl.Twins()
    assert twins.reference.theirs.__name__ == "theirs.reference"
    assert twins.optimized.theirs.SIDE == "optimized"
    assert checkers.module(twins.optimized, checkers.pair("theirs")) is twins.optimized.theirs
    assert checkers.checker_of("theirs").__name__ == "theirs.checker"
    assert checkers.ask("theirs", "SMALL", None) == {"a": 1}
    assert checkers.ask("theirs", "configs", None)(3, 1) == 3
    assert not hasattr(twins.optimized, "unknown")


def test_configs_may_be_in_another_module(package, undiscovered):
    package(
        {"checker.py": "configs = None", "draws.py": "def two(most, window): return 'right'"},
        configs="theirs.draws:two",
    )
    assert checkers.ask("theirs", "configs", None)(3, 1) == "right"


WHERE = "package their-package 1.2, entry point 'theirs' of kvtwin.methods: "
WRONG = {
    "no module": ({"entry": "theirs = theirs_gone:METHOD"}, "cannot import theirs_gone:METHOD: ModuleNotFoundError"),
    "no object": ({"entry": "theirs = theirs:NOTHING"}, "cannot import theirs:NOTHING: AttributeError"),
    "an error": ({"files": {"__init__.py": "1 / 0"}}, "cannot import theirs:METHOD: ZeroDivisionError: division by"),
    "another object": ({"files": {"__init__.py": "METHOD = 'theirs'"}}, "theirs:METHOD must be a kvtwin.*got str"),
    "a missing field": ({"checker": None}, "cannot import theirs:METHOD: TypeError: .*'checker'"),
    "an empty field": ({"checker": ""}, "checker: expected a string, got ''"),
    "a module object": ({"checker": 3}, "checker: expected a string, got 3"),
    "another name": ({"name": "mine"}, "name: expected the name of the entry point, got 'mine'"),
    "no identifier": ({"name": "the-irs"}, "name: expected a Python identifier .*, got 'the-irs'"),
    "a private name": ({"name": "_theirs"}, "name: expected a Python identifier .*, got '_theirs'"),
    "no reference": ({"reference": "theirs.gone"}, "reference: there is no module theirs.gone"),
    "no package of it": ({"reference": "gone.reference"}, "reference: cannot import gone.reference: ModuleNotFound"),
    "a path": ({"optimized": "theirs/optimized.py"}, "optimized: expected the name of a module, got 'theirs/optimi"),
    "no optimized side": ({"optimized": "theirs.gone"}, "optimized: there is no module theirs.gone"),
    "no checker": ({"checker": "theirs.gone"}, "checker: there is no module theirs.gone"),
    "no __all__": (
        {"files": {"reference.py": ""}}, r"reference: __all__ of theirs.reference needs one \*Config, got no names",
    ),
    "no literal": ({"files": {"reference.py": "__all__ = f()"}}, "reference: cannot read theirs.reference: ValueError"),
    "no Python": ({"files": {"reference.py": "def"}}, "reference: cannot read theirs.reference: SyntaxError"),
    "configs no Python": ({"files": {"checker.py": "def"}}, "configs: cannot read theirs.checker: SyntaxError"),
    "no configs of a state": ({"configs": ""}, 'configs: expected "module:function", got'),
    "no state": (
        {"files": {"reference.py": "__all__ = ['AConfig', 'f']"}},
        r"reference: __all__ of theirs.reference needs one \*State, got AConfig, f",
    ),
    "two configs": (
        {"files": {"reference.py": "__all__ = ['AConfig', 'BConfig', 'AState']"}},
        r"reference: __all__ of theirs.reference needs one \*Config, got AConfig, BConfig, AState",
    ),
    "configs without function": ({"configs": "theirs.checker"}, 'configs: expected "module:function", got'),
    "no configs": ({"configs": "theirs.checker:draw"}, "configs: theirs.checker has no 'draw'"),
    "no module of configs": ({"configs": "theirs.gone:draw"}, "configs: there is no module theirs.gone"),
}


@pytest.mark.parametrize(("given", "says"), WRONG.values(), ids=WRONG)
def test_a_wrong_declaration_is_refused(given, says, package):
    package(**given)
    with pytest.raises(MethodError, match=f"^{WHERE}{says}"):
        list(own_methods.declared())


@pytest.mark.parametrize("name", ["tova", "longflow", "thinkv", "attention", "blocks", "baselines", "hf"])
def test_the_name_of_a_module_beside_the_methods_is_refused(name, package, undiscovered):
    """`twins.reference` has both as attributes."""
    package(entry=f"{name} = theirs:METHOD", name=name)
    where = f"package their-package 1.2, entry point '{name}' of kvtwin.methods"
    with pytest.raises(MethodError, match=f"^{where}: name: '{name}' is the name of a module of kvtwin$"):
        discovery.pairs()


def test_two_packages_with_one_name_are_refused(package, undiscovered, tmp_path):
    package()
    info = tmp_path / "another-3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another\nVersion: 3\n")
    (info / "entry_points.txt").write_text(f"[{own_methods.GROUP}]\ntheirs = theirs:METHOD\n")
    with pytest.raises(MethodError, match=r"name: 'theirs' is the name of package (another 3|their-package 1\.2)"):
        discovery.pairs()


def test_two_methods_in_one_folder_are_refused(package, undiscovered):
    """Their tests, mutants and traces would be in the same files."""
    package({"other.py": f"from kvtwin.conformance import Method\nMETHOD = Method(**{GOOD | {'name': 'zwo'}!r})"},
            entry="theirs = theirs:METHOD\nzwo = theirs.other:METHOD")
    says = f"'zwo' of kvtwin.methods: entry point: its module must be in another folder than that of {WHERE[:-2]}"
    with pytest.raises(MethodError, match=says):
        discovery.pairs()


@pytest.mark.parametrize("command", [["methods"], ["verify"], ["verify", "theirs"], ["claims"]])
def test_a_command_ends_with_exit_code_2(command, package, undiscovered, capsys):
    package(checker="theirs.gone")
    try:
        code = cli.main(command)
    except SystemExit as stopped:
        code = stopped.code
    said = capsys.readouterr().err
    if command == ["claims"]:  # reads the ledger alone
        assert code == 0
        return
    assert code == 2
    assert f"error: {WHERE}checker: there is no module theirs.gone" in said
    assert "Traceback" not in said


def test_the_main_job_and_the_mutants_end_with_exit_code_2(package, undiscovered, capsys):
    package(checker="theirs.gone")
    for main in (main_job.main, mutate.main):
        assert main(["theirs"]) == 2
        assert f"{WHERE}checker: there is no module theirs.gone" in capsys.readouterr().err


def test_pytest_ends_with_a_usage_error(package, undiscovered, pytester):
    package(checker="theirs.gone")
    pytester.makepyfile("def test_it(): pass")
    ran = pytester.runpytest_inprocess(
        "-p", "no:cacheprovider", "--kv-device=auto", f"--hypothesis-profile={settings.get_current_profile_name()}"
    )
    assert ran.ret == pytest.ExitCode.USAGE_ERROR
    ran.stderr.fnmatch_lines([f"ERROR: {WHERE}checker: there is no module theirs.gone"])


def test_mutants_are_read_from_its_folder(package, undiscovered):
    package({"mutants.toml": (
        'control = "theirs/test_theirs.py::test_one"\n[[mutant]]\nname = "a"\nfile = "theirs/optimized.py"\n'
        'replace = [["early", "late"]]\nwhat = "late"\nkillers = ["theirs/test_theirs.py::test_two"]\n'
    ), "test_theirs.py": "def test_one(): pass\ndef test_two(): pass\n"})
    (mutant,) = (mutant for mutant in mutate.everyone() if mutant.method == "theirs")
    tree = mutate.here()
    assert tree.others == others.packages() == {"theirs": others.files()["theirs"].parent}
    tree.check([mutant])
    assert tree.place(mutant.file) == "theirs/optimized.py"
    assert tree.test_place(mutant.control) == mutant.control
    assert tree.place("reference/a.py") == "kvtwin/reference/a.py"
    assert tree.test_place("suite/test_a.py::test") == "kvtwin/conformance/suite/test_a.py::test"


def test_a_control_in_another_package_is_a_control(tmp_path):
    """It runs first, and ends the run if it fails."""
    probe = mutate_probe.Probe({"log": str(tmp_path / "log"), "control": "theirs/test_theirs.py::test_one"})
    assert probe.is_control("theirs/test_theirs.py::test_one")
    assert not probe.is_control("theirs/test_theirs.py::test_two")


# kvtwin new ----------------------------------------------------------------------------------------------------------


def test_the_example_is_what_the_command_writes():
    if not EXAMPLE.is_dir():
        pytest.skip("examples/ is not in the wheel")
    made = ("__pycache__", "build", "MANIFEST.json", "mutants.json", "traces")
    paths = [path.relative_to(EXAMPLE) for path in EXAMPLE.rglob("*") if path.is_file()]
    found = [path for path in paths if not any(part in made or part.endswith(".egg-info") for part in path.parts)]
    expected = new_method.files(new_method.NAME)
    assert {path.as_posix(): (EXAMPLE / path).read_text(encoding="utf-8") for path in found} == expected, (
        "delete examples/own_method and run: kvtwin new key_norm examples/own_method"
    )


@pytest.mark.parametrize(("kind", "exports"), [
    ("evicts", ("SmallKeysConfig", "SmallKeysState")), ("selects", ("SmallKeysConfig", "SmallKeysState")),
    ("quantizes", ("CodesResult", "SmallKeysConfig", "SmallKeysState")), ("function", ("score",)),
])
def test_new_writes_a_package_of_that_name(kind, exports, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "small_keys", *([] if kind == "evicts" else ["--kind", kind])]) == 0
    assert "kvtwin verify small_keys" in capsys.readouterr().out
    folder = tmp_path / "small_keys"
    texts = {path: path.read_text(encoding="utf-8") for path in folder.rglob("*") if path.is_file()}
    left = (new_method.NAME, new_method.CLASS, new_method.WHAT, "# insert")
    assert not any(word in str(path) or word in text for path, text in texts.items() for word in left)
    assert new_method.KINDS[kind] in texts[folder / "README.md"]
    assert (folder / "small_keys" / "test_small_keys.py").is_file()
    project = tomllib.loads(texts[folder / "pyproject.toml"])
    assert project["project"]["entry-points"][own_methods.GROUP] == {"small_keys": "small_keys:METHOD"}
    names = {"METHOD": None}
    exec(texts[folder / "small_keys" / "__init__.py"], names)
    assert names["METHOD"] == Method(
        "small_keys", "small_keys.reference", "small_keys.optimized", "small_keys.checker",
        "" if kind == "function" else "small_keys.checker:configs",
    )
    for path, text in texts.items():
        if path.suffix == ".py":
            ast.parse(text)
            assert all(len(line) <= 120 for line in text.splitlines()), path
    assert own_methods.literal_all(folder / "small_keys" / "reference.py") == exports
    for mutant in tomllib.loads(texts[folder / "small_keys" / "mutants.toml"])["mutant"]:
        for old, new in mutant["replace"]:
            assert old != new and texts[folder / mutant["file"]].count(old) == 1, mutant["name"]


@pytest.mark.parametrize("name", ["a", "a1", "keep_2_tokens", "KeepTokens", "l2_norm_"])
def test_names_of_classes_are_identifiers(name):
    new_method.check_name(name)
    assert f"{new_method.class_name(name)}Config".isidentifier()


@pytest.mark.parametrize(("name", "says"), [
    ("two-words", "a Python identifier, such as my_method, got 'two-words'"),
    ("2nd", "a Python identifier"), ("a.b", "a Python identifier"), ("a/b", "a Python identifier"),
    ("", "a Python identifier"), ("clé", "a Python identifier"), ("class", "a Python identifier"),
    ("_mine", "must begin with a letter, got '_mine'"), ("__", "must begin with a letter"),
    ("tova", "'tova' is the name of a module of kvtwin"), ("blocks", "'blocks' is the name of a module of kvtwin"),
    ("torch", "'torch' is the name of an installed module"),
    ("kvtwin", "'kvtwin' is the name of an installed module"),
])
def test_a_name_that_cannot_be_one_is_refused(name, says, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["new", name, str(tmp_path / "new")])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_an_existing_folder_is_refused(kind, tmp_path, capsys):
    folder: Path = tmp_path / "there"
    if kind == "link":
        folder.symlink_to(tmp_path / "nowhere")
    else:
        folder.mkdir() if kind == "folder" else folder.write_text("mine")
    with pytest.raises(SystemExit) as caught:
        cli.main(["new", "small_keys", str(folder)])
    assert caught.value.code == 2
    assert f"FOLDER {folder} exists: name a new one" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()
