"""LagKV on the GPU: when the chunk after a chunk is complete, one program per KV head ranks its tokens, before the
block's attention. A decode step evicts one token at most, so that one pass over the ranks is enough."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference.baselines.lag_kv import LagKVConfig
from .._common.block_cache.evict_kernels import COUNTED, _valid_before
from .._common.block_cache.ops import chunk_size
from .._common.block_cache.state import Block, BlockState, Policy
from .._common.launch import SMALL_TILES, on_device_of, padded_head_dim
from .._common.numerics import float32
from .._common.operation import operation

__all__ = ["LagKVConfig", "LagKVState"]

#: Tokens whose channels are read at a time: two float64 tiles of 16 x 256 elements fit in the registers.
TOKENS = 16
#: Slots, or tokens, of which one number each is read at a time; tokens that are compared with CHUNK others at a time.
CHUNK, COMPARED = (16, 16) if SMALL_TILES else (256, 32)
#: Above the code of every token.
_NEVER = tl.constexpr(2**63 - 1)


class LagKVState(BlockState):
    """A LagKV cache. `score` is each token's rank in its chunk, from 0 on; `lag` for the sinks and for tokens without a
    rank, which nothing can evict. Standard deviations are computed in float64: scaled channels may be as large as 1e83.
    With an interval above 1, a step runs the kernels for blocks."""

    Config = LagKVConfig
    _library_attends = True
    _chooses_early = True

    def _make_policy(self) -> Policy:
        return Policy(by_blocks=self.config.capacity > self.config.budget)

    def _allocate(self) -> None:
        config, (batch, _, heads, _, _) = self.config, self.sizes
        programs = batch * heads * triton.cdiv(config.block_size, config.lag)
        self._places = self._buffer(programs, 2 * config.lag, dtype=torch.int32)
        self._spreads = self._buffer(programs, 3, config.lag, dtype=torch.float64)

    def _update(self, block: Block) -> tuple[Tensor | None, Tensor | None]:
        return rank_chunks(
            self.key, self.value, self.occupied, self.positions, self._token_index, self._valid_seen, self._score,
            self._places, self._spreads, self.config.capacity, block.end, self.config.sinks, self.config.lag,
        ), None

    def _finish_step(self, query: Tensor) -> None:
        finish_step(
            self.key, self.value, self.occupied, self.positions, self._token_index, self._valid_seen, self._score,
            self._places, self._spreads, self.config.budget, self.config.sinks, self.config.lag,
        )


@operation("kvtwin::lag_kv_rank", mutates_args=("score", "places", "spreads"))
def rank_chunks(
    key: Tensor, value: Tensor, occupied: Tensor, positions: Tensor, token_index: Tensor, valid_seen: Tensor,
    score: Tensor, places: Tensor, spreads: Tensor, capacity: int, end: int, sinks: int, lag: int,
) -> Tensor:
    """Store in `score` the rank of each token whose following chunk this block completes, and `lag` for tokens without
    a rank. Returns what orders the evictions, [B, Hkv, end] int64: score * 2^31 + position.

    A state's buffers as in `ops.arrive`; the block's tokens are in slots capacity to end - 1, and valid_seen includes
    them. places int32 [P, 2 lag] and spreads float64 [P, 3, lag]: scratch of P = B * Hkv * ceil(block_size / lag)
    programs.
    """
    batch, heads, slots, _ = key.shape
    rank = torch.empty(batch, heads, end, dtype=torch.int64, device=key.device)
    with on_device_of(key):
        _rank(key, value, occupied, token_index, valid_seen, score, places, spreads, capacity, end, sinks, lag)
        order_kernel[(batch * heads * triton.cdiv(end, CHUNK),)](
            occupied, positions, token_index, valid_seen, score, rank, end, slots, sinks, lag, CHUNK=CHUNK,
            num_warps=4,
        )
    return rank


@rank_chunks.register_fake
def _(key: Tensor, end: int) -> Tensor:
    return key.new_empty((*key.shape[:2], end), dtype=torch.int64)


@operation(
    "kvtwin::lag_kv_finish_step",
    mutates_args=("key", "value", "occupied", "positions", "token_index", "score", "places", "spreads"),
)
def finish_step(
    key: Tensor, value: Tensor, occupied: Tensor, positions: Tensor, token_index: Tensor, valid_seen: Tensor,
    score: Tensor, places: Tensor, spreads: Tensor, budget: int, sinks: int, lag: int,
) -> None:
    """After a step whose token is in slot `budget` and counted in valid_seen: rank the chunk whose following chunk the
    token completes, and evict down to `budget` as `rank_chunks` and `ops.evict` would. Arguments as in `rank_chunks`.
    """
    batch, heads, slots, head_dim = key.shape
    chunk = 16 if SMALL_TILES else chunk_size(budget, 2048)
    with on_device_of(key):
        _rank(key, value, occupied, token_index, valid_seen, score, places, spreads, budget, budget + 1, sinks, lag)
        replace_kernel[(batch * heads,)](
            key, value, occupied, positions, token_index, valid_seen, score, slots, budget, lag, HEAD_DIM=head_dim,
            D_PAD=padded_head_dim(head_dim), CHUNK=chunk, num_warps=4 if chunk <= 1024 else 8,
        )


def _rank(
    key: Tensor, value: Tensor, occupied: Tensor, token_index: Tensor, valid_seen: Tensor, score: Tensor,
    places: Tensor, spreads: Tensor, capacity: int, end: int, sinks: int, lag: int,
) -> None:
    """Store the ranks of the chunks that a block completes. Arguments as in `rank_chunks`."""
    batch, heads, slots, head_dim = key.shape
    chunks = triton.cdiv(end - capacity, lag)                                  # that a block can complete
    rank_kernel[(batch * heads * chunks,)](
        key, value, occupied, token_index, valid_seen, score, places, spreads, capacity, end, slots, sinks, lag, chunks,
        HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), TOKENS=TOKENS, CHUNK=CHUNK, COMPARED=COMPARED, num_warps=4,
    )


@triton.jit
def _ranked_chunks(tokens, sinks, lag):
    """The number of a row's chunks whose following chunk is complete, after so many tokens."""
    return tl.maximum((tokens - sinks) // lag - 1, 0)


@triton.jit
def _tokens(source, place, t, count, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr):
    """The channels of tokens t, of which the first `count` exist, as float64 [TOKENS, D_PAD]; 0 for others."""
    d = tl.arange(0, D_PAD)
    slot = tl.load(place + t, mask=t < count, other=0).to(tl.int64)
    tile = (t < count)[:, None] & (d < HEAD_DIM)[None, :]
    return float32(tl.load(source + slot[:, None] * HEAD_DIM + d[None, :], mask=tile, other=0.0)).to(tl.float64)


@triton.jit
def _store_spreads(source, place, spreads, lag, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TOKENS: tl.constexpr):
    """Store the standard deviations of the chunk's tokens over their channels. In each channel, the range of the
    following chunk becomes 0 to 1; a channel that is constant there becomes 0. place: the slots of both chunks."""
    low = tl.full([D_PAD], float("inf"), tl.float64)
    high = tl.full([D_PAD], float("-inf"), tl.float64)
    for start in range(0, lag, TOKENS):
        t = start + tl.arange(0, TOKENS)
        x = _tokens(source, place + lag, t, lag, HEAD_DIM, D_PAD)
        low = tl.minimum(low, tl.min(tl.where((t < lag)[:, None], x, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where((t < lag)[:, None], x, float("-inf")), 0))
    varies = high > low
    width = tl.where(varies, high - low, 1.0)
    in_head = tl.arange(0, D_PAD) < HEAD_DIM
    for start in range(0, lag, TOKENS):
        t = start + tl.arange(0, TOKENS)
        x = _tokens(source, place, t, lag, HEAD_DIM, D_PAD)
        scaled = tl.where(varies[None, :], (x - low[None, :]) / width[None, :], 0.0)
        centred = tl.where(in_head[None, :], scaled - (tl.sum(scaled, 1) / HEAD_DIM)[:, None], 0.0)
        tl.store(spreads + t, tl.sqrt(tl.sum(centred * centred, 1) / (HEAD_DIM - 1)), mask=t < lag)


@triton.jit
def _log_sum(spreads, lag, CHUNK: tl.constexpr):
    """log sum exp of the chunk's spreads."""
    top = tl.full([CHUNK], 0.0, tl.float64)                            # no spread is negative
    for start in range(0, lag, CHUNK):
        t = start + tl.arange(0, CHUNK)
        top = tl.maximum(top, tl.load(spreads + t, mask=t < lag, other=0.0))
    highest = tl.max(top, 0)
    total = tl.zeros([CHUNK], tl.float64)
    for start in range(0, lag, CHUNK):
        t = start + tl.arange(0, CHUNK)
        total += tl.exp(tl.load(spreads + t, mask=t < lag, other=float("-inf")) - highest)
    return highest + tl.log(tl.sum(total, 0))


@triton.jit(do_not_specialize=["capacity", "end", "slots", "sinks", "lag", "chunks"])
def rank_kernel(
    key, value, occupied, token_index, valid_seen, score, places, spreads, capacity, end, slots, sinks, lag, chunks,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr, COMPARED: tl.constexpr,
):
    """Program (chunk, batch_head): the ranks of a chunk's tokens, if the block completes the chunk after it.

    A token's rank is the number of tokens with a lower score, and of earlier ones with an equal score. The score is the
    sum of two softmaxes, of which the logarithm does not underflow.
    """
    program = tl.program_id(0).to(tl.int64)
    batch_head = program // chunks
    base = batch_head * slots
    seen = tl.load(valid_seen + batch_head)
    before = seen - _valid_before(occupied + base + capacity, 1, end - capacity, COUNTED)
    number = _ranked_chunks(before, sinks, lag) + (program % chunks).to(tl.int32)
    if number < _ranked_chunks(seen, sinks, lag):
        place = places + program * 2 * lag
        spread = spreads + program * 3 * lag
        first = sinks + number * lag
        for start in range(0, end, CHUNK):
            s = start + tl.arange(0, CHUNK)
            there = tl.load(occupied + base + s, mask=s < end, other=0) != 0
            token = tl.load(token_index + base + s, mask=there, other=0) - first
            tl.store(place + token, s, mask=there & (token >= 0) & (token < 2 * lag))
        tl.debug_barrier()
        at = base * HEAD_DIM
        _store_spreads(key + at, place, spread, lag, HEAD_DIM, D_PAD, TOKENS)
        _store_spreads(value + at, place, spread + lag, lag, HEAD_DIM, D_PAD, TOKENS)
        tl.debug_barrier()
        of_keys, of_values = _log_sum(spread, lag, CHUNK), _log_sum(spread + lag, lag, CHUNK)
        for start in range(0, lag, CHUNK):
            t = start + tl.arange(0, CHUNK)
            keys = tl.load(spread + t, mask=t < lag, other=0.0) - of_keys
            values = tl.load(spread + lag + t, mask=t < lag, other=0.0) - of_values
            more, less = tl.maximum(keys, values), tl.minimum(keys, values)
            tl.store(spread + 2 * lag + t, more + tl.log(1.0 + tl.exp(less - more)), mask=t < lag)
        tl.debug_barrier()
        for start in range(0, lag, COMPARED):
            i = start + tl.arange(0, COMPARED)
            own = tl.load(spread + 2 * lag + i, mask=i < lag, other=0.0)
            # Lanes may have parted in divisions and roots of float64. Ranks of 32 bits would pass between lanes by an
            # instruction of whole warps (ldmatrix).
            rank = tl.zeros([COMPARED], tl.int64)
            for from_token in range(0, lag, CHUNK):
                j = from_token + tl.arange(0, CHUNK)
                other = tl.load(spread + 2 * lag + j, mask=j < lag, other=float("inf"))
                earlier = (other[None, :] == own[:, None]) & (j[None, :] < i[:, None])
                rank += tl.sum(tl.where((other[None, :] < own[:, None]) | earlier, 1, 0).to(tl.int64), 1)
            slot = tl.load(place + i, mask=i < lag, other=0)
            tl.store(score + base + slot, rank.to(tl.float32), mask=i < lag)


@triton.jit(do_not_specialize=["end", "slots", "sinks", "lag"])
def order_kernel(
    occupied, positions, token_index, valid_seen, score, rank, end, slots, sinks, lag, CHUNK: tl.constexpr
):
    """Program (CHUNK slots, batch_head): the order of eviction, and `lag` as the score of tokens without a rank."""
    blocks = tl.cdiv(end, CHUNK)
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    s = (tl.program_id(0) % blocks) * CHUNK + tl.arange(0, CHUNK)
    at = batch_head * slots + s
    there = tl.load(occupied + at, mask=s < end, other=0) != 0
    token = tl.load(token_index + at, mask=there, other=0)
    ranked = sinks + _ranked_chunks(tl.load(valid_seen + batch_head), sinks, lag) * lag
    known = tl.load(score + at, mask=there, other=0.0)
    found = tl.where((token >= sinks) & (token < ranked), known, lag.to(tl.float32))
    tl.store(score + at, found, mask=there)
    position = tl.load(positions + at, mask=there, other=0)
    tl.store(rank + batch_head * end + s, (found.to(tl.int64) << 31) + position, mask=s < end)


@triton.jit
def _victim(score, token_index, budget, CHUNK: tl.constexpr):
    """The slot of a full cache whose token is evicted: that of the lowest rank, of equal ranks that of the oldest.

    Sinks and tokens without a rank need no check. Their score is `lag`, above every rank. With the new token there are
    more than sinks + 2 lag - 1 tokens, so at least one has a rank.
    """
    lowest = tl.full([CHUNK], _NEVER, tl.int64)
    slot = tl.full([CHUNK], 0, tl.int32)
    for start in range(0, budget, CHUNK):
        s = start + tl.arange(0, CHUNK)
        rank = tl.load(score + s, mask=s < budget, other=0.0).to(tl.int64)
        # The index of a token among those of its row orders them like the position, and takes half the memory.
        code = (rank << 31) + tl.load(token_index + s, mask=s < budget, other=0)
        code = tl.where(s < budget, code, _NEVER)
        slot = tl.where(code < lowest, s, slot)
        lowest = tl.minimum(lowest, code)
    return tl.max(tl.where(lowest == tl.min(lowest, 0), slot, 0), 0)


@triton.jit(do_not_specialize=["slots", "budget", "lag"])
def replace_kernel(
    key, value, occupied, positions, token_index, valid_seen, score, slots, budget, lag,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, CHUNK: tl.constexpr,
):
    """Program batch_head: moves a step's token from slot `budget` to the first free slot, or in a full cache to that of
    the evicted token. Its score becomes `lag`, since the chunk after its own is incomplete.

    As in `step_kernel`, a head's tokens are in its first slots, as many as the row has seen and at most `budget`.
    """
    batch_head = tl.program_id(0).to(tl.int64)
    base = batch_head * slots
    source = base + budget
    d = tl.arange(0, D_PAD)
    in_head = d < HEAD_DIM
    # The new token is read first, so that these loads do not wait for the search.
    new_key = tl.load(key + source * HEAD_DIM + d, mask=in_head)
    new_value = tl.load(value + source * HEAD_DIM + d, mask=in_head)
    position, number = tl.load(positions + source), tl.load(token_index + source)
    slot = tl.load(valid_seen + batch_head) - 1                        # the number of tokens before this one
    if slot >= budget:
        slot = _victim(score + base, token_index + base, budget, CHUNK)
    tl.debug_barrier()                                                 # every thread has read the old slot
    goal = base + slot
    tl.store(key + goal * HEAD_DIM + d, new_key, mask=in_head)
    tl.store(value + goal * HEAD_DIM + d, new_value, mask=in_head)
    tl.store(occupied + goal, 1)
    tl.store(positions + goal, position)
    tl.store(token_index + goal, number)
    tl.store(score + goal, lag.to(tl.float32))
    tl.store(occupied + source, 0)
    tl.store(positions + source, -1)
    tl.store(score + source, float("-inf"))
