"""The kernel that starts a LongFlow decode step. A kernel of `_score_kernels.py` finishes the step.

Conventions are described there. Strides of the caches are divided by UNIT, those of the mask by MASK_UNIT (see
_ops.py). With PAGE > 0, the caches lie in pages of PAGE slots: `pages` has the page of each PAGE slots of a row,
and key_b and value_b are the strides of pages instead of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.numerics import dot, fast_log2, from_fp8, of_any_width, round_to, row_norms, scaled_logit
from .._common.scratch import all_occupied, is_last, row_of, written_of
from .._common.softmax import begin as begin_softmax
from .._common.softmax import weigh
from ._score_kernels import finish_group


@triton.jit
def _write_token(
    key, value, pages, occupied, positions, new_key, new_value, seen, newest,
    pages_s, key_p, key_s, key_d, value_p, value_s, value_d, occupied_s, new_key_d, new_value_d, writes_masks,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
):
    """Write the new token's key and value into slot `newest` of one KV head. All pointers are at its row.

    If KV heads share a mask, one of them writes it. The others treat the slot as occupied without reading the mask.
    """
    d = tl.arange(0, D_PAD).to(tl.int64)
    in_head = d < HEAD_DIM
    at = newest.to(tl.int64)
    if PAGE:
        page = tl.load(pages + newest // PAGE * pages_s).to(tl.int64)
        key += page * key_p
        value += page * value_p
        place = at % PAGE
    else:
        place = at
    k_new = tl.load(new_key + d * new_key_d, mask=in_head)
    v_new = tl.load(new_value + d * new_value_d, mask=in_head)
    tl.store(key + place * key_s + d * key_d, k_new, mask=in_head)
    tl.store(value + place * value_s + d * value_d, v_new, mask=in_head)
    if writes_masks:
        tl.store(occupied + at * occupied_s, 1)
        tl.store(positions + at, tl.load(seen))


@triton.jit
def _attend_tiles(
    acc, row_max, weight_sum, q, key, value, pages, occupied, logits, newest, scale, softcap, value_factor,
    begin, end, pages_s, key_p, key_s, key_d, value_p, value_s, value_d, occupied_s,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, FP8: tl.constexpr, MASKED: tl.constexpr, WARPS: tl.constexpr,
):
    """Update the online softmax of ROWS queries (accumulator, maximum, sums) with slots begin to end. Stores the logits
    plus log2 ||v||_1, which are the log scores except for the denominators of the whole row. scale, softcap: see
    `logit_factors`.

    FP8: the format of keys and values, or None. value_factor: of FP8 values, or None. The norms include it; the
    accumulator does not. The factor of FP8 keys is part of `scale`.

    The sum stays in SUMS parts, each over slots of one warp, so that warps need not synchronize at every tile. With
    MASKED, unoccupied slots are not read, so NaN in them has no effect. Otherwise all slots are occupied and tiles are
    full.
    """
    d = tl.arange(0, D_PAD).to(tl.int64)
    row = tl.arange(0, ROWS)
    SUMS: tl.constexpr = weight_sum.shape[1]
    i = tl.arange(0, BLOCK)
    # A slot's offset in its tile has two parts: one differs among threads, the other among a thread's own loads.
    THREADS: tl.constexpr = max(1, WARPS * 32 * (16 // (key.dtype.element_ty.primitive_bitwidth // 8)) // D_PAD)
    near, far = (i % THREADS).to(tl.int64), (i // THREADS * THREADS).to(tl.int64)
    k_near = near[:, None] * key_s + d[None, :] * key_d
    v_near = near[:, None] * value_s + d[None, :] * value_d
    for start in range(begin, end, BLOCK):
        s = start + i
        s64 = s.to(tl.int64)
        first = tl.cast(start, tl.int64)
        inside = s < end
        if HEAD_DIM != D_PAD:
            tile = (d < HEAD_DIM)[None, :]
        if MASKED:
            holds = tl.load(occupied + s64 * occupied_s, mask=inside, other=0) != 0
            holds = (holds | (s == newest)) & inside
            # Also avoids a second layout of the queries, with which fewer programs would fit on a multiprocessor.
            holds = of_any_width(holds)
            tile = tile & holds[:, None] if HEAD_DIM != D_PAD else holds[:, None]
        if PAGE == 0:
            k = key + first * key_s + k_near + far[:, None] * key_s
        elif PAGE % BLOCK == 0:                                        # the tile is in one page
            page = tl.load(pages + start // PAGE * pages_s).to(tl.int64)
            k = key + page * key_p + first % PAGE * key_s + k_near + far[:, None] * key_s
        else:
            entry = pages + s // PAGE * pages_s
            page = tl.load(entry, mask=inside, other=0) if MASKED else tl.load(entry)
            page = page.to(tl.int64)[:, None]
            k = key + page * key_p + (s64 % PAGE)[:, None] * key_s + d[None, :] * key_d
        k = tl.load(k, mask=tile, other=0.0) if MASKED or HEAD_DIM != D_PAD else tl.load(k)
        if FP8 is not None:
            k = from_fp8(k, q.dtype, FP8)
        raw = dot(q, tl.trans(k))                                      # [ROWS, BLOCK]
        logit = scaled_logit(raw, scale, softcap)
        if MASKED:
            logit = tl.where(holds[None, :], logit, float("-inf"))
        p, row_max, rescale = weigh(logit, row_max, tl.max(logit, 1))
        weight_sum = weight_sum * rescale[:, None] + tl.sum(tl.reshape(p, (ROWS, BLOCK // SUMS, SUMS)), 1)
        if PAGE == 0:
            v = value + first * value_s + v_near + far[:, None] * value_s
        elif PAGE % BLOCK == 0:
            v = value + page * value_p + first % PAGE * value_s + v_near + far[:, None] * value_s
        else:
            v = value + page * value_p + (s64 % PAGE)[:, None] * value_s + d[None, :] * value_d
        v = tl.load(v, mask=tile, other=0.0) if MASKED or HEAD_DIM != D_PAD else tl.load(v)
        if FP8 is not None:
            v = from_fp8(v, q.dtype, FP8)
        norm = row_norms(v, ROWS)
        if value_factor is not None:
            norm = norm * value_factor
        # An explicit fma: if the compiler decided whether to fuse, equal tokens could differ in the last bit between
        # the two loops. Unoccupied slots get -inf, like a value of zeros.
        log_norm = fast_log2(norm)
        if softcap is None:
            kept = tl.fma(raw, scale, log_norm)
        else:
            kept = logit + log_norm                                    # nothing is fused with `scaled_logit`
        # These lines are read again soon, unlike keys and values: keep them in the cache.
        valid = (row < GROUP_PAD)[:, None]
        if MASKED:
            valid = valid & (s < written_of(end))[None, :]
        tl.store(
            logits + s64[None, :] * GROUP_PAD + row[:, None], kept, mask=valid, eviction_policy="evict_last"
        )
        acc = acc * rescale[:, None] + dot(round_to(p, v.dtype), v)
    return acc, row_max, weight_sum


@triton.jit(do_not_specialize=[
    "slots", "early", "splits", "split_size", "late_splits", "late_size", "heads", "query_b", "query_h",
    "key_b", "key_h", "key_s", "value_b", "value_h", "value_s", "occupied_b", "occupied_h",
    "new_key_b", "new_key_h", "new_value_b", "new_value_h", "pages_b", "pages_s", "key_scale_h", "value_scale_h",
])
def attend_kernel(
    query, key, value, key_scale, value_scale, pages, occupied, new_key, new_value, slot, positions, seen,
    logits, partial, row_maxima, weight_sums, ranks, output, completion_counters, sink_logits,
    scale, softcap, slots, early, splits, split_size, late_splits, late_size, heads,
    query_b, query_h, query_d, key_b, key_h, key_s, key_d, value_b, value_h, value_s, value_d,
    occupied_b, occupied_h, occupied_s, new_key_b, new_key_h, new_key_d, new_value_b, new_value_h, new_value_d,
    pages_b, pages_s, key_scale_h, value_scale_h,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, UNIT: tl.constexpr, MASK_UNIT: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    PER_HEAD: tl.constexpr, ARRIVAL: tl.constexpr, FUSED: tl.constexpr, DISCARD: tl.constexpr, DEPENDENT: tl.constexpr,
    WARPS: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr,
):
    """Program (split, batch_head): attends to one share of the slots of a (row, KV head), for all its query heads.
    Stores the logits, and the share's maximum, sum and accumulator.

    FUSED: the last program of a KV head finishes its outputs and ranks while other programs still read keys, so that
    most logits never leave the cache. Rows of the batch after the first `early` have smaller shares, so that all
    multiprocessors finish at about the same time. DEPENDENT: the next launch may start early and wait for this one.
    FP8: keys and values are FP8 codes, uint8, with scales of KV heads, or None. sink_logits: those of attention sinks,
    with which the first share begins, or None.
    """
    # One grid axis, since the other axes are limited to 65,535 programs.
    program = tl.program_id(0)
    is_early = program < early * heads * splits
    row_splits, share = splits, split_size
    if not is_early:
        program += early * heads * (late_splits - splits)              # as if early rows had as many shares
        row_splits, share = late_splits, late_size
    split = program % row_splits
    batch_head = (program // row_splits).to(tl.int64)
    padded = row_of(slots)
    b, k_head = batch_head // heads, batch_head % heads
    decision = batch_head if PER_HEAD else b
    begin = split * share
    end = tl.minimum(begin + share, slots)
    if PAGE:
        key += k_head * key_h * UNIT
        value += k_head * value_h * UNIT
        pages += b * pages_b
    else:
        key += (b * key_b + k_head * key_h) * UNIT
        value += (b * value_b + k_head * value_h) * UNIT
    page_k, page_v = key_b.to(tl.int64) * UNIT, value_b.to(tl.int64) * UNIT
    mine = occupied + (b * occupied_b + k_head * occupied_h) * MASK_UNIT
    if ARRIVAL and PAGE == 0:                                          # a state's own caches are contiguous
        row_k: tl.constexpr = HEAD_DIM
        row_v: tl.constexpr = HEAD_DIM
    else:
        row_k = key_s * UNIT
        row_v = value_s * UNIT
    d = tl.arange(0, D_PAD).to(tl.int64)
    row = tl.arange(0, ROWS)
    mask = (row < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    head = (k_head * GROUP + row)[:, None]
    q = tl.load(query + b * query_b + head * query_h + d[None, :] * query_d, mask=mask, other=0.0)
    value_factor = None
    if key_scale is not None:
        scale = scale * tl.load(key_scale + k_head * key_scale_h)
    if value_scale is not None:
        value_factor = tl.load(value_scale + k_head * value_scale_h)
    newest = -1
    if ARRIVAL:
        newest = tl.load(slot + decision).to(tl.int32)
    # Before the token is written, so that one wait covers all of these loads.
    whole = begin
    if all_occupied(mine, occupied_s, newest, begin, end, MASK_UNIT):
        whole = begin + (end - begin) // BLOCK * BLOCK
    if ARRIVAL:
        if (newest >= begin) & (newest < end):
            _write_token(
                key, value, pages, mine, positions + decision * slots,
                new_key + b * new_key_b + k_head * new_key_h, new_value + b * new_value_b + k_head * new_value_h,
                seen, newest, pages_s, page_k, row_k, key_d, page_v, row_v, value_d, occupied_s, new_key_d,
                new_value_d, PER_HEAD or k_head == 0, HEAD_DIM, D_PAD, PAGE,
            )
        # The program that wrote the slot also reads its tile and must see the new token.
        tl.debug_barrier()
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    SUMS: tl.constexpr = min(BLOCK, 8 * WARPS)                         # see _attend_tiles
    weight_sum = tl.zeros([ROWS, SUMS], tl.float32)
    if sink_logits is not None:
        row_max, of_sink = begin_softmax(sink_logits, k_head * GROUP + row, (row < GROUP) & (split == 0), ROWS)
        weight_sum = tl.where((tl.arange(0, SUMS) == 0)[None, :], of_sink[:, None], 0.0)
    # Caches are usually full, and the second loop is empty. Two loops share their buffers; two branches would not.
    acc, row_max, weight_sum = _attend_tiles(
        acc, row_max, weight_sum, q, key, value, pages, mine, logits + batch_head * padded * GROUP_PAD,
        newest, scale, softcap, value_factor, begin, whole, pages_s, page_k, row_k, key_d, page_v, row_v, value_d,
        occupied_s, HEAD_DIM, D_PAD, ROWS, GROUP_PAD, BLOCK, PAGE, FP8, False, WARPS,
    )
    acc, row_max, weight_sum = _attend_tiles(
        acc, row_max, weight_sum, q, key, value, pages, mine, logits + batch_head * padded * GROUP_PAD,
        newest, scale, softcap, value_factor, whole, end, pages_s, page_k, row_k, key_d, page_v, row_v, value_d,
        occupied_s, HEAD_DIM, D_PAD, ROWS, GROUP_PAD, BLOCK, PAGE, FP8, True, WARPS,
    )
    if value_factor is not None:
        acc = acc * value_factor
    part = (batch_head * GROUP + row) * late_splits + split            # late_splits >= splits
    tl.store(row_maxima + part, row_max, mask=row < GROUP)
    tl.store(weight_sums + part, tl.sum(weight_sum, 1), mask=row < GROUP)
    policy: tl.constexpr = "evict_last" if FUSED else ""               # as for logits
    tl.store(partial + part[:, None] * HEAD_DIM + d[None, :], acc, mask=mask, eviction_policy=policy)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    if FUSED and is_last(completion_counters + batch_head, row_splits):
        finish_group(
            logits, ranks, partial, row_maxima, weight_sums, output, batch_head, row_splits, late_splits, slots,
            GROUP, GROUP_PAD, HEAD_DIM, D_PAD, SPLITS, CHUNK, DISCARD,
        )
