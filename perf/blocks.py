"""Shared benchmarks of the baselines: a decode step, attention and aggregate of a block, and a block of a state.

States have a full cache, so that every new token evicts one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right

from kvtwin.conformance.cases.block_cases import AttendCase
from kvtwin.conformance.cases.fp8_cases import FORMATS, Fp8AttendCase
from kvtwin.conformance.cases.oracle import upcast_all
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.judge.checkers import h2o
from kvtwin.conformance.judge.checkers.blocks import assert_attend_right
from kvtwin.conformance.judge.compare import assert_same, assert_within

from .harness import DeviceBenchmark
from .peers import _attention, _that_run, decode_peers

DEVICE = "cuda"
DTYPE = torch.bfloat16
ITEM = DTYPE.itemsize
#: Rows of a batch that are compared with float64. All rows would take longer than the benchmark.
ROWS_CHECKED = 2
BLOCK = 128


class Shape(NamedTuple):
    """B, Hq, Q (new tokens per call), S (the budget), Hkv, D."""

    batch: int
    query_heads: int
    queries: int
    slots: int
    key_value_heads: int = 8
    head_dim: int = 128

    def __str__(self) -> str:
        queries = "" if self.queries == 1 else f"-Q{self.queries}"
        return f"B{self.batch}-Hq{self.query_heads}{queries}-S{self.slots}"

    @property
    def attention_bytes(self) -> int:
        """The minimum for attention alone: read keys, values and queries once, write the output once."""
        cache = 2 * self.batch * self.key_value_heads * self.slots * self.head_dim
        return (cache + 2 * self.batch * self.query_heads * self.queries * self.head_dim) * ITEM

    @property
    def state_bytes(self) -> int:
        """The minimum for a state: also read the new tokens, write them to their slots, and write a score per slot."""
        tokens = 2 * self.batch * self.key_value_heads * self.queries * self.head_dim * ITEM
        return self.attention_bytes + 2 * tokens + 4 * self.batch * self.key_value_heads * self.slots


STEPS = (Shape(128, 32, 1, 3200), Shape(8, 32, 1, 3200))
BLOCKS = (Shape(32, 32, BLOCK, 3200), Shape(4, 32, BLOCK, 3200))
#: The other shapes are not gated.
GATED = (STEPS[0], BLOCKS[0])


def tokens(shape: Shape, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """query [B, Hq, count, D], key and value [B, Hkv, count, D]: normal numbers, the same in every run."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    query, key, value = (
        torch.randn(shape.batch, heads, count, shape.head_dim, dtype=DTYPE, device=DEVICE, generator=generator)
        for heads in (shape.query_heads, shape.key_value_heads, shape.key_value_heads)
    )
    return query, key, value


def full_state(method: str, shape: Shape, **options: Any) -> Any:
    """A state with the method's defaults and these options, whose cache is full: the last block has evicted."""
    pair = checkers.pair(method)
    assert pair.config is not None
    assert pair.state is not None
    state = getattr(pair.optimized, pair.state.__name__)(
        pair.config(shape.slots, BLOCK, **checkers.measured(method, shape.slots) | options), batch=shape.batch,
        query_heads=shape.query_heads, key_value_heads=shape.key_value_heads, head_dim=shape.head_dim, dtype=DTYPE,
        device=DEVICE,
    )
    for start in range(0, state.config.capacity + BLOCK, BLOCK):
        state.append_block(*tokens(shape, BLOCK, seed=start))
    return state


def time_step(device_benchmark: DeviceBenchmark, method: str, shape: Shape, *, gated: bool = True) -> None:
    """Time one step: attention, the aggregate, scores, the choice of a victim, and writing the token to its slot."""
    state = full_state(method, shape)
    given = tuple(tensor[:, :, 0].contiguous() for tensor in tokens(shape, 1, seed=1))
    # The peers attend to the same keys and values.
    cache = state.key[:, :, :shape.slots], state.value[:, :, :shape.slots]

    def verify(output: Tensor) -> None:
        assert not bool(output.isnan().any()), "part of the output was not written"
        check_state(state, tuple(tensor[:, :, None] for tensor in given), method)

    device_benchmark(
        lambda: state.step(*given), moves=shape.state_bytes, verify=verify, gated=gated,
        peers=decode_peers(given[0], *cache), peers_move=shape.attention_bytes, references=eager(method, given, cache),
    )


