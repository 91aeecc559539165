"""R-KV's products of all keys of a head with each other: `latest_kernel`. See `redundancy_kernels.py`.

Tokens are in the order of their ages: without gaps, and a program that wants the last similar token looks at the last
ones first. The comparison of a product takes about as long as the product. So programs that share a multiprocessor, of
which few registers allow two, multiply in turns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..numerics import dot, float32, multiply, round_to


@triton.jit
def scaled(k, factor):
    """k [TILE, D] times factor [TILE], exactly."""
    return round_to(float32(k) * factor[:, None], k.dtype)


@triton.jit
def keys_of(key, slot, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr):
    """The keys [TILE, D_PAD] in these slots of a head."""
    d = tl.arange(0, D_PAD)
    keys = key + slot.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
    if D_PAD == HEAD_DIM:
        return tl.load(keys)
    else:
        return tl.load(keys, mask=(d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _unusual(factors, tokens, CHUNK: tl.constexpr):
    """The number of tokens whose keys have a factor."""
    total = tl.full([CHUNK], 0, tl.int32)
    for start in range(0, tokens, CHUNK):
        place = start + tl.arange(0, CHUNK)
        total += tl.where(tl.load(factors + place, mask=place < tokens, other=1.0) != 1.0, 1, 0)
    return tl.sum(total, 0)


@triton.jit
def _last_similar(
    unit, limit, row, found, begin, first, last, key, factors, inverses, by_age,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, ROUND: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Of each row: `found` or the age of the last token, in the tiles from `first` to `last`, whose product with the
    row is above the limit, whichever is greater. The last tiles come first, in rounds of ROUND, until every row has a
    token or there is no other round."""
    column = tl.arange(0, TILE)
    stop = last
    while stop > first:
        start = tl.maximum(stop - ROUND, first)
        hit = tl.full([ROWS, TILE], -1, tl.int32)                      # by column, the last tile that is similar
        for tile in range(start, stop):
            other = tile * TILE + column
            # Behind the last token, too: masks would keep loads from having several numbers. The inverses are 0 there.
            k = keys_of(key, tl.load(by_age + other), HEAD_DIM, D_PAD)
            if SCALED:
                k = scaled(k, tl.load(factors + other))
            inverse = tl.load(inverses + other)                        # before the product, which takes as long
            similar = multiply(dot(unit, tl.trans(k)), inverse[None, :])
            if (tile * TILE < begin + ROWS) & (tile * TILE + TILE > begin):
                similar = tl.where(row[:, None] != other[None, :], similar, 0.0)
            hit = tl.where(similar > limit[:, None], tile, hit)
        found = tl.maximum(found, tl.max(tl.where(hit >= 0, hit * TILE + column[None, :], -1), 1))
        stop = tl.where(tl.min(found, 0) >= 0, first, start)
    return found


@triton.jit(do_not_specialize=["capacity", "end", "slots", "splits"])
def latest_kernel(
    key, counts, factors, inverses, by_age, latest, threshold, capacity, end, slots, width, splits,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, ROUND: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (ROWS tokens, split, batch_head). latest [splits, B * Hkv, width]: by the age of a token, that of the
    last token of the split that is similar to it, -1 for none. width: the length of a row by age."""
    tiles = tl.cdiv(end, ROWS)
    begin = tl.program_id(0) % tiles * ROWS
    program = tl.program_id(0) // tiles
    split, batch_head = program % splits, (program // splits).to(tl.int64)
    tokens = tl.load(counts + batch_head)
    if tokens <= capacity:
        return
    if begin >= tokens:
        return
    key += batch_head * slots * HEAD_DIM
    factors += batch_head * width
    inverses += batch_head * width
    by_age += batch_head * width
    unusual = _unusual(factors, tokens, CHUNK) if key.dtype.element_ty != tl.float16 else 0   # see `_factors`
    row = begin + tl.arange(0, ROWS)
    there = row < tokens
    unit = scaled(keys_of(key, tl.load(by_age + row), HEAD_DIM, D_PAD), tl.load(factors + row))
    limit = threshold / tl.load(inverses + row, mask=there, other=1.0)
    found = tl.where(there, -1, 0)
    each = tl.cdiv(tokens, TILE)
    first, last = each * split // splits, each * (split + 1) // splits
    if unusual > 0:
        found = _last_similar(
            unit, limit, row, found, begin, first, last, key, factors, inverses, by_age,
            HEAD_DIM, D_PAD, ROWS, TILE, ROUND, True,
        )
    else:
        found = _last_similar(
            unit, limit, row, found, begin, first, last, key, factors, inverses, by_age,
            HEAD_DIM, D_PAD, ROWS, TILE, ROUND, False,
        )
    heads = tl.num_programs(0) // tiles // splits
    tl.store(latest + (split * heads + batch_head) * width + row, found, mask=there)
