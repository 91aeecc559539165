"""Mutants as somebody's implementations: copies of a side, what no verdict can judge, and whose mutant it is."""

from __future__ import annotations

import pytest

from kvtwin.conformance.lab.mutation import mutate, verdict_copies
from kvtwin.conformance.lab.mutation.mutants import Mutant
from kvtwin.conformance.lab.mutation.verdict_copies import PACKAGE

NAMES = verdict_copies.names()


def test_the_copy_of_a_side_imports_the_rest_from_kvtwin(tmp_path):
    tree = mutate.here()
    for side in verdict_copies.SIDES:
        verdict_copies.copy(side, tree.folders[side], tmp_path / side)
        package = tmp_path / side / PACKAGE
        own = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
        assert {"__init__.py", "baselines/h2o.py"} <= own and not any(name.startswith("hf/") for name in own)
        for name in own:
            up = "." * (name.count("/") + 2)  # one level above the package
            text = (package / name).read_text(encoding="utf-8")
            assert f"from {up}" not in text and '"kvtwin::' not in text, name
    functions = (tmp_path / "optimized" / PACKAGE / "longflow" / "functions.py").read_text(encoding="utf-8")
    assert "\nfrom kvtwin.reference." in functions and "\nfrom .._common." in functions


def test_a_copy_of_the_reference_takes_the_classes_of_arguments_from_kvtwin():
    source = "class AConfig:\n    a = 1\n\n\nclass A:\n    of = AConfig\n"
    made = verdict_copies.rewritten(source, "reference/baselines/a.py")
    assert made.index("from kvtwin.reference.baselines.a import AConfig\n") < made.index("class A:")
    assert "from kvtwin.reference.b import Pages\n" in verdict_copies.rewritten(
        "class Pages: ...\n", "reference/b/__init__.py"
    )


@pytest.mark.parametrize(("file", "killers", "why"), [
    ("optimized/longflow/state.py", ("suite/longflow/test_longflow.py::a",), None),
    ("optimized/longflow/state.py", ("a/test_longflow_ranks.py::a", "test_x.py::b"), None),
    ("optimized/longflow/state.py", ("a/test_longflow_ranks.py::a",), "several processes"),
    ("reference/state.py", ("methods/every_method/test_interruptions.py::a",), "interrupted"),
    ("reference/hf/x.py", ("test_x.py::a",), "transformers"),
    ("conformance/judge/x.py", ("test_x.py::a",), "the suite"),
    ("key_norm/optimized.py", ("test_x.py::a",), "another package"),
])
def test_what_no_verdict_can_judge(file, killers, why):
    one = Mutant("m", "longflow", file, (("a", "b"),), "", killers, "")
    reason = verdict_copies.outside(one, "a = 1\n")
    assert reason is None if why is None else why in str(reason)


@pytest.mark.parametrize(("old", "why"), [("1", "class of an argument"), ("2", None)])
def test_a_configuration_is_outside(old, why):
    one = Mutant("m", "longflow", "reference/a.py", ((old, "3"),), "", ("test_x.py::a",), "")
    reason = verdict_copies.outside(one, "class AConfig:\n    a = 1\n\n\nb = 2\n")
    assert reason is None if why is None else why in str(reason)


@pytest.mark.parametrize(("listed", "file", "killers", "method"), [
    ("h2o", "optimized/_common/x.py", ("suite/test_laws.py::a",), "h2o"),
    ("h2o", "optimized/_common/x.py", ("a.py::a[h2o]", "a.py::a[vatp]"), "h2o"),
    ("h2o", "optimized/_common/x.py", ("suite/vatp/test_vatp.py::a",), "vatp"),
    ("longflow", "optimized/baselines/snapkv.py", ("suite/longflow/test_longflow.py::a",), "snapkv"),
    ("pm_kvq", "optimized/baselines/kivi_ops.py", ("a.py::a[pm_kvq]",), "pm_kvq"),
    ("longflow", "reference/contract/thinkv/types.py", ("a.py::a[longflow]",), "thinkv"),
    ("h2o", "reference/contract/pm_kvq.py", ("a.py::a[h2o]",), "pm_kvq"),
    ("longflow", "reference/contract/arguments.py", ("a.py::a[longflow]",), "longflow"),
])
def test_the_method_of_a_mutant(listed, file, killers, method):
    assert verdict_copies.method_of(Mutant("m", listed, file, (), "", killers, ""), NAMES) == method
