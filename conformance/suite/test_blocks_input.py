"""Bad input to every method with a block cache: configs, states, `attend`, and functions of single methods.

The error has the right type. Its message names the argument, what was expected and what was passed. A state is left
bitwise unchanged.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance import discovery
from kvtwin.conformance.cases.bad_input import moved
from kvtwin.conformance.cases.block_cases import AttendCase
from kvtwin.conformance.harness.impl import Twins
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.judge.checkers.blocks import NOT_INTEGERS
from kvtwin.reference.blocks import BlockConfig, BlockState

BLOCKS = [pair for pair in discovery.methods() if issubclass(pair.state or object, BlockState)]
ATTENDS = [pair for pair in BLOCKS if AttendCase in checkers.ask(pair.name, "CASES", ())]
pytestmark = [pytest.mark.kind("bad_input"), pytest.mark.main]
every_pair = pytest.mark.parametrize("pair", BLOCKS, ids=str)
both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])

B, HQ, HKV, T, D = 2, 4, 2, 5, 16
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "append_block": {"query": (B, HQ, T, D), "key": (B, HKV, T, D), "value": (B, HKV, T, D), "occupied": (B, T)},
    "step": {"query": (B, HQ, D), "key": (B, HKV, D), "value": (B, HKV, D)},
    "reorder": {"index": (B,)},
    "attend": {"query": (B, HQ, 3, D), "key": (B, HKV, T, D), "value": (B, HKV, T, D), "occupied": (B, T)},
}
SHAPES["prefill"] = SHAPES["append_block"]


def good(subject: str, device: torch.device) -> dict[str, Any]:
    """Valid arguments."""
    generator = torch.Generator().manual_seed(1)
    made: dict[str, Any] = {}
    for name, shape in SHAPES[subject].items():
        if name == "occupied":
            made[name] = (torch.arange(T) > 0).expand(shape).to(device)
        elif name == "index":
            made[name] = torch.tensor([1, 0], device=device)
        else:
            made[name] = torch.randn(shape, generator=generator).to(device)
    return made


def config_of(pair: discovery.Pair, **options: Any) -> Any:
    return checkers.small_config(pair, 4, options)


def state_of(pair: discovery.Pair, twins: Twins, side: str, device: torch.device, **options: Any) -> Any:
    """A state after some tokens, or, with empty=True, an empty one."""
    empty = options.pop("empty", False)
    sizes = {"batch": B, "query_heads": HQ, "key_value_heads": HKV, "head_dim": D, "dtype": torch.float32}
    module = checkers.module(getattr(twins, side), pair)
    given = {"config": config_of(pair), **sizes, "device": device, **options}
    state = getattr(module, pair.state.__name__)(given.pop("config"), **given)
    if not empty:
        state.prefill(**good("prefill", device))
    return state


def held(value: Any) -> Any:
    """All attributes of a state, private ones included, with tensors as bytes."""
    if isinstance(value, Tensor):
        return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {name: held(one) for name, one in value.items()}
    return [held(one) for one in value] if isinstance(value, (list, tuple)) else value


@contextmanager
def refused(error: type[Exception], *says: str, state: Any = None) -> Iterator[None]:
    """Assert that the block raises exactly `error`, with every pattern of `says` in its message, and leaves the state
    unchanged."""
    before = held(vars(state)) if state is not None else None
    with pytest.raises(error) as caught:
        yield
    assert caught.type is error, repr(caught.value)
    for pattern in says:
        assert re.search(pattern, str(caught.value)), f"{str(caught.value)!r} does not say {pattern!r}"
    assert state is None or held(vars(state)) == before, "the refused call changed the state"


# Tensors -------------------------------------------------------------------------------------------------------------


def narrowed(name: str, at: int) -> Callable[[dict[str, Any]], None]:
    def spoil(given: dict[str, Any]) -> None:
        given[name] = given[name].narrow(at, 0, given[name].shape[at] - 1)
    return spoil


def replaced(name: str, change: Callable[[Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def spoil(given: dict[str, Any]) -> None:
        given[name] = change(given[name])
    return spoil


def every(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any]], None]:
    def spoil(given: dict[str, Any]) -> None:
        given.update({name: change(tensor) for name, tensor in given.items() if tensor.is_floating_point()})
    return spoil


Wrong = tuple[str, Callable[[dict[str, Any]], None], type[Exception], str]
ANY_TENSOR: list[Wrong] = [
    ("query_none", replaced("query", lambda x: None), TypeError, "query must be a torch.Tensor"),
    ("key_list", replaced("key", lambda x: x.tolist()), TypeError, "key must be a torch.Tensor.* got list"),
    ("query_flat", replaced("query", lambda x: x[0]), ValueError, r"query must be \[B"),
    ("value_deep", replaced("value", lambda x: x[None]), ValueError, r"value must be .*\[B"),
    ("key_int", replaced("key", lambda x: x.long()), TypeError, "key.* torch.int64"),
    ("value_double", replaced("value", lambda x: x.double()), TypeError, "value must have .*torch.float64"),
    ("value_meta", replaced("value", lambda x: x.to("meta")), ValueError, "value must be on .*got meta"),
    ("query_sparse", replaced("query", lambda x: x.to_sparse()), TypeError, "query must be a strided"),
    ("query_head_dim", narrowed("query", -1), ValueError, r"query.* (D = 16|\(2, 4, 16\)|\(2, 4, .*16\))"),
    ("heads", narrowed("query", 1), ValueError, "Hq|query heads"),
    ("value_heads", narrowed("value", 1), ValueError, "value must be"),
    ("rows", narrowed("query", 0), ValueError, r"query must be .*B"),
    ("empty", replaced("key", lambda x: x.narrow(0, 0, 0)), ValueError, "key must be .*(empty|got)"),
]
OF_BLOCKS: list[Wrong] = [
    ("value_short", narrowed("value", 2), ValueError, "value must be"),
    ("occupied_short", narrowed("occupied", 1), ValueError, r"occupied must be .*\(2, 5\), got \(2, 4\)"),
    ("occupied_float", replaced("occupied", lambda x: x.float()), TypeError, "occupied must have dtype torch.bool"),
    ("occupied_list", replaced("occupied", lambda x: x.tolist()), TypeError, "occupied must be a torch.Tensor"),
]
OF_STATES: list[Wrong] = [
    ("dtype", every(lambda x: x.bfloat16()), TypeError, "state's dtype torch.float32, got torch.bfloat16"),
    ("device", moved, ValueError, "state's device .*, got meta"),
]
OF_PROMPTS: list[Wrong] = [
    *OF_BLOCKS, *OF_STATES,
    ("query_long", replaced("query", lambda x: torch.cat((x, x), 2)), ValueError, "query must be .*T = 5"),
    ("batch", lambda given: given.update({n: x[:1] for n, x in given.items()}), ValueError, "B = 2.*B = 1"),
]
TENSORS = {
    "prefill": [*ANY_TENSOR, *OF_PROMPTS], "append_block": [*ANY_TENSOR, *OF_PROMPTS],
    "step": [*ANY_TENSOR, *OF_STATES], "attend": [
        *ANY_TENSOR, *OF_BLOCKS,
        ("query_long", replaced("query", lambda x: torch.cat((x, x), 2)), ValueError, r"query must be .*Q <= S = 5"),
        ("occupied_per_query_head", replaced("occupied", lambda x: x[:, None].expand(B, HQ, T)), ValueError,
         r"occupied must be .*\(2, 2, 5\), got \(2, 4, 5\)"),
    ],
}


@both_sides
@every_pair
@pytest.mark.parametrize("subject", ["prefill", "append_block", "step"])
def test_wrong_tensors_of_a_state(pair, side, subject, twins, device):
    state = state_of(pair, twins, side, device, empty=subject == "prefill")
    for name, spoil, error, says in TENSORS[subject]:
        given = good(subject, device)
        spoil(given)
        with refused(error, "must|got", says, state=state):
            getattr(state, subject)(**given)
            pytest.fail(f"{name} was accepted")


@both_sides
@pytest.mark.parametrize("pair", ATTENDS, ids=str)
def test_wrong_tensors_of_attend(pair, side, twins, device):
    module = checkers.module(getattr(twins, side), pair)
    for name, spoil, error, says in TENSORS["attend"]:
        given = good("attend", device)
        spoil(given)
        with refused(error, "must|got", says):
            module.attend(**given)
            pytest.fail(f"{name} was accepted")
    for scale, error in (("1", TypeError), (True, TypeError), (float("nan"), ValueError), (1e39, ValueError)):
        with refused(error, "scale must be"):
            module.attend(**good("attend", device), scale=scale)


@both_sides
@every_pair
def test_wrong_rows_of_reorder(pair, side, twins, device):
    state = state_of(pair, twins, side, device)
    for index, error, says in (
        ([0, 1], TypeError, "index must be a torch.Tensor"), (torch.tensor([0.0, 1.0]), TypeError, "torch.int64"),
        (torch.tensor([0]), ValueError, r"\(2,\), got \(1,\)"), (torch.tensor([0, 2]), ValueError, "rows 0 to 1"),
        (torch.tensor([-1, 0]), ValueError, "from -1 to 0"), (torch.tensor([[0, 1]]), ValueError, r"index must be \[B"),
    ):
        with refused(error, says, state=state):
            state.reorder(index.to(device) if isinstance(index, Tensor) else index)


# Numbers -------------------------------------------------------------------------------------------------------------

#: For every config: the option, wrong values, the error and its message.
NUMBERS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("budget", NOT_INTEGERS, TypeError, "budget must be an int"),
    ("budget", (0, -1), ValueError, "budget must be at least 1"),
    ("budget", (2**63, 10**30, 10**5000), ValueError, "budget must fit in int64, got an int of"),
    ("block_size", NOT_INTEGERS, TypeError, "block_size must be an int"),
    ("block_size", (0, -3), ValueError, "block_size must be at least 1"),
    ("scale", ("1", True, 1j), TypeError, "scale must be a float or None"),
    ("scale", (float("nan"), float("inf"), 1e39, 10**400), ValueError, "scale must be finite"),
    ("softcap", ("2", True, 1j), TypeError, "softcap must be a float or None"),
    ("softcap", (0, 0.99, -2.0, float("nan"), float("inf"), 2**20 + 1), ValueError, "softcap must be from 1 to"),
]


@every_pair
def test_wrong_numbers_of_a_config(pair):
    for option, values, error, says in [*NUMBERS, *checkers.ask(pair.name, "NUMBERS", [])]:
        for value in values:
            with refused(error, says):
                config_of(pair, **{option: value})
                pytest.fail(f"{option} = {value!r} was accepted")


@every_pair
def test_accepts_valid_configs(pair):
    """The defaults with a sufficient budget, and the smallest budget. A config cannot be modified."""
    assert pair.config(64, **checkers.required(pair.name)).block_size == 128
    least = {**checkers.ask(pair.name, "SMALL", {}), "budget": 1}
    config = pair.config(**{name: value for name, value in least.items() if name != "sinks"}, **(
        {"sinks": 0} if "sinks" in least else {}
    ))
    with pytest.raises(AttributeError):
        config.budget = 2


@both_sides
@every_pair
def test_wrong_sizes_of_a_state(pair, side, twins, device):
    """A config of another method is also refused: it may have the same options with another meaning."""
    other = next(one for one in BLOCKS if one.name != pair.name)
    wanted = f"config must be a {pair.config.__name__}, got"
    takes = inspect.signature(getattr(checkers.module(getattr(twins, side), pair), pair.state.__name__)).parameters
    zeros = torch.zeros(8, device=device)
    for option, value, error, says in (
        ("config", None, TypeError, f"{wanted} NoneType"),
        ("config", BlockConfig(4), TypeError, f"{wanted} BlockConfig"),
        ("config", config_of(other), TypeError, f"{wanted} {other.config.__name__}"),
        ("batch", 0, ValueError, "batch must be at least 1"), ("batch", True, TypeError, "batch must be an int"),
        ("batch", 10**30, ValueError, "batch must fit in int64, got an int of 100 bits"),
        ("batch", 2**57, ValueError, r"batch \* key_value_heads \* slots \* head_dim must be less than \d+, got"),
        ("query_heads", 3, ValueError, "query heads must be a multiple .*Hq = 3 and Hkv = 2"),
        ("key_value_heads", 0, ValueError, "key_value_heads must be at least 1"),
        ("head_dim", 1.5, TypeError, "head_dim must be an int"),
        ("dtype", torch.int64, TypeError, "dtype must be one of .*torch.float16"),
        ("device", "gpu", ValueError, "device must be"), ("device", None, TypeError, "device must be a torch.device"),
        ("sink_logits", [0.0] * 4, TypeError, r"sink_logits must be a torch.Tensor \[Hq\], got list"),
        ("sink_logits", zeros, ValueError, r"sink_logits must be \[Hq\] = \(4,\), got \(8,\)"),
        ("sink_logits", zeros[::2], ValueError, "sink_logits must be contiguous, got a stride of 2"),
        ("sink_logits", zeros[:4].long(), TypeError, "sink_logits.dtype must be one of .*int64"),
        ("sink_logits", zeros[:4].to("meta"), ValueError, "sink_logits must be on .*, got meta"),
    ):
        if option == "sink_logits" and option not in takes:
            continue
        with refused(error, says):
            state_of(pair, twins, side, **{"device": device, "empty": True, option: value})


@both_sides
def test_streaming_llm_keeps_all_tokens_within_the_largest_budget(side, twins, device):
    keep = getattr(twins, side).baselines.streaming_llm.keep
    for sinks in (0, 4, 2**63 - 2):
        found = keep(torch.tensor([[3, -1, -1, 7]], device=device), 2**63 - 1, sinks=sinks)
        assert found.tolist() == [[True, False, False, True]]


# Functions of single methods -----------------------------------------------------------------------------------------

POSITIONS = torch.tensor([[3, 1, -1, 7]])


@both_sides
@pytest.mark.parametrize(("method", "function", "options"), [
    ("streaming_llm", "keep", {"budget": 3, "sinks": 1}), ("random", "score", {"seed": 1}),
])
def test_wrong_positions(method, function, options, side, twins, device):
    call = getattr(getattr(getattr(twins, side).baselines, method), function)
    for positions, error, says in (
        (None, TypeError, "positions must be a torch.Tensor"), ([1, 2], TypeError, "positions must be a torch.Tensor"),
        (POSITIONS.float(), TypeError, "positions must have dtype torch.int64, got torch.float32"),
        (POSITIONS.int(), TypeError, "positions must have dtype torch.int64, got torch.int32"),
        (POSITIONS[:, :0], ValueError, r"positions must be \[..., S\] without empty"),
        (POSITIONS.to_sparse(), TypeError, "positions must be a strided"),
    ):
        with refused(error, says):
            call(positions.to(device) if isinstance(positions, Tensor) else positions, **options)


@both_sides
@pytest.mark.parametrize(("method", "function", "options", "error", "says"), [
    ("streaming_llm", "keep", {"budget": 0}, ValueError, "budget must be at least 1"),
    ("streaming_llm", "keep", {"budget": 10**30}, ValueError, "budget must fit in int64, got an int of 100 bits"),
    ("streaming_llm", "keep", {"budget": True}, TypeError, "budget must be an int"),
    ("streaming_llm", "keep", {"budget": 4}, ValueError, "sinks must be less than budget = 4, got 4"),
    ("streaming_llm", "keep", {"budget": 4, "sinks": -1}, ValueError, "sinks must be at least 0"),
    ("random", "score", {"seed": -1}, ValueError, "seed must be at least 0"),
    ("random", "score", {"seed": 2**32}, ValueError, "seed must be at most"),
    ("random", "score", {"seed": 1.0}, TypeError, "seed must be an int"),
])
def test_wrong_numbers_of_a_function(method, function, options, error, says, side, twins, device):
    call = getattr(getattr(getattr(twins, side).baselines, method), function)
    with refused(error, says):
        call(POSITIONS.to(device), **options)