def time_interval(
    device_benchmark: DeviceBenchmark, method: str, shape: Shape, interval: int, *, gated: bool = True, **options: Any
) -> None:
    """Time all steps of one interval in one graph: the cache grows by a token in each, and the last one evicts down to
    the budget. The peers run attention alone as often, over the mean number of slots. options: of the config."""
    state = full_state(method, shape, interval=interval, **options)
    assert num_tokens(state) == shape.slots, "the state is not at the start of an interval"
    several = tokens(shape, interval, seed=1)
    given = [tuple(tensor[:, :, number].contiguous() for tensor in several) for number in range(interval)]
    mean = shape._replace(slots=shape.slots + interval // 2)
    cache = state.key[:, :, :mean.slots], state.value[:, :, :mean.slots]

    def steps() -> tuple[Tensor, ...]:
        return tuple(state.step(*token) for token in given)

    def verify(outputs: tuple[Tensor, ...]) -> None:
        assert not any(bool(output.isnan().any()) for output in outputs), "part of the outputs was not written"
        assert num_tokens(state) == shape.slots, "the state is not at the end of an interval"
        # Check a step that does not evict, and the one that does.
        for number, token in enumerate(given):
            if number in (0, interval - 1):
                check_state(state, tuple(tensor[:, :, None] for tensor in token), method)
                assert num_tokens(state) == shape.slots + (number + 1) % interval
            else:
                state.step(*token)

    def repeated(peer: Callable[[], Tensor]) -> Callable[[], list[Tensor]]:
        return lambda: [peer() for _ in range(interval)]

    peers = decode_peers(given[0][0], *cache)
    device_benchmark(
        steps, moves=interval * mean.state_bytes, verify=verify, gated=gated,
        peers={name: repeated(peer) for name, peer in peers.items() if name.startswith("cudnn")},
        peers_move=interval * mean.attention_bytes,
    )


def num_tokens(state: Any) -> int:
    """The number of tokens in the cache, which must be equal in all rows and heads."""
    counts = state.occupied.sum(-1)
    assert int(counts.min()) == int(counts.max())
    return int(counts.max())


def time_block(device_benchmark: DeviceBenchmark, method: str, shape: Shape, *, gated: bool = True) -> None:
    """Time a block of a full state: attention, the aggregate, scores, one victim per token, and compaction."""
    state = full_state(method, shape)
    given = tokens(shape, shape.queries, seed=1)
    key, value = (tensor[:, :, :shape.slots + shape.queries] for tensor in (state.key, state.value))
    most = block_memory(shape) + 8 * 4 * shape.batch * shape.key_value_heads * state.sizes.slots
    assert_lean(lambda: state.append_block(*given), most)

    def verify(output: Tensor) -> None:
        assert not bool(output.isnan().any()), "part of the output was not written"
        check_state(state, given, method)

    device_benchmark(
        lambda: state.append_block(*given), moves=shape.state_bytes, verify=verify, gated=gated,
        peers=block_peers(given[0], key, value), peers_move=shape.attention_bytes,
    )


def time_attend(device_benchmark: DeviceBenchmark, method: str, shape: Shape, *, gated: bool = True) -> None:
    """Time the function `attend`: a block's attention, and the attention that each key receives."""
    pair = checkers.pair(method)
    query, _, _ = tokens(shape, shape.queries, seed=1)
    _, key, value = tokens(shape, shape.slots + shape.queries, seed=2)
    occupied = torch.ones(shape.batch, key.shape[2], dtype=torch.bool, device=DEVICE)
    assert_lean(lambda: pair.optimized.attend(query, key, value, occupied), block_memory(shape))

    def verify(result: Any) -> None:
        assert not any(bool(part.isnan().any()) for part in result), "part of the results was not written"
        row = slice(shape.batch - 1, shape.batch)
        case = AttendCase(
            batch=1, key_value_heads=shape.key_value_heads, group=shape.query_heads // shape.key_value_heads,
            head_dim=shape.head_dim, dtype=DTYPE, content="given", device=DEVICE, method=method, slots=key.shape[2],
            queries=shape.queries,
        )
        case._adopt({"query": query[row], "key": key[row], "value": value[row], "occupied": occupied[row]})
        # VATP has no error function of its own: its `attend` is H2O's.
        error = checkers.ask(method, "attend_error", h2o.attend_error)
        assert_attend_right([part[row] for part in result], case, pair.reference.attend, error)

    device_benchmark(
        lambda: pair.optimized.attend(query, key, value, occupied), moves=shape.attention_bytes, verify=verify,
        gated=gated, peers=block_peers(query, key, value), peers_move=shape.attention_bytes,
        references={"eager": lambda: pair.reference.attend(query, key, value, occupied)},
    )


def time_attend_fp8(
    device_benchmark: DeviceBenchmark, method: str, shape: Shape, fp8: str, *, gated: bool = True
) -> None:
    """Time `attend` over FP8 keys and values with a scale of each head. The peer is the same function in bfloat16."""
    pair = checkers.pair(method)
    given = fp8_block(shape, fp8)
    plain = {name: given[name].to(DTYPE) for name in ("query", "key", "value")} | {"occupied": given["occupied"]}
    ours = pair.optimized.attend

    def verify(result: Any) -> None:
        assert not any(bool(part.isnan().any()) for part in result), "part of the results was not written"
        row = slice(shape.batch - 1, shape.batch)
        case = Fp8AttendCase.of(
            **{name: tensor if "scale" in name else tensor[row] for name, tensor in given.items()}, method=method
        )
        error = checkers.ask(method, "attend_error", h2o.attend_error)
        assert_attend_right([part[row] for part in result], case, pair.reference.attend, error)

    cache = shape.batch * shape.key_value_heads * (shape.slots + shape.queries) * shape.head_dim
    outside = 2 * shape.batch * shape.query_heads * shape.queries * shape.head_dim * ITEM
    device_benchmark(
        lambda: ours(**given), moves=2 * cache + outside, verify=verify, gated=gated,
        peers={"bfloat16": lambda: ours(**plain)}, peers_move=2 * cache * ITEM + outside,
    )


def fp8_block(shape: Shape, fp8: str) -> dict[str, Tensor]:
    """Arguments of `attend`, with numbers that reach the largest one of the format."""
    most = torch.finfo(FORMATS[fp8]).max
    query, _, _ = tokens(shape, shape.queries, seed=1)
    _, *numbers = tokens(shape, shape.slots + shape.queries, seed=2)
    key, value = ((number * (most / 8)).clamp(-most, most).to(FORMATS[fp8]) for number in numbers)
    scale = torch.linspace(4 / most, 8 / most, shape.key_value_heads, device=DEVICE)
    return {
        "query": query, "key": key, "value": value, "key_scale": scale, "value_scale": 2 * scale.flip(0),
        "occupied": torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=DEVICE),
    }


