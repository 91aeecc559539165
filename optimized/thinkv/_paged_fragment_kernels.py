"""Attention over a paged cache that reads all formats as fragments, the elements of a tensor core's operands that each
lane of a warp holds. For blocks of 8 slots, up to 8 query heads per KV head, and float16 or bfloat16.

A program is one warp, so only elements of S and P pass between lanes, and many programs share a multiprocessor, each
waiting for its own loads. The products are transposed, S^T = K q^T and O^T += V^T P^T, since the large dimensions,
tokens and channels, must be the side of 16, and query heads the side of 8. Words are decoded as in `_paging_decode.py`;
one instruction computes two float16 products. The arithmetic is that of `_paged_attention_kernels.py`.

Sums over channels and tokens can run in any order, if both operands use the same. Words in memory (see
`_paging_layout.py`) are fragments if the k-th channel is `_channel_of_key(k)`. Tokens are ordered by pair of blocks,
then pair of slots, block of the pair, slot of the pair. Row m of O^T is channel `_channel_of_value(m)`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.launch import INTERPRETED
from .._common.numerics import dot, round_to
from .._common.prefetch import LINE, prefetch
from .._common.scratch import row_of
from .._common.softmax import weigh_columns
from ._paged_attention_kernels import blocks_by_format, halved, heads_with_sparsity
from ._paging_decode import high, low, pair
from ._paging_kernels import COUNTS

_INTERPRETED = tl.constexpr(INTERPRETED)
#: Slots of a block, and the side of query heads in a product.
EIGHT = tl.constexpr(8)
_SCALES = tl.constexpr(0x7F807F80)


@triton.jit
def _times(a, b):
    """Element-wise products of pairs of float16."""
    if _INTERPRETED:
        lower = (low(a) * low(b)).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        upper = (high(a) * high(b)).to(tl.int16, bitcast=True).to(tl.int32) << 16
        return lower | upper
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _channel_of_key(k, HEAD_DIM: tl.constexpr):
    return k % 4 + 4 * (k // 16) + HEAD_DIM // 4 * (k // 4 % 4)


@triton.jit
def _channel_of_value(m, HEAD_DIM: tl.constexpr):
    return m % 8 * (HEAD_DIM // 8) + m // 8


@triton.jit
def _unpack_4_pairs(a, b, c, d):
    """The elements of pairs J = 2 j + i and halves h of words: [..., i, j, h] float16."""
    y = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.join(low(y), high(y))


@triton.jit
def _unpack_8_pairs(a, b, c, d, e, f, g, h):
    """As `_unpack_4_pairs`, with J = 4 l + 2 j + i: [..., i, j, l, h]."""
    y = tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))
    return tl.join(low(y), high(y))


@triton.jit
def _keys(word, w, x, y, z, FORMAT: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, TILE: tl.constexpr):
    """K [TILE, D] float16 from words [TILE, 4 * RUN] and their LANES words of scales: w, x and, if 4, y, z."""
    s0, s1, s2, s3 = (w << 7) & _SCALES, (w >> 1) & _SCALES, (x << 7) & _SCALES, (x >> 1) & _SCALES
    a, b, c, d = pair(word, 0, FORMAT), pair(word, 1, FORMAT), pair(word, 2, FORMAT), pair(word, 3, FORMAT)
    a, b, c, d = _times(a, s0), _times(b, s1), _times(c, s2), _times(d, s3)
    if LANES == 2:
        k = tl.reshape(_unpack_4_pairs(a, b, c, d), (TILE, 4, RUN, 2, 2, 2))   # token, lane, word, i, j, h
        k = tl.permute(k, (0, 2, 4, 1, 3, 5))
    else:
        e = _times(pair(word, 4, FORMAT), (y << 7) & _SCALES)
        f = _times(pair(word, 5, FORMAT), (y >> 1) & _SCALES)
        g = _times(pair(word, 6, FORMAT), (z << 7) & _SCALES)
        h = _times(pair(word, 7, FORMAT), (z >> 1) & _SCALES)
        k = tl.reshape(_unpack_8_pairs(a, b, c, d, e, f, g, h), (TILE, 4, RUN, 2, 2, 2, 2))
        k = tl.permute(k, (0, 2, 5, 4, 1, 3, 6))
    return tl.reshape(k, (TILE, 16 * LANES * RUN))


@triton.jit
def _values(word, two, FORMAT: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, BLOCKS: tl.constexpr):
    """V^T [D, TILE] float16 from words [BLOCKS, 32 * RUN] and their halves' scales, `two` bytes [BLOCKS, 32] each."""
    s = ((two << 7) & 0x7F80) | ((two << 15) & 0x7F800000)
    s = tl.reshape(tl.broadcast_to(s[:, :, None], (BLOCKS, 32, RUN)), (BLOCKS, 32 * RUN))
    a, b, c, d = pair(word, 0, FORMAT), pair(word, 1, FORMAT), pair(word, 2, FORMAT), pair(word, 3, FORMAT)
    a, b, c, d = _times(a, s), _times(b, s), _times(c, s), _times(d, s)
    if LANES == 2:                                     # two blocks, block, run, lane, word, i, j, h
        v = tl.reshape(_unpack_4_pairs(a, b, c, d), (BLOCKS // 2, 2, 8, 4, RUN, 2, 2, 2))
        v = tl.permute(v, (4, 6, 5, 2, 0, 3, 1, 7))
    else:
        e, f = _times(pair(word, 4, FORMAT), s), _times(pair(word, 5, FORMAT), s)
        g, h = _times(pair(word, 6, FORMAT), s), _times(pair(word, 7, FORMAT), s)
        v = tl.reshape(_unpack_8_pairs(a, b, c, d, e, f, g, h), (BLOCKS // 2, 2, 8, 4, RUN, 2, 2, 2, 2))
        v = tl.permute(v, (4, 7, 6, 5, 2, 0, 3, 1, 8))
    return tl.reshape(v, (16 * LANES * RUN, BLOCKS * 8))


@triton.jit
def _indices(order, physical, slot_groups, tile, count, BLOCKS: tl.constexpr):
    """A tile's physical blocks [BLOCKS], clamped to the list, the scale groups of its slots, -1 for none, and the
    blocks of its slots, 0 beyond the list."""
    i, block = tl.arange(0, BLOCKS * EIGHT), tl.arange(0, BLOCKS)
    rank = i // EIGHT + tile * BLOCKS
    entry = tl.load(order + rank, mask=rank < count, other=0)
    group = tl.load(slot_groups + entry * EIGHT + i % EIGHT, mask=rank < count, other=-1)
    block_rank = tl.maximum(tl.minimum(block + tile * BLOCKS, count - 1), 0)
    of_slots = tl.load(physical + entry, mask=rank < count, other=0).to(tl.int32)
    return tl.load(physical + tl.load(order + block_rank)).to(tl.int32), group, of_slots


@triton.jit
def _attend_fragments(
    acc, row_max, weight_sum, q, factor, words, halves, key_scales, physical, slot_groups, order, logits,
    kept, first, count, split, splits, row_at, base, h, heads,
    FORMAT: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, GROUP_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, TILE: tl.constexpr,
):
    """As `_paged_attention_kernels._attend_blocks`: q [D, 8], acc [D, 8]. Logits of unoccupied slots are masked, and
    their values, which are finite, are multiplied by 0. Indices of blocks are loaded one tile ahead, and what they
    point to is prefetched. To load it a tile ahead would need more registers, and fewer programs would run at a time.
    """
    BLOCKS: tl.constexpr = TILE // EIGHT
    RUN: tl.constexpr = HEAD_DIM // (16 * LANES)
    RECORD: tl.constexpr = EIGHT * 8 * RUN + (EIGHT * ((HEAD_DIM + GROUP - 1) // GROUP) + 3) // 4
    SCALES: tl.constexpr = HEAD_DIM // 4
    WORDS: tl.constexpr = LINE // 4
    i, head = tl.arange(0, TILE), tl.arange(0, EIGHT)
    n, f, lane = tl.arange(0, 4 * RUN), tl.arange(0, 32 * RUN), tl.arange(0, 32)
    scales_of_lane = lane if GROUP == HEAD_DIM // 8 else lane // 4 * (HEAD_DIM // 8) // GROUP * 4 + lane % 4
    words += row_at + base + h * RECORD
    halves += (row_at + base + h * RECORD) * 2
    tiles = (count + BLOCKS - 1) // BLOCKS
    each = (tiles + splits - 1) // splits
    begin = split * each
    order += first
    logits += first * EIGHT * GROUP_HEADS
    block, group, _ = _indices(order, physical, slot_groups, begin, count, BLOCKS)
    for tile in range(begin, tl.minimum(begin + each, tiles)):
        at = block * (heads * RECORD)
        codes = words + (at[:, None] + f[None, :])
        word = tl.reshape(tl.load(codes), (TILE, 4 * RUN))
        value_word = tl.load(codes + 32 * RUN)
        scales = key_scales + ((tl.maximum(group, 0) * (heads * SCALES))[:, None] + n[None, :])
        w, x = tl.load(scales), tl.load(scales + 4 * RUN)
        if LANES == 4:
            y, z = tl.load(scales + 8 * RUN), tl.load(scales + 12 * RUN)
        else:
            y, z = w, x
        two = tl.load(halves + ((at * 2)[:, None] + (128 * RUN + scales_of_lane)[None, :])).to(tl.int32)
        live = group >= 0
        block, group, of_slots = _indices(order, physical, slot_groups, tile + 1, count, BLOCKS)
        k = _keys(word, w, x, y, z, FORMAT, LANES, RUN, TILE)
        logit = tl.dot(k, q, input_precision="ieee") * factor[None, :]                 # [TILE, 8]
        # Each of a block's eight slots prefetches every eighth line of the block's record. The last word of the record
        # is for one that does not start with a line.
        for line in tl.static_range(0, RECORD, EIGHT * WORDS):
            place = tl.minimum(line + i % EIGHT * WORDS, RECORD - 1)
            prefetch(words + (of_slots * (heads * RECORD) + place))
        prefetch(key_scales + tl.maximum(group, 0) * (heads * SCALES))
        if kept > 0:
            inside = (head < kept)[None, :] & (i < (count - tile * BLOCKS) * EIGHT)[:, None]
            tl.store(
                logits + (i + tile * TILE)[:, None] * GROUP_HEADS + head[None, :],
                tl.where(live[:, None], logit, float("inf")), mask=inside,
            )
        logit = tl.where(live[:, None], logit, float("-inf"))
        p, row_max, weight_sum, rescale = weigh_columns(row_max, weight_sum, logit, TILE, EIGHT)
        v = _values(value_word, two, FORMAT, LANES, RUN, BLOCKS)
        p = tl.reshape((p * UNIT).to(tl.float16), (BLOCKS // 2, 2, 4, 2, EIGHT))
        p = tl.reshape(tl.permute(p, (0, 2, 1, 3, 4)), (TILE, EIGHT))
        acc = tl.dot(v, p, acc * rescale[None, :], input_precision="ieee")
    return acc, row_max, weight_sum


@triton.jit
def _attend_buffer(
    acc, row_max, weight_sum, q, scale, buffer_key, buffer_value, logits, kept, at, count,
    GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TOKENS: tl.constexpr,
):
    """As `_paged_attention_kernels._attend_buffer`: q [D, 8], acc [D, 8]."""
    i, k, head = tl.arange(0, TOKENS), tl.arange(0, HEAD_DIM), tl.arange(0, EIGHT)
    live = i < count
    key = tl.load(
        buffer_key + i[:, None] * HEAD_DIM + _channel_of_key(k, HEAD_DIM)[None, :], mask=live[:, None], other=0.0
    )
    logit = tl.where(live[:, None], dot(key, q) * scale, float("-inf"))
    tl.store(
        logits + (at + i)[:, None] * GROUP_HEADS + head[None, :], logit,
        mask=live[:, None] & (head < kept)[None, :],
    )
    p, row_max, weight_sum, rescale = weigh_columns(row_max, weight_sum, logit, TOKENS, EIGHT)
    value = tl.load(
        buffer_value + i[None, :] * HEAD_DIM + _channel_of_value(k, HEAD_DIM)[:, None], mask=live[None, :], other=0.0
    )
    return acc * rescale[None, :] + dot(value, round_to(p, value.dtype)), row_max, weight_sum


@triton.jit(do_not_specialize=["heads", "slots", "entries", "groups", "num_partials", "query_b", "query_h"])
def fragment_kernel(
    query, words, halves, key_scales, buffer_key, buffer_value, slot_groups, physical, order, counts, buffered,
    sparsity_mask, logits, partial, row_maxima, weight_sums,
    scale, heads, slots, entries, groups, num_partials, row_words, base_0, base_1, base_2, query_b, query_h, query_d,
    OF_T: tl.constexpr, OF_E: tl.constexpr, OF_R: tl.constexpr,
    FORMAT_0: tl.constexpr, FORMAT_1: tl.constexpr, FORMAT_2: tl.constexpr,
    LANES_0: tl.constexpr, LANES_1: tl.constexpr, LANES_2: tl.constexpr,
    UNIT_0: tl.constexpr, UNIT_1: tl.constexpr, UNIT_2: tl.constexpr,
    GROUP_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
    HAS_SPARSITY_MASK: tl.constexpr,
):
    """Replaces `_paged_attention_kernels.attend_kernel`, except that the buffer is a part of its own, the last one. In
    another part, it would take registers from the tiles. Programs for buffers come last: they are short, and between
    the others they would leave multiprocessors unevenly filled."""
    splits = num_partials - 1
    whole = tl.num_programs(0) // num_partials * splits
    buffers = tl.program_id(0) >= whole
    part = tl.where(buffers, splits, tl.program_id(0) % splits)
    batch_head = tl.where(buffers, tl.program_id(0) - whole, tl.program_id(0) // splits).to(tl.int64)
    b, h = batch_head // heads, batch_head % heads
    head, k = tl.arange(0, EIGHT), tl.arange(0, HEAD_DIM)
    at = b * query_b + (h * GROUP_HEADS + head)[None, :] * query_h
    at += _channel_of_key(k, HEAD_DIM).to(tl.int64)[:, None] * query_d
    native = tl.load(query + at, mask=(head < GROUP_HEADS)[None, :], other=0.0)
    logits += batch_head * row_of(slots) * GROUP_HEADS
    kept = heads_with_sparsity(sparsity_mask, b, GROUP_HEADS, HAS_SPARSITY_MASK)
    zero, one, two = blocks_by_format(counts + b * COUNTS, OF_T, OF_E, OF_R)
    acc = tl.zeros([HEAD_DIM, EIGHT], tl.float32)
    row_max = tl.full([EIGHT], float("-inf"), tl.float32)
    weight_sum = tl.zeros([EIGHT, EIGHT], tl.float32)
    if part < splits:
        q, factor = halved(native, 0, EIGHT)
        factor *= scale
        physical += b * entries
        order += b * entries
        slot_groups += b * slots
        key_scales += (b * groups * heads + h) * (HEAD_DIM // 4)
        acc, row_max, weight_sum = _attend_fragments(
            acc, row_max, weight_sum, q, factor * UNIT_0, words, halves, key_scales, physical, slot_groups, order,
            logits, kept, 0, zero, part, splits, b * row_words, base_0, h, heads,
            FORMAT_0, LANES_0, UNIT_0, GROUP_HEADS, GROUP, HEAD_DIM, TILE,
        )
        if FORMAT_1 != "":
            acc, row_max, weight_sum = _attend_fragments(
                acc, row_max, weight_sum, q, factor * UNIT_1, words, halves, key_scales, physical, slot_groups, order,
                logits, kept, zero, one, part, splits, b * row_words, base_1, h, heads,
                FORMAT_1, LANES_1, UNIT_1, GROUP_HEADS, GROUP, HEAD_DIM, TILE,
            )
        if FORMAT_2 != "":
            acc, row_max, weight_sum = _attend_fragments(
                acc, row_max, weight_sum, q, factor * UNIT_2, words, halves, key_scales, physical, slot_groups, order,
                logits, kept, zero + one, two, part, splits, b * row_words, base_2, h, heads,
                FORMAT_2, LANES_2, UNIT_2, GROUP_HEADS, GROUP, HEAD_DIM, TILE,
            )
    else:
        waiting = tl.load(buffered + b)
        if waiting > 0:
            acc, row_max, weight_sum = _attend_buffer(
                acc, row_max, weight_sum, native, scale, buffer_key + batch_head * GROUP * HEAD_DIM,
                buffer_value + batch_head * GROUP * HEAD_DIM, logits, kept, (zero + one + two) * EIGHT, waiting,
                GROUP_HEADS, HEAD_DIM, TOKENS,
            )
    to = (batch_head * GROUP_HEADS + head) * num_partials + part
    valid = head < GROUP_HEADS
    tl.store(row_maxima + to, row_max, mask=valid)
    tl.store(weight_sums + to, tl.sum(weight_sum, 0), mask=valid)
    tl.store(partial + to[None, :] * HEAD_DIM + _channel_of_value(k, HEAD_DIM)[:, None], acc, mask=valid[None, :])
