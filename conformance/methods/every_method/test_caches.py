"""Derived caches of block states inside transformers. With a budget for all tokens, generation equals the stock
model's. With less, it equals a loop over the state.

A method is tested if its checker declares CACHES (see kvtwin.conformance.judge.checkers).
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

import kvtwin.optimized.hf
import kvtwin.reference.hf
from kvtwin.conformance import discovery
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.methods.support.hf_cases import BlockCacheTests

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole]

METHODS = {pair.name: pair for pair in discovery.built_in() if checkers.ask(pair.name, "CACHES", None)}

for _name in METHODS:
    globals()[f"Test_{_name}"] = pytest.mark.method(_name)(type(f"Test_{_name}", (BlockCacheTests,), {
        "method": _name, "small": checkers.ask(_name, "CACHES", {}), "refused": checkers.ask(_name, "REFUSED", []),
        "__module__": __name__,
    }))  # fmt: skip


@pytest.mark.parametrize("side", [kvtwin.reference.hf, kvtwin.optimized.hf], ids=["reference", "optimized"])
@pytest.mark.parametrize("method", METHODS)
def test_a_derived_cache_names_its_config_its_state_and_its_options(method, side):
    pair = METHODS[method]
    name = f"{pair.state.__name__.removesuffix('State')}Cache"
    found = getattr(side, name)
    assert (found.__name__, found.__module__, found.Config) == (name, side.__name__, pair.config)
    assert found.State.__module__.startswith(side.__name__.removesuffix("hf"))
    assert found is getattr(side, name), "the class must be made only once"
    assert f"The options are those of {pair.config.__name__}: block_size" in found.__doc__
    assert ("TRITON_INTERPRET" in found.__doc__) == (side is kvtwin.optimized.hf)


@pytest.mark.parametrize("name", ["NothingCache", "TOVA", "attentionCache", "Cache"])
def test_a_name_without_a_method_is_no_attribute(name):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
        getattr(kvtwin.reference.hf, name)


def test_every_baseline_that_takes_blocks_takes_part():
    assert {pair.name for pair in discovery.built_in() if pair.is_baseline and pair.takes_blocks} <= METHODS.keys()
