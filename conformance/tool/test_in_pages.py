"""Cases in pages hold the tokens of the same cases in one tensor, and their poison elsewhere."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.cases.fp8_cases import Fp8Case
from kvtwin.conformance.cases.in_pages import (
    LAYOUTS,
    PagedDecodeCase,
    PagedFp8Case,
    PagedKeyCase,
    bits,
    with_pages,
)
from kvtwin.conformance.cases.key_cases import KeyCase
from kvtwin.conformance.cases.layouts import MIXED
from kvtwin.conformance.cases.saved import load
from kvtwin.reference import keydiff, longflow

KINDS = {PagedDecodeCase: DecodeCase, PagedFp8Case: Fp8Case, PagedKeyCase: KeyCase}
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
every_layout = pytest.mark.parametrize("layout", [*LAYOUTS, MIXED])
SIZES = {"batch": 3, "key_value_heads": 2, "group": 2, "slots": 9, "occupancy": "left_padding", "seed": 4}


def held_by(case) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For keys and values, the bits in the case's slots, read from the pages one by one, and its own."""
    found = []
    for cache, tensor in ((case.pages.key_cache, case.key), (case.pages.value_cache, case.value)):
        cache, tensor = bits(cache), bits(tensor)
        rows, slots = case.held.nonzero().t()
        page = case.pages.block_table[rows, slots // case.page_size].long()
        found.append((cache[page, slots % case.page_size], tensor[rows, :, slots]))
    return found


@every_kind
@every_layout
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_tokens_of_a_case_are_in_its_pages(kind, layout, page_size):
    case = kind(**SIZES, layout=layout, page_size=page_size)
    own = KINDS[kind](**SIZES)
    for (paged, tensor), other in zip(held_by(case), (own.key, own.value), strict=True):
        rows, slots = case.held.nonzero().t()
        assert torch.equal(paged, tensor) and torch.equal(paged, bits(other)[rows, :, slots])
    contiguous = [cache.is_contiguous() for cache in case.pages[:2]]
    assert contiguous == [layout == "contiguous" or (layout == "heads_first" and page_size == 1)] * 2
    pages = case.pages.block_table
    assert len(pages[pages >= 0].unique()) == int((pages >= 0).sum()), "a page of two places"
    used = torch.nn.functional.pad(case.held, (0, -9 % page_size)).unflatten(1, (-1, page_size)).any(2)
    assert torch.equal(pages[:, :used.shape[1]] >= 0, used), "a page without tokens has an entry"


@every_kind
@pytest.mark.parametrize(("poison", "is_held"), [
    ("nan", torch.isnan), ("zero", lambda x: x == 0), ("largest", lambda x: x == x.max()),
    ("stale", lambda x: x.abs().mean() > 0),
])
def test_all_other_memory_holds_the_poison(kind, poison, is_held):
    case = kind(**SIZES, page_size=4, poison=poison)
    for cache in case.pages[:2]:
        other = torch.ones(cache.shape[:2], dtype=torch.bool)
        rows, slots = case.held.nonzero().t()
        other[case.pages.block_table[rows, slots // 4].long(), slots % 4] = False
        assert int(other.sum()) >= 3 * 4
        assert bool(is_held(cache[other].float()).all())


@every_kind
def test_a_full_last_page_has_no_other_memory(kind):
    case = kind(**SIZES | {"occupancy": "full"}, page_size=4, last_page="full")
    assert case.slots == 12 and case.held.all()
    assert dataclasses.replace(case, slots=13).slots == 16
    assert kind(**SIZES, page_size=4).slots == 9


@every_kind
def test_a_saved_case_is_the_same(kind, tmp_path):
    case = kind(**SIZES, page_size=4, layout="apart", poison="largest")
    case.save(tmp_path / "case.safetensors")
    again = load(tmp_path / "case.safetensors")
    assert again == case
    for one, other in zip(again.pages, case.pages, strict=True):
        assert torch.equal(bits(one), bits(other)) or bool(one.isnan().any())
        assert one.stride() == other.stride()


def test_each_tensor_has_strides_of_its_own():
    case = PagedFp8Case(**SIZES | {"key_value_heads": 3}, page_size=4, layout=MIXED, protect="random")
    inputs = case.paged_inputs
    for one, other in (
        ("key_cache", "value_cache"), ("occupied", "protected"), ("key_scale", "value_scale"),
    ):
        assert inputs[one].shape == inputs[other].shape
        same = [mine == its for mine, its in zip(inputs[one].stride(), inputs[other].stride(), strict=True)]
        assert not any(same), (one, other)
    assert not any(inputs[name].is_contiguous() for name in ("query", "block_table", "key_scale"))


def test_functions_take_the_inputs():
    for kind in (PagedDecodeCase, PagedFp8Case):
        case = kind(**SIZES, page_size=4)
        found = longflow.paged_decode_attention(**with_pages(case.paged_inputs))
        expected = longflow.decode_attention(**case.inputs)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert not math.isnan(float(found.output.sum()))
    case = PagedKeyCase(**SIZES, page_size=4, budget=3)
    assert torch.equal(keydiff.paged_score(**with_pages(case.paged_score_inputs)), keydiff.score(**case.score_inputs))
    kept = keydiff.paged_evict(**with_pages(case.paged_inputs)).kept
    assert torch.equal(kept, keydiff.evict(**case.inputs).kept)
