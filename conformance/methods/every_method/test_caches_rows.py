"""Caches that are reset, copied, and whose rows are reordered, repeated and selected: what their layers, and what
layers share, hold then."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

import kvtwin.optimized.hf
import kvtwin.reference.hf
from kvtwin.conformance.methods.every_method.test_caches_captured import CACHES, FIRST, make
from kvtwin.conformance.methods.support import tiny_models
from kvtwin.conformance.methods.support.hf_cases import fits
from kvtwin.conformance.methods.support.tiny_models import generate, prompts
from kvtwin.optimized.hf import _host

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole]

SIDES = {"reference": kvtwin.reference.hf, "optimized": kvtwin.optimized.hf}
every_cache = pytest.mark.parametrize(("name", "side"), [
    # The adapters are the same on both sides.
    pytest.param(name, side, marks=pytest.mark.slow_on_cpu)
    if side == "optimized" and name not in ("longflow", "cake") else (name, side)
    for name in FIRST for side in SIDES
])


def llama(device: torch.device) -> Any:
    model = tiny_models.model("llama", device=device, num_attention_heads=2)
    model.set_attn_implementation("kvtwin")
    return model


def integers(cache: Any) -> list[tuple[str, Any]]:
    """The public tensors of integers of all objects that a cache consists of, by name."""
    found = []
    for one in _host.parts(cache):
        for name in dir(one):
            value = None if name.startswith("_") else getattr(one, name, None)
            if isinstance(value, Tensor) and not value.is_floating_point():
                found.append((f"{type(one).__name__}.{name}", value.tolist()))
    return found


def fed(cache: Any, model: Any, inputs: dict[str, Tensor], *rows: int) -> Any:
    """The cache, with these rows of a prompt."""
    with torch.no_grad(), fits():
        model(**{name: tensor[list(rows)] for name, tensor in inputs.items()}, past_key_values=cache)
    return cache


@every_cache
def test_reordered_rows_are_those_of_reordered_prompts(name, side, device):
    """A copy is reordered as well, but not with its original."""
    model, inputs = llama(device), prompts(9, [0, 5], device)
    caches = [fed(make(name, model, SIDES[side]), model, inputs, *rows) for rows in ((0, 1), (1, 0))]
    before, expected = map(integers, caches)
    assert before != expected
    if CACHES[name][0] != "EpiKV":                              # its hooks in the model are not copied
        caches.insert(1, copy.deepcopy(caches[0]))
    for cache in caches[:-1]:
        assert integers(cache) == before
        cache.reorder_cache(torch.tensor([1, 0], device=device))
        assert integers(cache) == expected


@every_cache
def test_repeated_and_selected_rows_are_those_of_such_prompts(name, side, device):
    """Padding shows which row is which. After wrong arguments, the rows are as before."""
    model, inputs = llama(device), prompts(9, [0, 5], device)
    cache = make(name, model, SIDES[side])
    cache.batch_repeat_interleave(2)                            # without tokens, there are no rows
    fed(cache, model, inputs, 0, 1)
    for call, wrong, says in (
        (cache.batch_repeat_interleave, 0, "repeats must be at least 1"),
        (cache.batch_select_indices, torch.tensor([0, 2], device=device), "indices must name rows 0 to 1"),
        (cache.batch_select_indices, torch.zeros(0, dtype=torch.int64, device=device), "without empty dimensions"),
    ):
        before = integers(cache)
        with pytest.raises(ValueError, match=says):
            call(wrong)
        assert integers(cache) == before
    cache.batch_repeat_interleave(2)
    assert integers(cache) == integers(fed(make(name, model, SIDES[side]), model, inputs, 0, 0, 1, 1))
    cache.batch_select_indices(torch.tensor([3, 1, 0], device=device))
    cache.batch_select_indices(torch.tensor([2, 0, 1], device=device, dtype=torch.int32))
    assert integers(cache) == integers(fed(make(name, model, SIDES[side]), model, inputs, 0, 1, 0))


@every_cache
@pytest.mark.parametrize("options", [
    {"do_sample": True, "num_return_sequences": 3, "top_k": 0, "temperature": 3.0}, {"num_beams": 3},
], ids=["samples", "beams"])
def test_continuations_of_one_prefix(name, side, options, device):
    """A prefix that runs once, and is repeated, gives the tokens of a batch that has it in each row."""
    model, inputs, found = llama(device), prompts(9, [0], device), []
    prefix = {key: tensor[:, :-1] for key, tensor in inputs.items()}
    for rows in ((0,), (0, 0, 0)):
        cache = fed(make(name, model, SIDES[side]), model, prefix, *rows)
        cache.batch_repeat_interleave(3 // len(rows))
        torch.manual_seed(3)
        found.append((generate(model, inputs, 4, past_key_values=cache, **options).tolist(), integers(cache)))
    assert found[0] == found[1]
    assert options.get("num_beams") or len(set(map(tuple, found[0][0]))) == 3


@pytest.mark.parametrize("side", SIDES)
def test_a_mask_of_the_constructor_follows_its_rows(side, device):
    """It covers tokens that the cache has not seen yet."""
    model, inputs = llama(device), prompts(9, [0, 5], device)
    mask, found = inputs["attention_mask"], []
    mask[1, 7] = 0                                              # of a token that comes later
    begins = {"input_ids": inputs["input_ids"][:, :6], "attention_mask": mask[:, :6]}
    for rows in ([0, 1], [1, 1, 0]):
        cache = SIDES[side].H2OCache(model.config, budget=6, block_size=4, attention_mask=mask[rows])
        fed(cache, model, begins, *rows)
        if len(rows) == 2:
            cache.batch_select_indices(torch.tensor([1, 1, 0], device=device))
        with torch.no_grad():
            model(inputs["input_ids"][[1, 1, 0], 6:], past_key_values=cache, position_ids=torch.tensor([[6, 7, 8]]))
        found.append(integers(cache))
        cache.reset()
        fed(cache, model, begins, *rows)                        # the constructor's rows again
    assert found[0] == found[1]


@every_cache
def test_a_cache_is_new_after_a_reset(name, side, device):
    """Nothing depends on the tokens before. A batch may have another size."""
    model, inputs = llama(device), prompts(9, [0, 5], device)
    used, other = (fed(make(name, model, SIDES[side]), model, inputs, *rows) for rows in ((0, 1), (1, 0)))
    other.reset()
    for rows in (2, 1):
        used.reset()
        assert used.get_seq_length() == 0
        assert rows == 1 or integers(used) == integers(other)
        caches = used, make(name, model, SIDES[side])
        given = {key: tensor[:rows] for key, tensor in prompts(8, [1, 0], device).items()}
        with fits():
            tokens = [generate(model, given, 2, past_key_values=cache).tolist() for cache in caches]
        assert tokens[0] == tokens[1]
        assert integers(used) == integers(caches[1])
