"""Bad input: every argument of KeyDiff's functions, config and state, wrong in every way that a caller could pass it.

The error has the right type. Its message names the argument, what was expected and what was passed. A state is left
bitwise unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.bad_input import contents, refused
from kvtwin.reference.contract import MethodConfig

pytestmark = [
    pytest.mark.kind("bad_input"),
    pytest.mark.parametrize("side", ["reference", "optimized"]),
    pytest.mark.main,
]

B, HQ, HKV, S, D = 2, 4, 2, 6, 16
STATE = {"batch": B, "query_heads": HQ, "key_value_heads": HKV, "head_dim": D, "dtype": torch.float32}
TENSORS = {
    "score": ("key", "occupied"), "pairwise_score": ("key", "occupied"),
    "evict": ("key", "value", "occupied", "protected"),
}
MASKS = ("occupied", "protected")


def good(function: str, device: torch.device, *, per_head: bool = False) -> dict[str, Any]:
    """Valid arguments."""
    generator = torch.Generator().manual_seed(1)
    arguments: dict[str, Any] = {"budget": 4} if function == "evict" else {}
    for name in TENSORS[function]:
        if name in MASKS:
            arguments[name] = torch.ones((B, HKV, S) if per_head else (B, S), dtype=torch.bool, device=device)
            arguments[name][..., 0] = name == "occupied"
            arguments[name][..., 3:] = name == "occupied"
        else:
            arguments[name] = torch.randn(B, HKV, S, D, generator=generator).to(device)
    return arguments


def module_of(twins, side: str) -> Any:
    return getattr(twins, side).keydiff


# Tensors -------------------------------------------------------------------------------------------------------------


def wrongs(name: str) -> list[tuple[str, Any, type[Exception], str]]:
    """(id, change, error, part of the message)."""
    mask = name in MASKS
    found = [
        ("list", lambda x: x.tolist(), TypeError, "torch.Tensor.*list"),
        ("less", lambda x: x[0], ValueError, r"\[B"),
        ("more", lambda x: x[None, None] if mask else x[None], ValueError, r"\[B"),
        ("empty", lambda x: x[..., :0], ValueError, r"\[B.*0\)"),
        ("meta", lambda x: x.to("meta"), (ValueError if mask or name == "value" else Exception), "meta"),
        ("sparse", lambda x: x.to_sparse(), TypeError, "strided.*[Ss]parse"),
    ]
    dtypes = [torch.float32, torch.int64, torch.uint8] if mask else [torch.int64, torch.bool, torch.complex64]
    found += [(f"{dtype}", lambda x, dtype=dtype: x.to(dtype), TypeError, f"dtype.*{dtype}") for dtype in dtypes]
    if mask:
        found += [("short", lambda x: x[:, :-1], ValueError, r"\[B.*\(2, 6\).*\(2, 5\)"),
                  ("one_row", lambda x: x[:1], ValueError, r"\(1, 6\)"),
                  ("heads", lambda x: x[:, None].expand(B, 4, S), ValueError, r"\(2, 4, 6\)")]
    elif name == "value":
        found += [("short", lambda x: x[:, :, :-1], ValueError, r"\(2, 2, 6, 16\).*\(2, 2, 5, 16\)"),
                  ("half", lambda x: x.half(), TypeError, "key's dtype torch.float32.*torch.float16"),
                  ("None", lambda x: None, TypeError, "torch.Tensor.*NoneType")]
    else:
        found += [("None", lambda x: None, TypeError, "torch.Tensor.*NoneType")]
    return found


CASES = [
    pytest.param(function, name, *wrong, id=f"{function}-{name}-{label}")
    for function, names in TENSORS.items() for name in names for label, *wrong in wrongs(name)
    # The key is the first tensor, so there is no other device to compare a meta key with.
    if not (name == "key" and label == "meta")
]


@pytest.mark.parametrize(("function", "name", "spoil", "error", "says"), CASES)
def test_a_wrong_tensor(function, name, spoil, error, says, side, twins, device):
    arguments = good(function, device)
    arguments[name] = spoil(arguments[name])
    refused(getattr(module_of(twins, side), function), error, rf"\b{name}\b", "must", "got", says, **arguments)


@pytest.mark.parametrize("function", TENSORS)
def test_masks_may_be_per_head_or_missing(function, side, twins, device):
    call = getattr(module_of(twins, side), function)
    for arguments in (good(function, device, per_head=True), good(function, device)):
        call(**arguments)
        call(**{name: value for name, value in arguments.items() if name not in MASKS})


# Numbers and strings -------------------------------------------------------------------------------------------------

NOT_INTEGERS = [True, 2.0, "3", torch.tensor(3)]
NOT_WORDS = [None, 1, ("cosine",)]
NUMBERS: dict[str, list[tuple[list[Any], type[Exception], str]]] = {
    "budget": [([*NOT_INTEGERS, None], TypeError, "must be an int"), ([0, -1], ValueError, "must be at least 1")],
    "block_size": [([*NOT_INTEGERS, None], TypeError, "must be an int"), ([0, -1], ValueError, "must be at least 1")],
    "refresh": [([*NOT_INTEGERS, None], TypeError, "must be an int"), ([0, -1], ValueError, "must be at least 1")],
    "recent": [
        ([*NOT_INTEGERS, None], TypeError, "must be an int"), ([-1], ValueError, "must be at least 0"),
        ([5, 10**9], ValueError, "must be at most budget = 4"),
    ],
    "anchor": [
        (NOT_WORDS, TypeError, "must be a str"),
        (["", "MEAN", "mean normalized", "cosine"], ValueError, "must be one of mean_normalized, mean, median"),
    ],
    "similarity": [
        (NOT_WORDS, TypeError, "must be a str"), (["", "mean", "Cosine"], ValueError, "must be one of cosine, dot"),
    ],
    "scale": [(["0.1", True], TypeError, "must be a float or None"), ([float("nan")], ValueError, "must be finite")],
    **{
        count: [(NOT_INTEGERS, TypeError, "must be an int"), ([0], ValueError, "must be at least 1")]
        for count in ("batch", "query_heads", "key_value_heads", "head_dim")
    },
    "dtype": [([torch.int64, "float32", None], TypeError, "must be one of .*torch.float16")],
    "config": [([None, 4, MethodConfig(4)], TypeError, "must be a KeyDiffConfig")],
}
OPTIONS = {
    "score": ["anchor", "similarity"],
    "evict": ["budget", "recent", "anchor", "similarity"],
    "KeyDiffConfig": ["budget", "block_size", "recent", "anchor", "similarity", "refresh", "scale"],
    "KeyDiffState": ["config", *STATE],
}
NUMBER_CASES = [
    pytest.param(subject, option, value, error, says, id=f"{subject}-{option}-{value!r:.30}")
    for subject, options in OPTIONS.items() for option in options
    for values, error, says in NUMBERS[option] for value in values
]


@pytest.mark.parametrize(("subject", "option", "value", "error", "says"), NUMBER_CASES)
def test_a_wrong_number_or_word(subject, option, value, error, says, side, twins, device):
    module = module_of(twins, side)
    if subject == "KeyDiffConfig":
        arguments: dict[str, Any] = {"budget": 4}
    elif subject == "KeyDiffState":
        arguments = STATE | {"config": module.KeyDiffConfig(4), "device": device}
    else:
        arguments = good(subject, device)
        arguments.pop("protected", None)
    arguments[option] = value
    shown = "|".join(re.escape(text) for text in (f"{value}", f"{value!r}", type(value).__name__))
    refused(getattr(module, subject), error, rf"^{option}\b.*{says}.*got.*({shown})", **arguments)


def test_a_config_cannot_be_changed(side, twins):
    config = module_of(twins, side).KeyDiffConfig(4, recent=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.budget = 0
    refused(lambda **new: dataclasses.replace(config, **new), ValueError, "recent must be at most budget = 3", budget=3)


# Protection ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_head", [False, True])
def test_protected_and_recent_tokens_must_leave_room(per_head, side, twins, device):
    evict = module_of(twins, side).evict
    arguments = good("evict", device, per_head=per_head)
    protected, occupied = arguments["protected"], arguments["occupied"]
    protected[...] = False
    protected[1, ..., :3] = True
    if per_head:
        protected[1, 0] = False
    accepted(evict, **arguments, recent=1)
    says = ("protected", "recent", "at most budget = 4", "got 5")
    refused(evict, ValueError, *says, **arguments, recent=2)
    refused(evict, ValueError, "budget = 2", "got 3", **{**arguments, "budget": 2})
    # A token that is protected twice counts once, and a protected free slot does not count.
    protected[1, ..., -1] = True
    accepted(evict, **arguments, recent=1)
    refused(evict, ValueError, *says, **arguments, recent=2)
    occupied[..., 0] = False
    accepted(evict, **arguments, recent=2)


def accepted(function: Any, **arguments: Any) -> None:
    """Assert that the call raises no error."""
    try:
        function(**arguments)
    except ValueError as error:
        pytest.fail(f"expected no error, got: {error}")


# Input that only the kernels reject ----------------------------------------------------------------------------------


@pytest.mark.limits
def test_inputs_that_require_grad_and_sizes_beyond_the_kernels(side, twins, device):
    if side == "reference":
        return
    module = module_of(twins, side)
    for function, names in TENSORS.items():
        for name in names:
            if name in MASKS:
                continue
            arguments = good(function, device)
            arguments[name].requires_grad_()
            with pytest.raises((ValueError, RuntimeError), match="grad"):
                getattr(module, function)(**arguments)
        for head_dim in (8, 512):
            key = torch.ones(1, 1, 3, head_dim, device=device)
            extra = {"value": key, "budget": 1} if function == "evict" else {}
            with pytest.raises(ValueError, match=f"(?i)head_dim|D .*{head_dim}"):
                getattr(module, function)(key, **extra)
        for dtype in (torch.float64, torch.float8_e4m3fnuz):
            key = torch.ones(1, 1, 3, D, device=device).to(dtype)
            extra = {"value": key, "budget": 1} if function == "evict" else {}
            with pytest.raises(TypeError, match=f"{dtype}"):
                getattr(module, function)(key, **extra)


# The state -----------------------------------------------------------------------------------------------------------


@cache
def used_state(module: Any, device: torch.device) -> Any:
    state = module.KeyDiffState(module.KeyDiffConfig(3, block_size=9), **STATE, device=device)
    state.prefill(*block(device, S))
    state.step(*(part[:, :, 0] for part in block(device, 1)))
    return state


def state_of(module: Any, device: torch.device) -> Any:
    """A state after some tokens, copied for each test."""
    return copy.deepcopy(used_state(module, device))


def block(device: torch.device, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(B, heads, count, D, generator=generator).to(device) for heads in (HQ, HKV, HKV)]


def spoiled(parts: list[Tensor], place: int, spoil: Any) -> list[Any]:
    return [spoil(part) if place == number else part for number, part in enumerate(parts)]


STATE_CASES = {
    "a_list": (lambda x: x.tolist(), TypeError, "torch.Tensor"),
    "a_dimension_less": (lambda x: x[0], ValueError, r"\[B"),
    "another_batch": (lambda x: x[:1], ValueError, "must"),
    "other_channels": (lambda x: x[..., :8], ValueError, "must"),
    "other_heads": (lambda x: x[:, :1], ValueError, "must"),
    "another_dtype": (lambda x: x.half(), TypeError, "torch.float16"),
    "an_integer": (lambda x: x.long(), TypeError, "torch.int64"),
    "another_device": (lambda x: x.to("meta"), ValueError, "meta"),
}


@pytest.mark.parametrize("method", ["append_block", "step"])
@pytest.mark.parametrize("wrong", STATE_CASES)
def test_a_wrong_token_leaves_the_state_as_it_is(method, wrong, side, twins, device):
    state = state_of(module_of(twins, side), device)
    spoil, error, says = STATE_CASES[wrong]
    right = block(device, 5) if method == "append_block" else [part[:, :, 0] for part in block(device, 5)]
    before = contents(state)
    for place, name in enumerate(("query", "key", "value")):
        with pytest.raises(error) as caught:
            getattr(state, method)(*spoiled(right, place, spoil))
        assert re.search(rf"\b({name}|query|key)\b.*must.*{says}|{says}", str(caught.value)), caught.value
        assert contents(state) == before


def test_a_state_refuses_what_does_not_fit_it(side, twins, device):
    state = state_of(module_of(twins, side), device)
    before = contents(state)
    query, key, value = block(device, 5)
    mask = torch.ones(B, HKV, 5, dtype=torch.bool, device=device)
    for tokens, error, says in (
        ((query, key[:, :, :4], value), ValueError, r"value must .*got"),
        ((query[:, :, :4], key, value), ValueError, r"query must .*T = 5.*got \(2, 4, 4, 16\)"),
        ((query, key, value, mask[:, 0, :4]), ValueError, r"occupied must .*\(2, 4\)"),
        ((query, key, value, mask[:, 0].float()), TypeError, "occupied must .*torch.bool.*torch.float32"),
        ((query, key, value, mask), ValueError, "occupied must"),
    ):
        with pytest.raises(error, match=says):
            state.append_block(*tokens)
        assert contents(state) == before
    with pytest.raises(RuntimeError, match=r"prefill needs an empty state.*reset\(\)"):
        state.prefill(query, key, value)
    for index, error, says in (
        ([0, 1], TypeError, "index must"), (torch.tensor([0, 2], device=device), ValueError, "rows 0 to 1"),
        (torch.tensor([0], device=device), ValueError, r"\(2,\)"),
        (torch.tensor([0, 1], dtype=torch.int32, device=device), TypeError, "torch.int64"),
    ):
        with pytest.raises(error, match=says):
            state.reorder(index)
    assert contents(state) == before
    state.reset()
    state.prefill(query, key, value)
