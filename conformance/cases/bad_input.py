"""Valid calls of LongFlow and SnapKV, for tests of bad input.

A `Call` has valid arguments. A test replaces some and asserts how the call is refused.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

B, HQ, HKV, S, D, W = 2, 4, 2, 6, 16, 3
QUERY, TOKEN, CACHE = (B, HQ, D), (B, HKV, D), (B, HKV, S, D)
PROMPT, WINDOW, SHARED, PER_HEAD = (B, HQ, S, D), (B, HQ, W, D), (B, S), (B, HKV, S)
MASKS = {"occupied", "protected"}

# The tensor arguments of each function or method, and its other arguments.
SUBJECTS: dict[str, dict[str, tuple[int, ...]]] = {
    "decode_attention": {"query": QUERY, "key": CACHE, "value": CACHE, "occupied": SHARED, "protected": SHARED},
    "decode_per_head": {"query": QUERY, "key": CACHE, "value": CACHE, "occupied": PER_HEAD, "protected": PER_HEAD},
    "compress_prefill": {"query_window": WINDOW, "key": CACHE, "value": CACHE, "occupied": SHARED, "protected": SHARED},
    "window_score": {"query_window": WINDOW, "key": CACHE, "occupied": SHARED},
    "compress": {"query_window": WINDOW, "key": CACHE, "value": CACHE, "occupied": SHARED, "protected": SHARED},
    "prefill": {"query": PROMPT, "key": CACHE, "value": CACHE, "occupied": SHARED},
    "step": {"query": QUERY, "key": TOKEN, "value": TOKEN},
    "reorder": {"index": (B,)},
}
OTHERS: dict[str, dict[str, Any]] = {
    "decode_per_head": {"per_head": True}, "compress_prefill": {"budget": 4}, "compress": {"budget": 4},
}
STATE = {"batch": B, "query_heads": HQ, "key_value_heads": HKV, "head_dim": D, "dtype": torch.float32}

#: Invalid tokens for any state's `step`: (change of query, key and value; error; pattern of its message).
WRONG_TOKENS: list[tuple[Callable[..., tuple[Any, Any, Any]], type[Exception], str]] = [
    (lambda q, k, v: (q[:1], k, v), ValueError, r"query must be \[B, Hq, D\]"),
    (lambda q, k, v: (q, k[..., :8], v), ValueError, r"key must be \[B, Hkv, D\]"),
    (lambda q, k, v: (q, k, v.half()), TypeError, "value must have the state's dtype"),
    (lambda q, k, v: (q, None, v), TypeError, "key must be a torch.Tensor"),
]


def good(subject: str, device: torch.device) -> dict[str, Any]:
    """Valid arguments of a function or method."""
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, Any] = {}
    for name, shape in SUBJECTS[subject].items():
        if name in MASKS:
            tensors[name] = torch.ones(shape, dtype=torch.bool, device=device)
            tensors[name][..., 0] = name == "occupied"
        elif name == "index":
            tensors[name] = torch.tensor([1, 0], device=device)
        else:
            tensors[name] = torch.randn(shape, generator=generator).to(device)
    return tensors | OTHERS.get(subject, {})


def module_of(twins: Any, side: str, subject: str) -> Any:
    modules = getattr(twins, side)
    return modules.baselines.snapkv if subject in ("window_score", "compress") else modules.longflow


@cache
def used_state(twins: Any, side: str, device: torch.device, empty: bool, check_finite: bool) -> Any:
    longflow = getattr(twins, side).longflow
    config = longflow.LongFlowConfig(budget=4, check_finite=check_finite)
    state = longflow.LongFlowState(config, **STATE, device=device)
    if not empty:
        state.prefill(**good("prefill", device))
        state.step(**good("step", device))
    return state


class Call:
    """A call of a function or of a state's method. Each call has its own state: empty for prefill, else used."""

    def __init__(
        self, twins: Any, side: str, subject: str, device: torch.device, *, check_finite: bool = False
    ) -> None:
        self.arguments = good(subject, device)
        self.state: Any = None
        if subject in ("prefill", "step", "reorder"):
            # used_state is built once; deepcopy gives every test a state that no other test has touched.
            self.state = copy.deepcopy(used_state(twins, side, device, subject == "prefill", check_finite))
            self.function: Callable[..., Any] = getattr(self.state, subject)
        else:
            name = "decode_attention" if subject == "decode_per_head" else subject
            self.function = getattr(module_of(twins, side, subject), name)
            if check_finite:
                self.arguments["check_finite"] = True

    def __call__(self) -> Any:
        return self.function(**self.arguments)

    @contextmanager
    def refused(self, error: type[Exception], *says: str) -> Iterator[None]:
        """Assert that the block raises exactly `error` with every pattern of `says`, and leaves the state unchanged."""
        before = contents(self.state)
        with pytest.raises(error) as caught:
            yield
        assert caught.type is error, repr(caught.value)
        for pattern in says:
            assert re.search(pattern, str(caught.value)), f"{str(caught.value)!r} does not say {pattern!r}"
        assert contents(self.state) == before


def contents(state: Any) -> dict[str, Any]:
    """All attributes of a state, with tensors as bytes."""
    return {
        name: value.cpu().contiguous().reshape(-1).view(torch.uint8).tolist() if isinstance(value, Tensor) else value
        for name, value in (vars(state) if state is not None else {}).items()
    }


def refused(function: Callable[..., Any], error: type[Exception], *says: str, **arguments: Any) -> None:
    """Assert that a call without a state raises exactly `error` with every pattern of `says`."""
    with pytest.raises(error) as caught:
        function(**arguments)
    assert caught.type is error, repr(caught.value)
    for pattern in says:
        assert re.search(pattern, str(caught.value)), f"{str(caught.value)!r} does not say {pattern!r}"


def convert_to(dtype: torch.dtype) -> Callable[[dict[str, Any]], None]:
    def spoil(arguments: dict[str, Any]) -> None:
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                arguments[name] = value.to(dtype)
    return spoil


def moved(arguments: dict[str, Any]) -> None:
    arguments.update({name: value.to("meta") for name, value in arguments.items() if isinstance(value, Tensor)})
