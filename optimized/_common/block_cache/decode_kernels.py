"""The decode step of the block cache: attention of one new token, update of the scores, and the choice of its slot.

`step_kernel` runs split-KV attention for all heads of a group and stores the logits. The last program of each (row, KV
head) merges the splits. With FUSED it also finishes the head: it turns logits into weights, scores and ranks, picks a
slot, and writes the new token into it. Otherwise, with few heads and many slots, `finish_kernel` splits this work among
programs. Until the new token has a slot, it is read from the caller's tensors; its logit is stored behind the cache's.

Buffers are as in `evict_kernels.py`; the slots per row are divided by UNIT, which tells the compiler the alignment.
With GROWS, `budget` is the most tokens that a head may hold before this one and `counts` is how many it holds; the new
token takes the next slot, and the caller evicts, with rules that need logits by the `ranks` that they store.
sink_logits: see `softmax.begin`. Scratch is indexed by batch_head or by query head; logits [batch_heads, padded,
GROUP_PAD] are in base 2. With PAGE > 0, keys and values lie in pages of PAGE slots: see `paged_rows.py`. Otherwise what
describes pages is None.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import SMALL_TILES
from ..numerics import dot, round_output, round_to, scaled_logit
from ..paged_rows import offset, tile
from ..scratch import is_last
from ..softmax import begin as begin_softmax
from ..softmax import merge_outputs, weigh_tile
from .score_kernels import (
    ACTIVATE,
    APPEND,
    NOTHING,
    RANDOM,
    RENEW,
    new_activation,
    new_score_of,
    normalise,
    score_slots,
    slot_of,
)

_NEVER = tl.constexpr(2**63 - 1)
_INDEX = tl.constexpr(2**32 - 1)
#: Candidates of blocks that are compared at a time. In the interpreter, each alone, so that tests cover several rounds.
_COMPARED = tl.constexpr(1 if SMALL_TILES else 64)


@triton.jit
def _tile(
    q, k, v, acc, row_max, weight_sum, logits, s, inside, scale, softcap,
    GROUP_PAD: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr, KEEP: tl.constexpr,
):
    """One tile of an online softmax: ROWS queries times k [BLOCK, D]. KEEP: store the logits of GROUP_PAD queries."""
    row = tl.arange(0, ROWS)
    logit = scaled_logit(dot(q, tl.trans(k)), scale, softcap)          # [ROWS, BLOCK]
    valid = (row < GROUP_PAD)[:, None]
    if MASKED:
        logit = tl.where(inside[None, :], logit, float("-inf"))
        valid = valid & inside[None, :]
    if KEEP:
        # These lines are read again soon, unlike keys and values: keep them in the cache.
        tl.store(logits + s[None, :] * GROUP_PAD + row[:, None], logit, mask=valid, eviction_policy="evict_last")
    p, row_max, weight_sum, rescale = weigh_tile(logit, row_max, weight_sum)
    acc = acc * rescale[:, None] + dot(round_to(p, v.dtype), v)
    return acc, row_max, weight_sum


@triton.jit
def _attend_share(
    q, row_max, weight_sum, key, value, new_key, new_value, logits, scale, softcap, begin, end, budget, arrives,
    new_key_d, new_value_d, pages, key_p, key_s, key_d, value_p, value_s, value_d, pages_s,
    GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    KEEP: tl.constexpr, PAGE: tl.constexpr,
):
    """Attend to slots begin to end, all occupied, and, if `arrives`, to the new token. Pointers are at the row."""
    d = tl.arange(0, D_PAD)
    i = tl.arange(0, BLOCK)
    in_head = (d < HEAD_DIM)[None, :]
    # One pointer per tile plus constant offsets: 64-bit pointers per element would fill the registers.
    at = i[:, None] * HEAD_DIM + d[None, :]
    acc = tl.full([ROWS, D_PAD], 0.0, tl.float32)
    whole = begin + tl.maximum(end - begin, 0) // BLOCK * BLOCK
    for start in range(begin, whole, BLOCK):
        keys = key + tl.cast(start, tl.int64) * HEAD_DIM
        values = value + tl.cast(start, tl.int64) * HEAD_DIM
        if PAGE:
            k, v = tile(
                key, value, pages, start, end, key_p, key_s, key_d, value_p, value_s, value_d, pages_s,
                BLOCK, HEAD_DIM, D_PAD, PAGE, False,
            )
        elif HEAD_DIM == D_PAD:
            k = tl.load(keys + at)
            v = tl.load(values + at)
        else:
            k = tl.load(keys + at, mask=in_head, other=0.0)
            v = tl.load(values + at, mask=in_head, other=0.0)
        acc, row_max, weight_sum = _tile(
            q, k, v, acc, row_max, weight_sum, logits, start + i, i < BLOCK, scale, softcap, GROUP_PAD, ROWS, False,
            KEEP,
        )
    if whole < end:
        inside = whole + i < end
        keys = key + tl.cast(whole, tl.int64) * HEAD_DIM
        values = value + tl.cast(whole, tl.int64) * HEAD_DIM
        if PAGE:
            k, v = tile(
                key, value, pages, whole, end, key_p, key_s, key_d, value_p, value_s, value_d, pages_s,
                BLOCK, HEAD_DIM, D_PAD, PAGE, True,
            )
        else:
            k = tl.load(keys + at, mask=inside[:, None] & in_head, other=0.0)
            v = tl.load(values + at, mask=inside[:, None] & in_head, other=0.0)
        acc, row_max, weight_sum = _tile(
            q, k, v, acc, row_max, weight_sum, logits, whole + i, inside, scale, softcap, GROUP_PAD, ROWS, True,
            KEEP,
        )
    if arrives:
        # In a tile of its own, so that a duplicate of the new token gets a bitwise-equal logit.
        first = (i == 0)[:, None] & in_head
        k = tl.load(new_key + i[:, None] * 0 + d[None, :] * new_key_d, mask=first, other=0.0)
        v = tl.load(new_value + i[:, None] * 0 + d[None, :] * new_value_d, mask=first, other=0.0)
        acc, row_max, weight_sum = _tile(
            q, k, v, acc, row_max, weight_sum, logits, budget + i, i == 0, scale, softcap, GROUP_PAD, ROWS, True,
            KEEP,
        )
    return acc, row_max, weight_sum


@triton.jit
def _merge(
    partial, row_maxima, output, batch_head, splits, row_max, total,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
):
    """The output of all heads of a group, merged from their splits one by one."""
    d = tl.arange(0, D_PAD)
    g = tl.arange(0, GROUP_PAD)
    head = batch_head * GROUP + g
    out = merge_outputs(partial, row_maxima, head * splits, splits, row_max, total, g < GROUP, HEAD_DIM, D_PAD)
    mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(output + head[:, None] * HEAD_DIM + d[None, :], round_output(out, output.dtype.element_ty), mask=mask)


@triton.jit
def _merge_head(
    partial, row_maxima, normalisers, output, head, splits,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr,
):
    """The output of one query head, merged from many splits at once."""
    i = tl.arange(0, SPLITS)
    d = tl.arange(0, D_PAD)
    part = head * splits + i
    share = tl.exp2(
        tl.load(row_maxima + part, mask=i < splits, other=float("-inf")) - tl.load(normalisers + head * 2)
    )
    mask = (i < splits)[:, None] & (d < HEAD_DIM)[None, :]
    acc = tl.sum(tl.load(partial + part[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0) * share[:, None], 0)
    total = tl.load(normalisers + head * 2 + 1)
    out = tl.where(total == 0.0, 0.0, acc / tl.where(total == 0.0, 1.0, total))
    tl.store(output + head * HEAD_DIM + d, round_output(out, output.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def _size_of(new_value, new_value_d, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr):
    """||v||_1 of the new token."""
    d = tl.arange(0, D_PAD)
    return tl.sum(tl.abs(tl.load(new_value + d * new_value_d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)), 0)


@triton.jit
def _take_slot(
    new_key, new_value, key, value, occupied, positions, score, token_index, carried, valid_seen,
    slot, position, number, new_score, size, takes, new_key_d, new_value_d,
    pages, key_p, key_s, key_d, value_p, value_s, value_d, pages_s,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, RULE: tl.constexpr, MAGNITUDE: tl.constexpr, PAGE: tl.constexpr,
):
    """Write the new token into its slot, if it `takes` one, and count it in `valid_seen`. Pointers are at the row."""
    d = tl.arange(0, D_PAD).to(tl.int64)
    in_head = d < HEAD_DIM
    at = slot.to(tl.int64)
    if takes:
        if PAGE:
            key_at = key + offset(pages, at, key_p, key_s, pages_s, PAGE) + d * key_d
            value_at = value + offset(pages, at, value_p, value_s, pages_s, PAGE) + d * value_d
            tl.store(key_at, tl.load(new_key + d * new_key_d, mask=in_head), mask=in_head)
            tl.store(value_at, tl.load(new_value + d * new_value_d, mask=in_head), mask=in_head)
        else:
            tl.store(key + at * HEAD_DIM + d, tl.load(new_key + d * new_key_d, mask=in_head), mask=in_head)
            tl.store(value + at * HEAD_DIM + d, tl.load(new_value + d * new_value_d, mask=in_head), mask=in_head)
        tl.store(occupied + at, 1)
        tl.store(positions + at, position)
        tl.store(score + at, new_score)
        tl.store(token_index + at, number)
        if MAGNITUDE:
            tl.store(carried + at, size)
        if RULE == ACTIVATE:
            tl.store(carried + at, new_activation(new_score, position))
    tl.store(valid_seen, number + 1)


@triton.jit
def _remember(
    query, window_query, window_positions, position, b, k_head, heads, observers, query_b, query_h, query_d,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
):
    """Write the group's queries into the window, a ring [B, Hq, observers, D], in place of the oldest."""
    row = tl.arange(0, ROWS)
    d = tl.arange(0, D_PAD).to(tl.int64)
    mask = (row < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    head = (k_head * GROUP + row)[:, None]
    place = position % observers
    q = tl.load(query + b * query_b + head * query_h + d[None, :] * query_d, mask=mask, other=0.0)
    tl.store(window_query + ((b * heads * GROUP + head) * observers + place) * HEAD_DIM + d[None, :], q, mask=mask)
    tl.store(window_positions + b * observers + place, position)       # every head of the row writes the same


@triton.jit
def _count_row(completion_counters, seen, rows):
    """The last (row, KV head) increments `seen`, when no program reads it any more."""
    if is_last(completion_counters + rows, rows):
        tl.store(seen, tl.load(seen) + 1)


_SIZES = [
    "budget", "slots", "padded", "share", "splits", "blocks", "heads", "rows", "sinks", "recent", "offset", "observers",
    "query_b",
    "query_h", "new_key_b", "new_key_h", "new_value_b", "new_value_h",
]


@triton.jit(do_not_specialize=_SIZES)
def step_kernel(
    query, new_key, new_value, key, value, occupied, positions, score, token_index, carried, valid_seen, seen,
    output, logits, partial, row_maxima, weight_sums, normalisers, completion_counters, counts, ranks, window_query,
    window_positions, sink_logits, scale, softcap, alpha, budget, slots, padded, share, splits, heads, rows, sinks,
    recent, offset, observers,
    query_b, query_h, query_d, new_key_b, new_key_h, new_key_d, new_value_b, new_value_h, new_value_d,
    pages, pages_b, pages_s, key_p, key_h, key_s, key_d, value_p, value_h, value_s, value_d,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, UNIT: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, RULE: tl.constexpr,
    MAGNITUDE: tl.constexpr, PROTECTS: tl.constexpr, GROWS: tl.constexpr, FUSED: tl.constexpr, DISCARD: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Program (split, batch_head): attends to `share` tiles of a head's slots. The last program of a batch_head merges
    the splits.

    With FUSED it also finishes the head. Other programs still read keys then, and most logits never leave the cache.
    """
    # One grid axis, since the other axes are limited to 65,535 programs.
    split = tl.program_id(0) % splits
    batch_head = (tl.program_id(0) // splits).to(tl.int64)
    b, k_head = batch_head // heads, batch_head % heads
    d = tl.arange(0, D_PAD).to(tl.int64)
    row = tl.arange(0, ROWS)
    at = batch_head * (slots * UNIT)
    new_key += b * new_key_b + k_head * new_key_h
    new_value += b * new_value_b + k_head * new_value_h
    if PAGE:
        pages += b * pages_b
        key += k_head * key_h
        value += k_head * value_h
    else:
        key += at * HEAD_DIM
        value += at * HEAD_DIM
    logits += batch_head * (padded * 16) * GROUP_PAD
    number = tl.load(valid_seen + batch_head)                          # valid tokens before this one
    tokens = tl.minimum(number, budget)                                # in the cache
    if GROWS:
        tokens = tl.load(counts + batch_head)
    mask = (row < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    head = (k_head * GROUP + row)[:, None]
    q = tl.load(query + b * query_b + head * query_h + d[None, :] * query_d, mask=mask, other=0.0)
    begin = split * share * BLOCK
    row_max, weight_sum = begin_softmax(sink_logits, k_head * GROUP + row, (row < GROUP) & (split == 0), ROWS)
    acc, row_max, weight_sum = _attend_share(
        q, row_max, weight_sum, key, value, new_key, new_value, logits, scale, softcap, begin,
        tl.minimum(begin + share * BLOCK, tokens), budget,
        split == splits - 1, new_key_d, new_value_d,
        pages, key_p, key_s, key_d, value_p, value_s, value_d, pages_s,
        GROUP_PAD, HEAD_DIM, D_PAD, ROWS, BLOCK, RULE < RANDOM and RULE != NOTHING, PAGE,
    )
    part = (batch_head * GROUP + row) * splits + split
    tl.store(row_maxima + part, row_max, mask=row < GROUP)
    tl.store(weight_sums + part, weight_sum, mask=row < GROUP)
    tl.store(partial + part[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)
    if is_last(completion_counters + batch_head, splits):
        shift, total = normalise(row_maxima, weight_sums, normalisers, batch_head, splits, GROUP, GROUP_PAD, SPLITS)
        if FUSED:
            _merge(partial, row_maxima, output, batch_head, splits, shift, total, GROUP, GROUP_PAD, HEAD_DIM, D_PAD)
            score += at
            token_index += at
            carried += at
            new_score = new_score_of(seen, offset, RULE)
            slot = budget
            size = 0.0
            now = 0
            if RULE == ACTIVATE:
                now = tl.load(seen)
            if MAGNITUDE:
                size = _size_of(new_value, new_value_d, HEAD_DIM, D_PAD)
            if RULE != NOTHING and RULE != APPEND:
                best, new_score = score_slots(
                    logits, score, token_index, carried, ranks + at, shift, total, 0, (budget + 16) // 16 * 16,
                    tokens, number, budget, new_score, size, now, sinks, recent, alpha, offset, padded * 16,
                    GROUP, GROUP_PAD, UNIT, CHUNK, RULE, MAGNITUDE, PROTECTS, GROWS, DISCARD,
                )
                lowest = (best & _INDEX).to(tl.int32)
                if RULE == RENEW and not GROWS:
                    lowest = slot_of(token_index, lowest, tokens, budget, CHUNK)
                slot = tl.where(tokens < budget, tokens, lowest)
            if GROWS:
                slot = tokens
            _take_slot(
                new_key, new_value, key, value, occupied + at, positions + at, score, token_index, carried,
                valid_seen + batch_head, slot, tl.load(seen), number, new_score, size,
                (slot < budget) | (RULE == NOTHING) | GROWS, new_key_d, new_value_d,
                pages, key_p, key_s, key_d, value_p, value_s, value_d, pages_s,
                HEAD_DIM, D_PAD, RULE, MAGNITUDE, PAGE,
            )
            if GROWS:
                tl.store(counts + batch_head, tokens + 1)
            if RULE == APPEND:
                _remember(
                    query, window_query, window_positions, tl.load(seen), b, k_head, heads, observers,
                    query_b, query_h, query_d, GROUP, HEAD_DIM, D_PAD, ROWS,
                )
            _count_row(completion_counters, seen, rows)


@triton.jit(do_not_specialize=_SIZES)
def finish_kernel(
    new_key, new_value, key, value, occupied, positions, score, token_index, carried, valid_seen, seen,
    output, logits, partial, row_maxima, normalisers, completion_counters, candidates, new_scores, counts, ranks,
    alpha, budget, slots, padded, share, splits, blocks, heads, rows, sinks, recent, offset,
    new_key_b, new_key_h, new_key_d, new_value_b, new_value_h, new_value_d,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, UNIT: tl.constexpr,
    SPLITS: tl.constexpr, CHUNK: tl.constexpr, RULE: tl.constexpr, MAGNITUDE: tl.constexpr, PROTECTS: tl.constexpr,
    GROWS: tl.constexpr,
):
    """Programs (block of `share` * 16 slots, batch_head): scores and the lowest candidate. The last program of a
    batch_head takes the lowest candidate of all and writes the new token there. GROUP more programs each merge a query
    head's output."""
    batch_head = (tl.program_id(0) // (blocks + GROUP)).to(tl.int64)
    block = tl.program_id(0) % (blocks + GROUP)
    if block >= blocks:
        _merge_head(
            partial, row_maxima, normalisers, output, batch_head * GROUP + block - blocks, splits, HEAD_DIM, D_PAD,
            SPLITS
        )
    else:
        row = batch_head * (slots * UNIT)
        score += row
        token_index += row
        carried += row
        b, k_head = batch_head // heads, batch_head % heads
        new_key += b * new_key_b + k_head * new_key_h
        new_value += b * new_value_b + k_head * new_value_h
        number = tl.load(valid_seen + batch_head)
        tokens = tl.minimum(number, budget)
        if GROWS:
            tokens = tl.load(counts + batch_head)
        g = batch_head * GROUP + tl.arange(0, GROUP_PAD)
        valid = tl.arange(0, GROUP_PAD) < GROUP
        size = 0.0
        now = 0
        if RULE == ACTIVATE:
            now = tl.load(seen)
        if MAGNITUDE:
            size = _size_of(new_value, new_value_d, HEAD_DIM, D_PAD)
        begin = block * (share * 16)
        best, new_score = score_slots(
            logits + batch_head * (padded * 16) * GROUP_PAD, score, token_index, carried, ranks + row,
            tl.load(normalisers + g * 2, mask=valid, other=0.0),
            tl.load(normalisers + g * 2 + 1, mask=valid, other=0.0), begin,
            tl.minimum(begin + share * 16, (budget + 16) // 16 * 16), tokens, number, budget,
            new_score_of(seen, offset, RULE), size, now, sinks, recent, alpha, offset, padded * 16, GROUP, GROUP_PAD,
            UNIT, CHUNK, RULE, MAGNITUDE, PROTECTS, GROWS, False,
        )
        tl.store(candidates + batch_head * blocks + block, best)
        if (budget >= begin) & (budget < begin + share * 16):
            tl.store(new_scores + batch_head, new_score)
        if is_last(completion_counters + batch_head, blocks):
            found = tl.full([_COMPARED], _NEVER, tl.int64)
            for start in range(0, blocks, _COMPARED):
                i = start + tl.arange(0, _COMPARED)
                found = tl.minimum(found, tl.load(
                    candidates + batch_head * blocks + i, mask=i < blocks, other=_NEVER, cache_modifier=".cg"
                ))
            lowest = (tl.min(found, 0) & _INDEX).to(tl.int32)
            if RULE == RENEW and not GROWS:
                lowest = slot_of(token_index, lowest, tokens, budget, CHUNK)
            slot = tl.where(tokens < budget, tokens, lowest)
            if GROWS:
                slot = tokens
                tl.store(counts + batch_head, tokens + 1)
            _take_slot(
                new_key, new_value, key + row * HEAD_DIM, value + row * HEAD_DIM, occupied + row, positions + row,
                score, token_index, carried, valid_seen + batch_head, slot, tl.load(seen), number,
                tl.load(new_scores + batch_head, cache_modifier=".cg"), size, (slot < budget) | GROWS,
                new_key_d, new_value_d, None, None, None, None, None, None, None, None,
                HEAD_DIM, D_PAD, RULE, MAGNITUDE, 0,
            )
            _count_row(completion_counters, seen, rows)