def eager(method: str, given: tuple[Tensor, ...], cache: tuple[Tensor, Tensor]) -> dict[str, Callable[[], Any]]:
    """The reference's `attend` of one token over the cache, if the method has this function."""
    pair = checkers.pair(method)
    if "attend" not in pair.exports:
        return {}
    occupied = torch.ones(cache[0].shape[0], cache[0].shape[2], dtype=torch.bool, device=DEVICE)
    return {"eager": lambda: pair.reference.attend(given[0][:, :, None], *cache, occupied)}


def block_peers(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Attention of a block to the cache and causally to itself: query [B, Hq, Q, D]; key, value [B, Hkv, S, D]."""
    mask = causal_lower_right(query.shape[2], key.shape[2])
    return _that_run({
        "flash": _attention(SDPBackend.FLASH_ATTENTION, query, key, value, attn_mask=mask, enable_gqa=True),
    })


# Memory --------------------------------------------------------------------------------------------------------------


def block_memory(shape: Shape) -> int:
    """The memory that a block may use besides its inputs: the output, partial softmax results, and twice the attention
    that each key receives."""
    rows = shape.batch * shape.query_heads * shape.queries
    slots = shape.slots + shape.queries
    return rows * (shape.head_dim * ITEM + 2 * 4) + 2 * 4 * shape.batch * shape.key_value_heads * slots + 2**20


def assert_lean(function: Callable[[], Any], most: int) -> None:
    """Assert that `function` allocates at most `most` bytes, which is too few for a [Q, S] matrix."""
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= most, f"allocates {peak / 2**20:.1f} MiB, expected at most {most / 2**20:.1f}"


# Against float64 -----------------------------------------------------------------------------------------------------


class _Rows:
    """A view of some rows of a state for the judge. When these rows get tokens, all rows of the state get theirs."""

    def __init__(self, state: Any, given: tuple[Tensor, ...], rows: Tensor) -> None:
        self._state, self._given, self._rows = state, given, rows

    def append_block(self, **_: Tensor) -> Tensor:
        query, key, value = self._given
        if query.shape[2] == 1:
            return self._state.step(query[:, :, 0], key[:, :, 0], value[:, :, 0])[self._rows][:, :, None]
        return self._state.append_block(query, key, value)[self._rows]

    def __getattr__(self, name: str) -> Tensor:
        return getattr(self._state, name)[self._rows]


def check_state(state: Any, given: tuple[Tensor, ...], method: str) -> None:
    """Pass the tokens once more to the state, and to a float64 reference with the same contents. Check the output, the
    choice and the scores within their bounds, and positions, keys and values exactly."""
    pair = checkers.pair(method)
    rows = torch.randperm(state.sizes.batch, generator=torch.Generator().manual_seed(3))[:ROWS_CHECKED].to(DEVICE)
    reference = _reference(pair, state, rows)
    query, key, value = (tensor[rows] for tensor in given)
    adapter = checkers.ask(method, "Adapter", None)()
    tested = _Rows(state, given, rows)
    adapter.resume(tested, reference)
    output, truth, bound = adapter.append_block(tested, reference, {"query": query, "key": key, "value": value})
    assert_within(output, truth, bound, what="output")
    where = reference.occupied[..., None]
    for name in ("key", "value"):
        assert_same(getattr(tested, name), getattr(reference, name), where=where, what=name)


def _reference(pair: Any, state: Any, rows: Tensor) -> Any:
    """The reference's state in float64 with the contents of these rows of `state`."""
    _, query_heads, key_value_heads, _, head_dim = state.sizes
    reference = getattr(pair.reference, pair.state.__name__)(
        state.config, batch=len(rows), query_heads=query_heads, key_value_heads=key_value_heads, head_dim=head_dim,
        dtype=torch.float64, device=DEVICE,
    )
    held = {name: getattr(state, name)[rows] for name in ("key", "value", "score")}
    for name, tensor in {**upcast_all(held), **{n: getattr(state, n)[rows] for n in ("occupied", "positions")}}.items():
        setattr(reference, name, tensor.clone())
    reference._seen = state.tokens_seen
    return reference
