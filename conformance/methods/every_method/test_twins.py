"""The twin contract, for every discovered pair: both sides have the same interface, are independent, and are complete.

These tests check our own two sides for any --kv-impl. So no parameter is called `method`, and nothing here counts for
the implementation under test. test_twins_torch.py checks torch's requirements on the optimized side.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtwin.conformance
import kvtwin.fixtures
import kvtwin.optimized
import kvtwin.reference
from kvtwin.conformance import discovery
from kvtwin.conformance.cases.tiny import attributes, description, new_state, prompt, public_functions, states, token
from kvtwin.conformance.discovery import Pair
from kvtwin.conformance.judge import checkers

pytestmark = pytest.mark.whole

REFERENCE, OPTIMIZED = "kvtwin.reference", "kvtwin.optimized"
# The reference modules that both sides use: `contract`, which has types, configs, results and checks of arguments, but
# no mathematics, and the transformers adapter.
SHARED = re.compile(rf"{re.escape(REFERENCE)}\.(contract(\.[a-z]\w*)*|hf\.(cache_adapter(_\w+)?|block_caches))")
#: The modules of the methods of other packages: (reference, optimized).
OTHERS = [(pair.reference_name, pair.optimized_name) for pair in discovery.methods() if pair.declared]
every_pair = pytest.mark.parametrize("twin", discovery.pairs(), ids=str)
every_method = pytest.mark.parametrize("twin", discovery.with_state(), ids=str)


def test_discovery_finds_what_there_is() -> None:
    """Without this, tests over no pairs would pass."""
    assert {"longflow"} <= {pair.name for pair in discovery.methods()}
    assert {"longflow", "snapkv"} <= {pair.name for pair in discovery.pairs()}


# Same names, same signatures, same objects --------------------------------------------------------------------------


def twins_or_same(one: object, other: object) -> bool:
    """Whether these are the same type, or a class and its twin: functions take objects of their own side."""
    names = [f"{getattr(side, '__module__', '')}.{getattr(side, '__qualname__', '')}" for side in (one, other)]
    return one == other or any(
        names[0].startswith(f"{reference}.") and names[1] == names[0].replace(reference, optimized, 1)
        for reference, optimized in ((REFERENCE, OPTIMIZED), *OTHERS)
    )


def assert_same_signature(name: str, reference: Callable[..., Any], optimized: Callable[..., Any]) -> None:
    ours, theirs = (inspect.signature(function, eval_str=True) for function in (reference, optimized))
    assert list(ours.parameters) == list(theirs.parameters), f"{name}: parameters differ"
    for one, other in zip(ours.parameters.values(), theirs.parameters.values(), strict=True):
        where = f"{name}({one.name})"
        assert one.kind == other.kind, f"{where}: {one.kind.description}, {other.kind.description}"
        assert one.default == other.default, f"{where}: defaults to {one.default!r} and {other.default!r}"
        if inspect.Parameter.empty not in (one.annotation, other.annotation):
            assert twins_or_same(one.annotation, other.annotation), f"{where}: {one.annotation} and {other.annotation}"
    if inspect.Signature.empty not in (ours.return_annotation, theirs.return_annotation):
        assert ours.return_annotation == theirs.return_annotation, f"{name}: result types differ"


@every_pair
def test_both_sides_export_the_same_names(twin: Pair) -> None:
    assert sorted(twin.reference.__all__) == sorted(twin.optimized.__all__)
    for module in (twin.reference, twin.optimized):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []


@every_pair
def test_functions_have_the_same_signatures(twin: Pair) -> None:
    ours, theirs = (public_functions(module, module.__all__) for module in (twin.reference, twin.optimized))
    assert ours or twin.state is not None
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name] is not theirs[name], f"{name}: both sides have the same function"
        assert_same_signature(name, ours[name], theirs[name])


@every_pair
def test_configs_and_results_are_defined_once(twin: Pair) -> None:
    shared = [name for name in twin.exports if name.endswith(("Config", "Result"))]
    for name in shared:
        assert getattr(twin.reference, name) is getattr(twin.optimized, name)
    if twin.has_state:
        assert twin.config is not None
        assert twin.config.__dataclass_params__.frozen, f"{twin.config.__name__} is not frozen"


@every_method
def test_states_have_the_same_methods(twin: Pair) -> None:
    assert twin.state is not None, "a method needs a *State"
    other = getattr(twin.optimized, twin.state.__name__)
    assert other is not twin.state
    names, others = ({name for name in dir(side) if not name.startswith("_")} for side in (twin.state, other))
    # One side may store what the other computes as a property. The next test compares attributes.
    for name in names ^ others:
        side = twin.state if name in names else other
        assert isinstance(inspect.getattr_static(side, name), property), f"{name} exists on one side only"
    names &= others
    for name in names:
        kinds = [type(inspect.getattr_static(side, name)) for side in (twin.state, other)]
        assert kinds[0] is kinds[1], f"{name}: {kinds[0].__name__} and {kinds[1].__name__}"
    ours, theirs = (public_functions(side, ["__init__", *names]) for side in (twin.state, other))
    assert {"__init__", "prefill", "step", "reset", "reorder"} <= ours.keys()
    for name in ours:
        assert_same_signature(f"{twin.state.__name__}.{name}", ours[name], theirs[name])


@pytest.mark.parametrize(("twin", "options"), states(), ids=str)
def test_states_show_the_same_attributes(twin: Pair, options: dict[str, Any], device: torch.device) -> None:
    """Names, shapes and dtypes are equal, from an empty state to one in use. test_<method>.py compares the values."""
    one, other = (new_state(twin, side, device, **options) for side in (twin.reference, twin.optimized))
    inputs = prompt(device, seed=0), token(device, seed=1)
    for act in (
        lambda state: None,
        lambda state: state.prefill(*inputs[0], **checkers.extras(state, *inputs[0])),
        lambda state: state.step(*inputs[1], **checkers.extras(state, *inputs[1])),
        lambda state: state.reorder(torch.tensor([1, 0], device=device)),
        lambda state: state.reset(),
    ):
        outputs = [description(act(state)) for state in (one, other)]
        assert outputs[0] == outputs[1]
        shown = [{name: description(value) for name, value in attributes(state).items()} for state in (one, other)]
        shown[1].pop("prompt_kernel", None)  # the reference has no kernels
        assert shown[0] == shown[1]
    assert {"config", "occupied", "positions", "tokens_seen"} <= shown[0].keys()


@pytest.mark.parametrize("side", ["reference", "optimized"])
@every_method
def test_states_keep_no_autograd_graph(twin: Pair, side: str, device: torch.device) -> None:
    """They refuse inputs that require grad: a cache would keep the graph of every token. no_grad allows such inputs."""
    state = new_state(twin, getattr(twin, side), device)
    for call, tokens in (("prefill", prompt(device, seed=1)), ("step", token(device, seed=2))):
        more = checkers.extras(state, *tokens)
        for number, name in enumerate(("query", "key", "value")):
            given = [tensor.clone().requires_grad_(place == number) for place, tensor in enumerate(tokens)]
            with pytest.raises(ValueError, match=rf"^{name} requires grad.*no_grad"):
                getattr(state, call)(*given, **more)
        with torch.no_grad():
            output = getattr(state, call)(*(tensor.clone().requires_grad_() for tensor in tokens), **more)
        assert not any(
            tensor.requires_grad for tensor in (output, *vars(state).values()) if isinstance(tensor, torch.Tensor)
        )


# The sides are independent -------------------------------------------------------------------------------------------


def imports(source: str, package: str) -> Iterator[tuple[int, str, str | None]]:
    """(line, module, name) of every import in `source`, including nested ones. name is None for `import module`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                yield node.lineno, module, alias.name


