"""The stubs of the caches for transformers agree with the caches' options, and mypy finds wrong options by them."""

from __future__ import annotations

import importlib.util
import inspect
import re
from types import ModuleType

import pytest

from kvtwin.conformance import plugin

CI = plugin.HERE.parent / ".ci"
if not CI.is_dir():
    pytest.skip(".ci/ is not in the wheel", allow_module_level=True)
pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"kvtwin_ci_{name}", CI / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stubs_are_those_of_the_present_options(capsys):
    assert script("stubs").main([]) == 0, f"run: python .ci/stubs.py --write\n{capsys.readouterr().out}"


@pytest.mark.slow
@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_mypy_sees_a_wrong_option(side, tmp_path):
    """Each cache with all of its options, and with one that it has not; a wrong type; a wrong name of a method."""
    pytest.importorskip("mypy", reason="needs mypy: python -m pip install 'kvtwin[dev]'")
    package = importlib.import_module(f"kvtwin.{side}.hf")
    names = sorted(name for name in package.__all__ if name.endswith("Cache"))
    lines = ["from typing import Any", f"from kvtwin.{side} import hf", "of: Any = None"]
    wrong = []
    for name in names:
        _, *others = inspect.signature(getattr(package, name)).parameters
        lines.append(f"hf.{name}(of, {', '.join(f'{one}=of' for one in others)})")
        lines.append(f"hf.{name}(of, budgett=16)")
        wrong.append((len(lines), f'Unexpected keyword argument "budgett" for "{name}"'))
    for line in ('hf.H2OCache(of, budget="16")', 'hf.cache("h20", of)'):
        lines.append(line)
        wrong.append((len(lines), "incompatible type"))
    lines.append('hf.cache("h2o", of, budget=16).nbytes + 1')
    (tmp_path / "user.py").write_text("\n".join(lines) + "\n")
    typecheck = script("typecheck")
    typecheck.link(str(tmp_path))
    ran = typecheck.mypy(str(tmp_path), "user.py")
    said = re.findall(r"^user\.py:(\d+): error: (.*)", ran.stdout, flags=re.MULTILINE)
    assert len(said) == len(wrong), said
    for (at, text), (line, says) in zip(said, wrong, strict=True):
        assert int(at) == line and says in text
