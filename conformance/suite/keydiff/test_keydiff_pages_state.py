"""KeyDiff's state over pages: the same tokens, outputs and evictions as in tensors of its own, wherever pages lie."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from kvtwin.conformance.cases.paged_states import (
    OWN_LAYOUTS,
    empty_pages,
    module_of,
    name_of,
)
from kvtwin.conformance.cases.paged_view import PagedLayout
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.refusals import NotProvided

# See test_keydiff.py.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")

SIDES = ("optimized", "reference")
each_side = pytest.mark.parametrize("side", SIDES)
#: The token of a step needs a slot of its own.
MORE = 1
SIZES = {"batch": 2, "query_heads": 4, "key_value_heads": 2, "head_dim": 16, "dtype": torch.float32}
BUDGET = 9


def over_pages(keydiff: Any, layout: PagedLayout) -> Any:
    if "pages" not in inspect.signature(keydiff.KeyDiffState).parameters:
        raise NotProvided(f"{keydiff}.KeyDiffState: pages")
    return module_of(keydiff, "KeyDiffState", layout, more=MORE)


@pytest.mark.slow_on_cpu
@pytest.mark.kind("equivalence")
@each_side
@pytest.mark.parametrize("layout", [
    pytest.param(layout, id=name_of(layout), marks=pytest.mark.property("state") if number in (0, 4) else ())
    for number, layout in enumerate(OWN_LAYOUTS)
])
def test_keydiff_state_over_many_pages_keeps_step_with_float64(side, layout, twins, device):
    """Several pages of each size, several tiles in a page, and new tokens in any of them."""
    trace = StateTrace(
        method="keydiff", config=(("budget", 150), ("block_size", 200), ("refresh", 3)), prompt=200, steps=8, batch=2,
        key_value_heads=2, group=2, seed=5, device=device.type,
    )
    lockstep.run(trace, over_pages(getattr(twins, side).keydiff, layout))


# Bad input -----------------------------------------------------------------------------------------------------------

BAD_PAGES: dict[str, tuple[Any, type[Exception], str]] = {
    "no pages": (tuple, TypeError, "pages must be Pages, got tuple"),
    "no room for the token of a step": (
        lambda p: p._replace(block_table=p.block_table[:, :2]), ValueError,
        r"pages.block_table must be \[B, n\] with B = 2 and n >= 3 for 10 slots in pages of 4, got \(2, 2\)",
    ),
    "a page twice": (
        lambda p: p._replace(block_table=p.block_table[:1].expand(2, -1).contiguous()), ValueError,
        "must have a page for one row only",
    ),
    "a page outside": (
        lambda p: p._replace(block_table=p.block_table + 4), ValueError, r"must have pages from 0 to 8 .* to \d+"
    ),
    "heads first": (
        lambda p: p._replace(key_cache=p.key_cache.transpose(1, 2), value_cache=p.value_cache.transpose(1, 2)),
        ValueError, r"with the state's Hkv = 2 and D = 16, got \(9, 2, 4, 16\)",
    ),
    "another dtype": (
        lambda p: p._replace(key_cache=p.key_cache.half(), value_cache=p.value_cache.half()), TypeError,
        "pages.key_cache must have the state's dtype torch.float32, got torch.float16",
    ),
    "keys as values": (
        lambda p: p._replace(value_cache=p.key_cache), ValueError, "pages.value_cache must have memory of its own"
    ),
}


@pytest.mark.kind("bad_input")
@each_side
@pytest.mark.parametrize(("change", "error", "says"), BAD_PAGES.values(), ids=list(BAD_PAGES))
def test_wrong_pages_of_a_keydiff_state_are_refused(side, change, error, says, twins, device):
    keydiff = getattr(twins, side).keydiff
    over_pages(keydiff, PagedLayout(4))                 # not provided unless the state takes pages
    sizes = {name: value for name, value in SIZES.items() if name != "query_heads"}
    pages = empty_pages(PagedLayout(4, seed=3), slots=BUDGET + MORE, **sizes, device=device)
    with pytest.raises(error, match=says):
        keydiff.KeyDiffState(keydiff.KeyDiffConfig(budget=BUDGET), **SIZES, device=device, pages=change(pages))
