"""What a public model says about the orders that the papers claim: none is refuted, and none is proven."""

from __future__ import annotations

import pytest

from .public_model import order

pytestmark = pytest.mark.kind("claims")


def counts(method: str, *others: str) -> tuple[int, int, int]:
    found = order(method, others)
    return found["above"], found["below"], found["points"]


@pytest.mark.claim("LF-18l")
def test_longflow_is_on_par_with_h2o_and_vatp_on_a_public_model():
    assert counts("longflow", "h2o", "vatp") == (0, 0, 20)
    assert counts("longflow", "random") == (15, 0, 20)


@pytest.mark.claim("KD-16g")
def test_keydiff_is_behind_the_best_of_four_on_a_public_model():
    assert counts("keydiff", "h2o", "tova", "snapkv", "streaming_llm") == (0, 12, 20)
    assert counts("snapkv", "keydiff") != (0, 12, 20)


@pytest.mark.claim("TK-21b")
def test_thinkv_is_behind_h2o_or_r_kv_on_a_public_model():
    assert counts("thinkv", "h2o", "r_kv") == (0, 12, 20)
    assert counts("h2o", "thinkv") != (0, 12, 20)


@pytest.mark.claim("EK-13f")
def test_epikv_is_behind_raas_on_a_public_model():
    assert counts("epikv", "raas") == (0, 11, 20)
    assert counts("raas", "epikv") == (11, 0, 20)


@pytest.mark.claim("SK-12g")
def test_synckv_beside_methods_that_evict_on_a_public_model():
    assert counts("synckv", "cake", "snapkv", "h2o", "streaming_llm") == (1, 4, 20)
    assert counts("synckv", "random") == (17, 0, 20)