def is_in(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def reaches(module: str, name: str | None, package: str) -> bool:
    """Whether an import gives access to `package`: to a part of it, to all of it, or to the whole of kvtwin."""
    by_kvtwin = module == "kvtwin" and name in (None, "*") and is_in(package, "kvtwin")
    return by_kvtwin or is_in(module if name is None else f"{module}.{name}", package)


def optimized_may_import(module: str, name: str | None) -> bool:
    references = [one for one in (REFERENCE, *dict(OTHERS)) if reaches(module, name, one)]
    if not references:
        return True
    if any(part.startswith("_") for part in f"{module}.{name}".split(".")):
        return False
    if SHARED.fullmatch(module) or SHARED.fullmatch(f"{module}.{name}"):
        return True
    return name is not None and is_in(module, references[0]) and name.endswith(("Config", "Result"))


def reference_may_import(module: str, name: str | None) -> bool:
    optimized = (OPTIMIZED, *(other for _, other in OTHERS))
    return not any(reaches(module, name, package) for package in (*optimized, "triton"))


RULES = {REFERENCE: reference_may_import, OPTIMIZED: optimized_may_import}
RULES |= {side: rule for pair in OTHERS for side, rule in zip(pair, RULES.values(), strict=True)}


def files_of(side: str) -> dict[tuple[str, str], Path]:
    """The source files of a module or of a package, by `side` and their path from its folder."""
    spec = importlib.util.find_spec(side)
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    paths = sorted(folder.rglob("*.py")) if spec.submodule_search_locations else [Path(spec.origin)]
    return {(side, path.relative_to(folder).as_posix()): path for path in paths}


FILES = {place: path for side in RULES for place, path in files_of(side).items()}


@pytest.mark.parametrize(("side", "file"), FILES)
def test_sides_do_not_import_each_other(side: str, file: str) -> None:
    """optimized imports only SHARED modules, *Config and *Result. reference imports neither optimized nor triton."""
    spec = importlib.util.find_spec(side)
    assert spec is not None
    folder = side if spec.submodule_search_locations else spec.parent or ""
    package = ".".join((folder, *Path(file).parts[:-1]))
    source = FILES[side, file].read_text(encoding="utf-8")
    wrong = [found for found in imports(source, package) if not RULES[side](*found[1:])]
    assert not wrong, "\n".join(f"{file}:{line}: imports {name or ''} from {module}" for line, module, name in wrong)


@pytest.mark.parametrize(
    ("side", "statement", "allowed"),
    [
        (OPTIMIZED, "from ..reference.contract import Sizes", True),
        (OPTIMIZED, "from ..reference import contract", True),
        (OPTIMIZED, "from ..reference.contract.arguments import check_integer", True),
        (OPTIMIZED, "from ..reference.contract.thinkv.types import Quantized, Thought", True),
        (OPTIMIZED, "from ..reference.contract.thinkv import formats", True),
        (OPTIMIZED, "from ..reference.contract.thinkv import arguments, _formats", False),
        (OPTIMIZED, "from ..reference.contract._private import check_integer", False),
        (OPTIMIZED, "from ..reference.thinkv import contract_formats", False),
        (OPTIMIZED, "from ..reference.thinkv.contract import ThinKVState", False),
        (OPTIMIZED, "from ..reference._ranks import of_all_ranks", False),
        (OPTIMIZED, "from ..reference import types", False),
        (OPTIMIZED, "from ..reference.state import State", False),
        (OPTIMIZED, "from ..reference.longflow import DecodeResult, LongFlowConfig", True),
        (OPTIMIZED, "from ..reference.hf.cache_adapter_thinkv import ThoughtCache", True),
        (OPTIMIZED, "from ..reference.hf.thinkv import ThinKVCache", False),
        (OPTIMIZED, "from ._common.launch import INTERPRETED\nimport torch\nimport triton", True),
        (OPTIMIZED, "from ..reference.longflow import log_score", False),
        (OPTIMIZED, "from ..reference.longflow import LongFlowConfig, LongFlowState", False),
        (OPTIMIZED, "from ..reference.longflow import *", False),
        (OPTIMIZED, "from ..reference import longflow", False),
        (OPTIMIZED, "from ..reference.thinkv import quantize", False),
        (OPTIMIZED, "from ..reference.thinkv.formats import contract", False),
        (OPTIMIZED, "from ..reference.contract import *\nfrom ..reference.thinkv.formats import E4M3", False),
        (OPTIMIZED, "from ..reference.thinkv import contraction", False),
        (OPTIMIZED, "from .. import reference", False),
        (OPTIMIZED, "import kvtwin.reference.attention as attention", False),
        (OPTIMIZED, "import kvtwin", False),
        (OPTIMIZED, "def f():\n    from kvtwin.reference.selection import victims", False),
        (REFERENCE, "from .contract import Sizes\nimport torch", True),
        (REFERENCE, "def f():\n    from ..optimized import longflow", False),
        (REFERENCE, "from kvtwin import optimized", False),
        (REFERENCE, "import triton.language as tl", False),
        (REFERENCE, "from triton import jit", False),
    ],
)
def test_the_rule_about_imports_can_fail(side: str, statement: str, allowed: bool) -> None:
    found = list(imports(statement, side))
    assert found
    assert all(RULES[side](module, name) for _, module, name in found) == allowed


@pytest.mark.slow
def test_reference_imports_without_triton() -> None:
    script = (
        "import importlib, pkgutil, sys\n"
        "sys.modules['triton'] = None\n"
        "import kvtwin.reference as package\n"
        "for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    if '.hf' not in module.name:  # which needs transformers, an extra\n"
        "        importlib.import_module(module.name)\n"
        "        print(module.name)\n"
        "assert not any(name.startswith('kvtwin.optimized') for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ours = {pair.reference_name for pair in discovery.pairs() if not pair.declared}
    assert ours <= set(done.stdout.split())


# A method is complete ------------------------------------------------------------------------------------------------


def missing_parts(
    twin: Pair, reference: Path, optimized: Path, conformance: Path, fixtures: Path, *, takes_blocks: bool = False
) -> list[str]:
    """The parts that `twin` lacks in these folders.

    Caches of block states, and recorders and benchmarks of baselines, are derived. perf exists in a source tree only.
    The ledger has claims of the methods' papers only; baselines have none.
    """
    name, module = twin.name, twin.path.replace(".", "/")
    perf = reference.parent / "perf" if (reference.parent / "pyproject.toml").is_file() else None
    baseline = twin.path.startswith("baselines.")
    tests = (conformance / room / name / f"test_{name}.py" for room in ("suite", "methods"))
    claims = conformance / "papers" / name / "claims.toml"
    has_claims = claims.is_file() and bool(tomllib.loads(claims.read_text(encoding="utf-8")).get("claim"))
    parts = {
        "reference": any((reference / file).is_file() for file in (f"{module}.py", f"{module}/__init__.py")),
        "optimized": any((optimized / file).is_file() for file in (f"{module}.py", f"{module}/__init__.py")),
        "test": any(path.is_file() for path in tests),
        "claims": has_claims or baseline,
        "mutants": (conformance / "methods" / name / "mutants.toml").is_file(),
        "trace": any((fixtures / "traces").glob(f"{name}*.safetensors")),
        "recorder": (fixtures / f"record_{name}.py").is_file() or baseline,
    }
    for side in (reference, optimized):
        if (side / "hf").is_dir() and not takes_blocks:
            parts[f"{side.name}/hf"] = (side / "hf" / f"{name}.py").is_file()
    if perf is not None and perf.is_dir():
        parts["bench"] = (perf / f"bench_{name}.py").is_file() or baseline
        parts["thresholds"] = (perf / "thresholds" / f"{name}.toml").is_file()
    return [part for part, there in parts.items() if not there]


@every_method
def test_a_method_has_all_its_parts(twin: Pair) -> None:
    """The method of another package has tests and mutants beside the module of its entry point."""
    if twin.declared is not None:
        files = (f"test_{twin.name}.py", "mutants.toml")
        assert [name for name in files if not (twin.declared.folder / name).is_file()] == []
        return
    packages = kvtwin.reference, kvtwin.optimized, kvtwin.conformance, kvtwin.fixtures
    folders = (Path(package.__file__).parent for package in packages)
    missing = missing_parts(twin, *folders, takes_blocks=twin.takes_blocks)
    assert not missing, f"{twin.name} lacks: {', '.join(missing)}"


PARTS = {
    "reference": "reference/new.py",
    "optimized": "optimized/new.py",
    "reference/hf": "reference/hf/new.py",
    "optimized/hf": "optimized/hf/new.py",
    "test": "conformance/suite/new/test_new.py",
    "claims": "conformance/papers/new/claims.toml",
    "mutants": "conformance/methods/new/mutants.toml",
    "trace": "fixtures/traces/new.safetensors",
    "recorder": "fixtures/record_new.py",
    "bench": "perf/bench_new.py",
    "thresholds": "perf/thresholds/new.toml",
}


@pytest.mark.parametrize("missing", [None, *PARTS])
@pytest.mark.parametrize("source_tree", [True, False], ids=["tree", "wheel"])
def test_a_missing_part_is_noticed(missing: str | None, source_tree: bool, tmp_path: Path) -> None:
    for part, file in PARTS.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if part != missing:
            path.write_text('[[claim]]\nid = "N-1"\n' if part == "claims" else "", encoding="utf-8")
    if source_tree:
        (tmp_path / "pyproject.toml").touch()
    twin = Pair(name="new", path="new", exports=("NewConfig",))
    folders = (tmp_path / side for side in ("reference", "optimized", "conformance", "fixtures"))
    unseen = not source_tree and missing in ("bench", "thresholds")
    assert missing_parts(twin, *folders) == ([] if missing is None or unseen else [missing])


def test_a_baseline_needs_no_claims_no_recorder_no_cache_and_no_bench(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    for part, file in PARTS.items():
        path = tmp_path / re.sub("^(reference|optimized)/new", r"\1/baselines/new", file)
        path.parent.mkdir(parents=True, exist_ok=True)
        if part not in ("claims", "recorder", "reference/hf", "optimized/hf", "bench"):
            path.touch()
    folders = [tmp_path / side for side in ("reference", "optimized", "conformance", "fixtures")]
    lacking = ["reference", "optimized", "claims", "recorder", "bench"]
    for path, missing in (("baselines.new", []), ("new", lacking)):
        twin = Pair(name="new", path=path, exports=("NewConfig",))
        assert missing_parts(twin, *folders, takes_blocks=True) == missing
    assert {"reference/hf", "optimized/hf"} <= set(missing_parts(twin, *folders))
