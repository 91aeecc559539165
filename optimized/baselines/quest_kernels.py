"""The kernels of Quest: the bounds of pages, their scores, and a decode step.

A step takes four launches: the new token joins the cache and all pages are scored; pages are selected; the programs of
a KV head share the selected tokens; their shares are merged. A row's tokens are in its first slots. count [B] int64:
the row's tokens before the step; counters[0] int64: all tokens before it, padding included. A token beyond the last
slot is dropped. pages_now [B] int64: the pages of a row that have tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.numerics import dot, float32, multiply, round_output, round_to, sortable
from .._common.softmax import merge_sums, weigh_tile

#: Below the code of every number, and above it.
_NO_PAGE, _FORCED = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


@triton.jit
def _higher(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _lower(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["heads", "tiles", "tokens", "room", "size", "key_b", "key_h", "key_s"])
def bounds_kernel(
    key, count, maximum, minimum, heads, tiles, tokens, room, size, key_b, key_h, key_s, key_d,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, PAGES: tl.constexpr, COUNTED: tl.constexpr,
):
    """Program: the bounds of PAGES pages of `size` tokens of a KV head. COUNTED: row b has count[b] tokens, otherwise
    `tokens`. Results [B, Hkv, room, D]; pages without tokens are not written."""
    tile, row_head = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, h = row_head // heads, row_head % heads
    total = tl.load(count + b) if COUNTED else tokens.to(tl.int64)
    d = tl.arange(0, D_PAD)
    page = (tile * PAGES + tl.arange(0, PAGES)).to(tl.int64)
    in_head = (d < HEAD_DIM)[None, :]
    high = tl.full([PAGES, D_PAD], float("-inf"), tl.float32)
    low = tl.full([PAGES, D_PAD], float("inf"), tl.float32)
    for place in range(0, size):
        token = page * size + place
        there = (token < total)[:, None] & in_head
        at = key + b * key_b + h * key_h + token[:, None] * key_s + d.to(tl.int64)[None, :] * key_d
        high = _higher(high, float32(tl.load(at, mask=there, other=float("-inf"))))
        low = _lower(low, float32(tl.load(at, mask=there, other=float("inf"))))
    into = (row_head * room + page)[:, None] * HEAD_DIM + d[None, :]
    mask = (page * size < total)[:, None] & in_head
    tl.store(maximum + into, round_to(high, maximum.dtype.element_ty), mask=mask)
    tl.store(minimum + into, round_to(low, minimum.dtype.element_ty), mask=mask)


@triton.jit
def _append(
    key, value, maximum, minimum, new_key, new_value, before, size, begins, d, in_head, HEAD_DIM: tl.constexpr
):
    """Store a token in slot `before` of a head, and widen the bounds of its page, or begin a page."""
    k = tl.load(new_key, mask=in_head, other=0.0)
    tl.store(key + before * HEAD_DIM + d, k, mask=in_head)
    tl.store(value + before * HEAD_DIM + d, tl.load(new_value, mask=in_head, other=0.0), mask=in_head)
    at = before // size * HEAD_DIM + d
    old = in_head & (not begins)
    high = float32(tl.load(maximum + at, mask=old, other=float("-inf")))
    low = float32(tl.load(minimum + at, mask=old, other=float("inf")))
    tl.store(maximum + at, round_to(_higher(high, float32(k)), k.dtype), mask=in_head)
    tl.store(minimum + at, round_to(_lower(low, float32(k)), k.dtype), mask=in_head)


@triton.jit(do_not_specialize=[
    "heads", "tiles", "room", "slots", "size", "query_b", "query_h", "new_key_b", "new_key_h", "new_value_b",
    "new_value_h",
])
def score_kernel(
    query, new_key, new_value, key, value, maximum, minimum, scores, count, counters, positions, pages_now,
    heads, tiles, room, slots, size, query_b, query_h, query_d, new_key_b, new_key_h, new_key_d, new_value_b,
    new_value_h, new_value_d,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, PAGES: tl.constexpr,
    STEP: tl.constexpr, SCORES: tl.constexpr, ROUND: tl.constexpr,
):
    """Program: the scores of PAGES pages of a KV head for its GROUP query heads, [B, Hq, room] float32. STEP: first,
    the program with the newest page stores the new token; the scores of pages without tokens are not written. Without
    SCORES, which requires STEP, the only program of a KV head stores the token.

    max(q M, q m) is q M for a positive q and q m for a negative one, so a score is a sum of two products."""
    tile, row_head = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, h = row_head // heads, row_head % heads
    d = tl.arange(0, D_PAD)
    in_head = d < HEAD_DIM
    maximum += row_head * room * HEAD_DIM
    minimum += row_head * room * HEAD_DIM
    pages = room.to(tl.int64)
    if STEP:
        before, seen = tl.load(count + b), tl.load(counters)
        arrives = seen < slots
        total = tl.where(arrives, before + 1, before)
        pages = (total + size - 1) // size
        if (tile == 0) & (h == 0):
            tl.store(pages_now + b, pages)
            if arrives:
                tl.store(positions + b * slots + before, seen)
        if arrives & (((pages - 1) // PAGES == tile) | (not SCORES)):
            d64 = d.to(tl.int64)
            _append(
                key + row_head * slots * HEAD_DIM, value + row_head * slots * HEAD_DIM, maximum, minimum,
                new_key + b * new_key_b + h * new_key_h + d64 * new_key_d,
                new_value + b * new_value_b + h * new_value_h + d64 * new_value_d, before, size, before % size == 0, d,
                in_head, HEAD_DIM,
            )
            tl.debug_barrier()                                          # this program also reads what it has written
    if SCORES:
        page = (tile * PAGES + tl.arange(0, PAGES)).to(tl.int64)
        row = tl.arange(0, ROWS)
        if tile * PAGES < pages:
            q = tl.load(
                query + b * query_b + (h * GROUP + row)[:, None] * query_h + d.to(tl.int64)[None, :] * query_d,
                mask=(row < GROUP)[:, None] & in_head[None, :], other=0.0,
            )
            wide = float32(q)
            at = page[:, None] * HEAD_DIM + d[None, :]
            mask = (page < pages)[:, None] & in_head[None, :]
            high = tl.load(maximum + at, mask=mask, other=0.0)
            low = tl.load(minimum + at, mask=mask, other=0.0)
            score = dot(round_to(tl.where(wide > 0.0, wide, 0.0), q.dtype), tl.trans(high))
            score += dot(round_to(tl.where(wide > 0.0, 0.0, wide), q.dtype), tl.trans(low))
            if ROUND:
                score = float32(round_to(score, q.dtype))
            tl.store(
                scores + (row_head * GROUP + row)[:, None] * room + page[None, :], score,
                mask=(row < GROUP)[:, None] & (page < pages)[None, :],
            )


@triton.jit
def _codes(scores, page, pages, KEEP_LAST: tl.constexpr):
    """Codes of pages [N] of a query head in the order of their scores, [N] int32."""
    there = page < pages
    score = float32(tl.load(scores + page, mask=there, other=0.0))
    code = tl.where(there, sortable(score), _NO_PAGE)
    if KEEP_LAST:
        code = tl.where(page == pages - 1, _FORCED, code)
    return code


@triton.jit
def _span(code):
    """The lowest code of a page and the highest that is not forced. Without such, _FORCED and _NO_PAGE."""
    least = tl.min(tl.where(code == _NO_PAGE, _FORCED, code), 0)
    return least, tl.max(tl.where(code == _FORCED, _NO_PAGE, code), 0)


@triton.jit
def _at_least(code, first, second):
    """Which codes are not below each of two bounds, in 16 bits each: a sum of fewer than 2^15 counts both."""
    return tl.where(code >= first, 1, 0) + tl.where(code >= second, 65536, 0)


@triton.jit
def _list_pages(selected, code, lowest, page, pages, above_before, equal_before, need):
    """Store the pages of codes above `lowest`, and the first `need` of those equal to it, behind the pages before them.
    Returns the numbers of pages above and equal so far."""
    higher, equal = code > lowest, (code == lowest) & (page < pages)
    # Both prefix sums in one integer, since there are fewer than 2^15 codes.
    packed = tl.where(higher, 1, 0) + tl.where(equal, 65536, 0)
    running = tl.cumsum(packed, 0) - packed
    place = equal_before + (running >> 16)                              # among those equal to the lowest
    to = above_before + (running & 65535) + tl.minimum(place, need)
    tl.store(selected + to, page, mask=higher | (equal & (place < need)))
    both = tl.sum(packed, 0)
    return above_before + (both & 65535), equal_before + (both >> 16)


@triton.jit(do_not_specialize=["query_heads", "room", "wanted"])
def select_kernel(
    scores, pages_now, selected, query_heads, room, wanted,
    CHUNK: tl.constexpr, REST: tl.constexpr, LIST: tl.constexpr, KEEP_LAST: tl.constexpr, WHOLE: tl.constexpr,
):
    """Program: the `wanted` best pages of a query head, ascending, then -1, [B, Hq, wanted] int32. Of equal scores, the
    lowest index. WHOLE: the pages fit in CHUNK + REST codes, which stay in registers.

    The lowest selected code is the highest number that `keep` codes are not below. It is searched between the lowest
    and the highest code, a third of the rest each time. The search ends when exactly `keep` codes are not below a
    bound, which then selects the same pages."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * room
    selected += row * wanted
    pages = tl.minimum(tl.maximum(tl.load(pages_now + row // query_heads), 0), room).to(tl.int32)
    keep = tl.minimum(pages, wanted)
    index = tl.arange(0, CHUNK)
    rest_index = CHUNK + tl.arange(0, REST)
    code = _codes(scores, index, pages, KEEP_LAST)
    low, high = _span(code)
    if WHOLE:
        rest = _codes(scores, rest_index, pages, KEEP_LAST)
        least, most = _span(rest)
        low, high = tl.minimum(low, least), tl.maximum(high, most)
    else:
        for start in range(CHUNK, pages, CHUNK):
            least, most = _span(_codes(scores, start + index, pages, KEEP_LAST))
            low, high = tl.minimum(low, least), tl.maximum(high, most)
    width = high.to(tl.int64) - low
    while width > 0:
        # A third and two thirds of the way from `low` to `high`, and at most `high`.
        first = (low + (width * 341 >> 10) + 1).to(tl.int32)
        second = (low + (width * 683 >> 10) + 1).to(tl.int32)
        enough = _at_least(code, first, second)
        if WHOLE:
            # The threads' own codes first, so that one sum over threads counts all.
            enough = tl.sum(tl.reshape(enough, [CHUNK // REST, REST]), 0) + _at_least(rest, first, second)
        enough = tl.sum(enough, 0)
        of_first, of_second = enough & 65535, enough >> 16
        if not WHOLE:
            for start in range(CHUNK, pages, CHUNK):
                later = tl.sum(_at_least(_codes(scores, start + index, pages, KEEP_LAST), first, second), 0)
                of_first += later & 65535
                of_second += later >> 16
        if of_second >= keep:
            low = second
        elif of_first >= keep:
            low = first
            high = second - 1
        else:
            high = first - 1
        width = high.to(tl.int64) - low
        if (of_first == keep) | (of_second == keep):
            width = width * 0
    above = tl.sum(tl.where(code > low, 1, 0), 0)
    if WHOLE:
        above += tl.sum(tl.where(rest > low, 1, 0), 0)
    else:
        for start in range(CHUNK, pages, CHUNK):
            above += tl.sum(tl.where(_codes(scores, start + index, pages, KEEP_LAST) > low, 1, 0), 0)
    need = keep - above                                                 # of those equal to the lowest, the first ones
    none = keep * 0
    higher, equal = _list_pages(selected, code, low, index, pages, none, none, need)
    if WHOLE:
        _list_pages(selected, rest, low, rest_index, pages, higher, equal, need)
    else:
        for start in range(CHUNK, pages, CHUNK):
            later = _codes(scores, start + index, pages, KEEP_LAST)
            higher, equal = _list_pages(selected, later, low, start + index, pages, higher, equal, need)
    for start in range(0, wanted, LIST):
        i = start + tl.arange(0, LIST)
        tl.store(selected + i, tl.full([LIST], -1, tl.int32), mask=(i >= keep) & (i < wanted))


@triton.jit(do_not_specialize=["heads", "splits", "slots", "wanted", "query_b", "query_h"])
def attention_kernel(
    query, key, value, selected, count, counters, pages_now, partial, row_maxima, weight_sums,
    scale, heads, splits, slots, wanted, query_b, query_h, query_d,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EACH: tl.constexpr, SIZE: tl.constexpr, LISTED: tl.constexpr,
):
    """Program: a share of the tokens of a KV head. LISTED: a tile has EACH tokens of every query head's pages of SIZE
    tokens, and a head attends to its own. Otherwise all query heads attend to all tokens, and EACH is BLOCK. `scale`
    includes log2(e)."""
    split, row_head = tl.program_id(0) % splits, (tl.program_id(0) // splits).to(tl.int64)
    b, h = row_head // heads, row_head % heads
    before, seen = tl.load(count + b), tl.load(counters)
    total = tl.where(seen < slots, before + 1, before)
    d = tl.arange(0, D_PAD)
    in_head = d < HEAD_DIM
    row = tl.arange(0, ROWS)
    mask = (row < GROUP)[:, None] & in_head[None, :]
    q = tl.load(
        query + b * query_b + (h * GROUP + row)[:, None] * query_h + d.to(tl.int64)[None, :] * query_d,
        mask=mask, other=0.0,
    )
    key += row_head * slots * HEAD_DIM
    value += row_head * slots * HEAD_DIM
    selected += row_head * GROUP * wanted
    places = total.to(tl.int32)                                         # of each query head
    if LISTED:
        places = tl.minimum(tl.load(pages_now + b), wanted).to(tl.int32) * SIZE
    share = tl.cdiv(tl.cdiv(places, EACH), splits) * EACH
    begin = split * share
    end = tl.minimum(begin + share, places)
    column = tl.arange(0, BLOCK)
    owner = column // EACH                                              # the query head of a column of a tile
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    for start in range(begin, end, EACH):
        if LISTED:
            place = start + column % EACH
            inside = (place < end) & (owner < GROUP)
            page = tl.load(selected + owner * wanted + place // SIZE, mask=inside, other=0)
            slot = page.to(tl.int64) * SIZE + place % SIZE
            holds = inside & (slot < total)
            seen_by = holds[None, :] & (owner[None, :] == row[:, None])
        else:
            slot = (start + column).to(tl.int64)
            holds = slot < end
            seen_by = holds[None, :] & (row < GROUP)[:, None]
        at = slot[:, None] * HEAD_DIM + d[None, :]
        tile = holds[:, None] & in_head[None, :]
        k = tl.load(key + at, mask=tile, other=0.0)
        logit = multiply(dot(q, tl.trans(k)), scale)
        logit = tl.where(seen_by, logit, float("-inf"))
        p, row_max, weight_sum, rescale = weigh_tile(logit, row_max, weight_sum)
        v = tl.load(value + at, mask=tile, other=0.0)
        acc = acc * rescale[:, None] + dot(round_to(p, v.dtype), v)
    part = (row_head * GROUP + row) * splits + split
    tl.store(row_maxima + part, row_max, mask=row < GROUP)
    tl.store(weight_sums + part, weight_sum, mask=row < GROUP)
    tl.store(partial + part[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["batch", "splits", "slots", "rows"])
def merge_kernel(
    partial, row_maxima, weight_sums, output, count, counters, batch, splits, slots, rows,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, BATCH: tl.constexpr,
):
    """Program: merges the shares of ROWS query heads. The first program counts the token of every row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i, d = tl.arange(0, SPLITS), tl.arange(0, D_PAD)
    valid = row < rows
    part = row[:, None] * splits + i[None, :]
    there = valid[:, None] & (i < splits)[None, :]
    row_max, weight_sum = merge_sums(row_maxima, weight_sums, part, there, False)
    share = tl.exp2(tl.load(row_maxima + part, mask=there, other=float("-inf")) - row_max[:, None])
    each = tl.load(
        partial + part[:, :, None] * HEAD_DIM + d[None, None, :],
        mask=there[:, :, None] & (d < HEAD_DIM)[None, None, :], other=0.0,
    )
    result = tl.sum(each * share[:, :, None], 1)
    result = result / tl.where(weight_sum == 0.0, 1.0, weight_sum)[:, None]
    tl.store(
        output + row[:, None] * HEAD_DIM + d[None, :], round_output(result, output.dtype.element_ty),
        mask=valid[:, None] & (d < HEAD_DIM)[None, :],
    )
    if tl.program_id(0) == 0:
        seen = tl.load(counters)
        if seen < slots:
            for start in range(0, batch, BATCH):
                b = start + tl.arange(0, BATCH)
                tl.store(count + b, tl.load(count + b, mask=b < batch, other=0) + 1, mask=b < batch)
            tl.store(counters, seen + 1)
