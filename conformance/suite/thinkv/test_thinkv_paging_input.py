"""Bad input to ThinKV's paged cache: every argument, wrong in every way that a caller could pass it.

The error has the right type. Its message names the argument, what was expected and what was passed. The cache is left
unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache as cached
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.paged_cases import FORMATS, config_of
from kvtwin.conformance.judge.checkers.thinkv_paging import TABLES
from kvtwin.reference.contract import MethodConfig
from kvtwin.reference.contract.thinkv.config import ThinKVConfig

pytestmark = [
    pytest.mark.kind("bad_input"),
    pytest.mark.parametrize("side", ["reference", "optimized"]),
    pytest.mark.main,
]

B, HQ, HKV, D = 2, 4, 2, 16
CONFIG = config_of(FORMATS[0], tokens=16)
SHAPES = {
    "append": {"key": (B, HKV, D), "value": (B, HKV, D), "positions": (B,)},
    "flush": {"rows": (B,), "thought": (B,), "segment": (B,)},
    "evict": {"tokens": (B, CONFIG.slots)},
    "release": {"rows": (B,)},
    "reorder": {"index": (B,)},
    "decode_attention": {"query": (B, HQ, D), "sparsity_mask": (B,)},
}
NUMBERS = {"positions": (4, 5), "thought": (1, 2), "segment": (0, 1), "index": (1, 0)}


def good(subject: str, device: torch.device) -> dict[str, Any]:
    """Valid arguments."""
    generator = torch.Generator().manual_seed(1)
    made: dict[str, Any] = {}
    for name, shape in SHAPES[subject].items():
        if name in ("rows", "tokens", "sparsity_mask"):
            made[name] = torch.zeros(shape, dtype=torch.bool, device=device)
        elif name in NUMBERS:
            made[name] = torch.tensor(NUMBERS[name], device=device)
        else:
            made[name] = torch.randn(shape, generator=generator).to(device)
    return made


@cached
def used_cache(twins: Any, side: str, device: torch.device) -> Any:
    """A cache with three tokens in blocks and one in the buffer. A refused call must not change it."""
    cache = getattr(twins, side).thinkv.PagedCache(
        CONFIG, batch=B, key_value_heads=HKV, head_dim=D, dtype=torch.float32, device=device
    )
    for position in range(4):
        if position == 3:
            cache.flush(*(torch.tensor([x, x], device=device) for x in (True, 2, 0)))
        cache.append(**good("append", device) | {"positions": torch.tensor([position, position], device=device)})
    return cache


def call(twins: Any, side: str, subject: str, cache: Any) -> Callable[..., Any]:
    if subject == "decode_attention":
        return lambda **given: getattr(twins, side).thinkv.decode_attention(cache=cache, **given)
    return getattr(cache, subject)


def refused(
    function: Callable[..., Any], error: type[Exception], *says: str, unchanged: Any = None, **given: Any
) -> None:
    before = [getattr(unchanged, name).clone() for name in TABLES] if unchanged is not None else []
    with pytest.raises(error) as caught:
        function(**given)
    assert caught.type is error, repr(caught.value)
    for pattern in says:
        assert re.search(pattern, str(caught.value)), f"{str(caught.value)!r} does not say {pattern!r}"
    for name, held in zip(TABLES, before, strict=False):
        assert torch.equal(getattr(unchanged, name), held), f"the refused call changed {name}"


WRONG: list[tuple[str, Callable[[Tensor], Any], type[Exception], str]] = [
    ("none", lambda x: None, TypeError, "must be a torch.Tensor.* got NoneType"),
    ("list", lambda x: x.tolist(), TypeError, "must be a torch.Tensor.* got list"),
    ("flat", lambda x: x[0], ValueError, r"must be \[B"),
    ("deep", lambda x: x[None], ValueError, r"must be .*\[B"),
    ("rows", lambda x: x[:1], ValueError, r"must be .*(\(2,|B = 2)"),
    ("empty", lambda x: x[:0], ValueError, "must be .*empty"),
    ("sparse", lambda x: x.to_sparse(), TypeError, "must be a strided"),
    ("meta", lambda x: x.to("meta"), ValueError, "must be on .*got meta"),
    ("other", lambda x: x.to(torch.int32 if x.dtype != torch.int32 else torch.bool), TypeError, "dtype.*torch.int32"),
    ("double", lambda x: x.double(), TypeError, "dtype.*torch.float64"),
]
TENSORS = [
    pytest.param(subject, name, *wrong, id=f"{subject}-{name}-{label}")
    for subject, names in SHAPES.items() for name in names for label, *wrong in WRONG
    if (name, label) != ("sparsity_mask", "none")  # None selects all rows
]
LAST = [(subject, name) for subject, names in SHAPES.items() for name, shape in names.items() if len(shape) > 1]


@pytest.mark.parametrize(("subject", "name", "spoil", "error", "says"), TENSORS)
def test_a_wrong_tensor(subject, name, spoil, error, says, side, twins, device):
    cache, given = used_cache(twins, side, device), good(subject, device)
    given[name] = spoil(given[name])
    refused(call(twins, side, subject, cache), error, rf"^{name}\b", says, unchanged=cache, **given)


@pytest.mark.parametrize(("subject", "name"), LAST)
def test_a_wrong_last_dimension(subject, name, side, twins, device):
    cache, given = used_cache(twins, side, device), good(subject, device)
    given[name] = given[name][..., 1:]
    refused(call(twins, side, subject, cache), ValueError, rf"^{name} must be", "got", unchanged=cache, **given)


def test_wrong_heads(side, twins, device):
    cache = used_cache(twins, side, device)
    for subject, name, says in (("append", "key", r"\(2, 2, 16\), got \(2, 1, 16\)"), ("append", "value", "value must"),
                                ("decode_attention", "query", "multiple of key/value heads, got Hq = 3 and Hkv = 2")):
        given = good(subject, device)
        given[name] = given[name][:, 1:]
        refused(call(twins, side, subject, cache), ValueError, says, unchanged=cache, **given)


@pytest.mark.parametrize("scale", ["1", True, float("nan"), float("inf"), 1e39])
def test_wrong_scale(scale, side, twins, device):
    cache = used_cache(twins, side, device)
    error = TypeError if isinstance(scale, str | bool) else ValueError
    refused(call(twins, side, "decode_attention", cache), error, "^scale must be", "got", unchanged=cache,
            **good("decode_attention", device), scale=scale)


@pytest.mark.parametrize("index", [(0, 2), (-1, 0)])
def test_rejects_rows_out_of_range(index, side, twins, device):
    cache = used_cache(twins, side, device)
    refused(cache.reorder, ValueError, "index must name rows 0 to 1", unchanged=cache,
            index=torch.tensor(index).to(device))


@pytest.mark.parametrize("cache", [None, "cache", torch.zeros(2), dict])
def test_rejects_objects_other_than_a_cache(cache, side, twins, device):
    refused(getattr(twins, side).thinkv.decode_attention, TypeError, "cache must be a PagedCache, got",
            **good("decode_attention", device), cache=cache)


@pytest.mark.limits
def test_rejects_the_cache_of_the_other_side(side, twins, device):
    other = used_cache(twins, "optimized" if side == "reference" else "reference", device)
    with pytest.raises(TypeError, match="cache must be a PagedCache, got PagedCache"):
        getattr(twins, side).thinkv.decode_attention(**good("decode_attention", device), cache=other)


MADE: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("none", {"config": None}, TypeError, "config must be a ThinKVConfig, got NoneType"),
    ("base", {"config": MethodConfig(4)}, TypeError, "config must be a ThinKVConfig, got MethodConfig"),
    ("batch", {"batch": 0}, ValueError, "batch must be at least 1, got 0"),
    ("heads", {"key_value_heads": 2.0}, TypeError, "key_value_heads must be an int, got float"),
    ("head_dim", {"head_dim": True}, TypeError, "head_dim must be an int, got bool"),
    ("dtype", {"dtype": torch.int8}, TypeError, "dtype must be one of .*got torch.int8"),
    ("dtype_name", {"dtype": "float32"}, TypeError, "dtype must be one of .*got float32"),
    ("device", {"device": "nowhere"}, ValueError, "device must be one that torch can use here, got 'nowhere'"),
    ("device_kind", {"device": 0}, TypeError, "device must be a torch.device or a str, got int"),
]
OPTIMIZED_ALONE: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("double", {"dtype": torch.float64}, TypeError, "dtype must be one of .*got torch.float64"),
    ("narrow", {"head_dim": 8}, ValueError, "head_dim must be from 16 to 256, got D = 8"),
    ("wide", {"head_dim": 257}, ValueError, "head_dim must be from 16 to 256, got D = 257"),
    ("group", {"config": ThinKVConfig(group=257)}, ValueError, "config.group must be at most 256, got 257"),
    ("block", {"config": ThinKVConfig(block=257)}, ValueError, "config.block must be at most 256, got 257"),
]


def make(twins: Any, side: str, options: dict[str, Any]) -> Any:
    given = {"config": CONFIG, "batch": B, "key_value_heads": HKV, "head_dim": D, "dtype": torch.float32, **options}
    return getattr(twins, side).thinkv.PagedCache(given.pop("config"), **given)


@pytest.mark.parametrize(("options", "error", "says"), [one[1:] for one in MADE], ids=[one[0] for one in MADE])
def test_a_wrong_cache(options, error, says, side, twins, device):
    refused(lambda: make(twins, side, {"device": device, **options}), error, says)


@pytest.mark.limits
@pytest.mark.parametrize(
    ("options", "error", "says"), [one[1:] for one in OPTIMIZED_ALONE], ids=[one[0] for one in OPTIMIZED_ALONE]
)
def test_what_kernels_do_not_take(options, error, says, side, twins, device):
    if side == "reference":
        config = {"config": CONFIG, **options}["config"]
        made = make(twins, side, {**options, "config": config, "device": device})
        assert made.config == config
    else:
        refused(lambda: make(twins, side, {"device": device, **options}), error, says)


@pytest.mark.limits
def test_gradients_are_refused(side, twins, device):
    cache = used_cache(twins, side, device)
    for subject, name in (("append", "key"), ("append", "value"), ("decode_attention", "query")):
        given = good(subject, device)
        given[name] = given[name].requires_grad_()
        if (side, subject) == ("reference", "decode_attention"):
            call(twins, side, subject, cache)(**given).output.sum().backward()
            assert given[name].grad is not None
        else:
            refused(call(twins, side, subject, cache), ValueError, f"{name} requires grad", unchanged=cache, **given)


@pytest.mark.limits
def test_too_many_query_heads(side, twins, device):
    cache = used_cache(twins, side, device)
    query = torch.randn(B, 17 * HKV, D, device=device)
    if side == "optimized":
        refused(call(twins, side, "decode_attention", cache), ValueError, "at most 16, got G = 17", unchanged=cache,
                query=query)
    else:
        assert getattr(twins, side).thinkv.decode_attention(query, cache).output.shape == query.shape


REFERENCE_ALONE: list[tuple[str, dict[str, Any], str]] = [
    ("append", {"positions": (2, 5)}, "positions must be new ones, or -1, got 2 in row 0"),
    ("append", {"positions": (4, -2)}, "positions must be new ones, or -1, got -2 in row 1"),
    ("flush", {"rows": (True, True), "thought": (1, 3)}, "thought must be 0, 1 or 2, got 3 in row 1"),
    ("flush", {"rows": (True, True), "segment": (0, 99)}, "segment must be from 0 to 2, got 99 in row 1"),
]


@pytest.mark.parametrize(("subject", "wrong", "says"), REFERENCE_ALONE)
def test_wrong_numbers(subject, wrong, says, side, twins, device):
    """The reference checks the values. The optimized side does not ask the device (see overflow)."""
    if side == "optimized":
        return
    cache, given = used_cache(twins, side, device), good(subject, device)
    given |= {name: torch.tensor(numbers, device=device) for name, numbers in wrong.items()}
    refused(getattr(cache, subject), ValueError, says, unchanged=cache, **given)


def test_a_full_buffer_and_a_full_table(side, twins, device):
    """The reference raises an error if this happens in any row. test_overflow_corrupts_nothing tests the optimized
    side."""
    if side == "optimized":
        return
    cache = make(twins, side, {"device": device, "batch": 1, "config": config_of(FORMATS[0], tokens=4)})
    key = torch.randn(1, HKV, D, device=device)

    def numbers(*values: Any) -> Tensor:
        return torch.tensor(values, device=device)

    def fill(first: int) -> None:
        for position in range(first, first + 4):
            cache.append(key, key, numbers(position))

    flush = {"rows": numbers(True), "thought": numbers(0), "segment": numbers(0)}
    fill(0)
    refused(cache.append, ValueError, r"row 0 has 4 tokens in its buffer: flush\(\) it", unchanged=cache,
            key=key, value=key, positions=numbers(4))
    for first in (4, 8):                                                           # four blocks of two
        cache.flush(**flush)
        fill(first)
    refused(cache.flush, ValueError, "row 0 has no block left for 4 tokens of type 0", unchanged=cache, **flush)
