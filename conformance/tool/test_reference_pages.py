"""`check_paged_attention`, which functions of other packages call."""

from __future__ import annotations

import re

import pytest
import torch

from kvtwin.conformance.cases.fp8_errors import BAD_CALLS, BAD_ELEMENTS, changed
from kvtwin.conformance.cases.in_pages import PagedFp8Case, with_pages
from kvtwin.reference.pages import Pages, check_paged_attention


def good() -> dict:
    case = PagedFp8Case(batch=2, key_value_heads=2, group=3, slots=9, page_size=4, content="largest")
    return with_pages(case.paged_inputs)


def test_good_arguments_give_the_factor():
    assert check_paged_attention(**good()) == 16**-0.5
    assert check_paged_attention(**good() | {"scale": 0.5, "check_elements": True}) == 0.5


@pytest.mark.parametrize(("changes", "error", "says"), (BAD_CALLS | BAD_ELEMENTS).values(),
                         ids=[*BAD_CALLS, *BAD_ELEMENTS])
def test_wrong_fp8_is_refused(changes, error, says):
    key, value, table = good()["pages"]
    inputs = changed({**good(), "key": key, "value": value}, changes)
    pages = Pages(inputs.pop("key"), inputs.pop("value"), table)
    with pytest.raises(error, match=says):
        check_paged_attention(**inputs | {"pages": pages})


@pytest.mark.parametrize(("changes", "error", "says"), [
    ({"pages": (1, 2, 3)}, TypeError, "pages must be Pages, got tuple"),
    ({"query": torch.zeros(2, 6, 17)}, ValueError, "query must be [B, Hq, D] with block_table's B = 2"),
    ({"query": torch.zeros(2, 5, 16)}, ValueError, "query heads must be a multiple of key/value heads"),
    ({"occupied": torch.ones(2, 13, dtype=torch.bool)}, ValueError, "occupied must be [B, S] with S <= 12"),
    ({"occupied": torch.ones(2, 9)}, TypeError, "occupied must have dtype torch.bool"),
    ({"protected": torch.ones(2, 8, dtype=torch.bool)}, ValueError, "protected must be [B, S]"),
    ({"scale": torch.inf}, ValueError, "scale must be"),
    ({"per_head": 1}, TypeError, "per_head must be a bool"),
    ({"check_elements": None}, TypeError, "check_elements must be a bool"),
], ids=lambda value: ",".join(value) if isinstance(value, dict) else None)  # fmt: skip
def test_wrong_arguments_are_refused(changes, error, says):
    with pytest.raises(error, match=re.escape(says)):
        check_paged_attention(**good() | changes)
