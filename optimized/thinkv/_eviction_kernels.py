"""How many tokens segments keep, in integer arithmetic, and which ones, by k-means without centroids.

A centroid is the mean of its cluster, so all distances follow from the segment's Gram matrix G: if sums_jc is the mean
of G_ji over the tokens i of cluster c, then ||x_j - centroid_c||^2 = G_jj - 2 sums_jc + the mean of sums_ic over these
i. First the mean of two keys is subtracted from all keys, which changes no distance and reduces rounding errors. Tensor
cores do not multiply float32, so numbers are split into three parts of 8 bits each, whose products are exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.launch import INTERPRETED
from .._common.numerics import float32

_INTERPRETED = tl.constexpr(INTERPRETED)


# How many tokens segments keep ---------------------------------------------------------------------------------------


@triton.jit
def kept_at(level, RETENTION: tl.constexpr, LEVELS: tl.constexpr):
    """The most tokens that a segment keeps at its level-th selection. RETENTION has 64 bits per level."""
    kept = tl.full(level.shape, (RETENTION >> (64 * (LEVELS - 1))) & 0x7FFFFFFFFFFFFFFF, tl.int64)
    for i in tl.static_range(LEVELS - 1):
        kept = tl.where(level == i + 1, (RETENTION >> (64 * i)) & 0x7FFFFFFFFFFFFFFF, kept)
    return kept


@triton.jit
def plan(
    size, level, thought, earlier, change, live, budget, RETENTION: tl.constexpr, LEVELS: tl.constexpr
):
    """Sizes and levels [M] int64 after eviction, and the number of the row's `live` tokens that remain.

    `earlier`: the segments before the current one that have tokens. The least important and oldest segment shrinks to
    its minimum before the next one does, so the number of tokens evicted before a segment's turn is known.
    """
    floor: tl.constexpr = (RETENTION >> (64 * (LEVELS - 1))) & 0x7FFFFFFFFFFFFFFF
    selected = earlier & change
    level = level + selected.to(tl.int64)
    after = tl.where(selected, tl.minimum(size, kept_at(level, RETENTION, LEVELS)), size)
    live = live - tl.sum(size - after, 0)
    can_go = tl.where(earlier, tl.maximum(after - floor, 0), 0)
    before = tl.zeros_like(size)                                       # evicted before a segment's turn
    lower = tl.zeros([], tl.int64)
    for kind in tl.static_range(3):
        mine = tl.where(thought == kind, can_go, 0)
        before = tl.where(thought == kind, lower + tl.cumsum(mine, 0) - mine, before)
        lower += tl.sum(mine, 0)
    left = live - before
    planned = after
    for _ in tl.static_range(LEVELS):
        goes = earlier & (planned > floor) & (left > budget)
        level += goes.to(tl.int64)
        smaller = tl.where(goes, tl.minimum(planned, kept_at(level, RETENTION, LEVELS)), planned)
        left -= planned - smaller
        planned = smaller
    return planned, level, live - tl.sum(after - planned, 0)


@triton.jit(do_not_specialize=[
    "segments", "size_b", "level_b", "thought_b", "current_b", "change_b", "live_b", "budget",
])
def anneal_kernel(
    size, level, thought, current, trajectory_change, live, new_size, new_level, over_budget, segments, budget,
    size_b, size_m, level_b, level_m, thought_b, thought_m, current_b, change_b, live_b,
    RETENTION: tl.constexpr, LEVELS: tl.constexpr, SEGMENTS: tl.constexpr,
):
    """Program b: the plan of one row."""
    b = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, SEGMENTS)
    m64 = m.to(tl.int64)
    there = m < segments
    old = tl.load(size + b * size_b + m64 * size_m, mask=there, other=0)
    levels = tl.load(level + b * level_b + m64 * level_m, mask=there, other=0)
    kind = tl.load(thought + b * thought_b + m64 * thought_m, mask=there, other=0)
    earlier = there & (m < tl.load(current + b * current_b)) & (old > 0)
    change, tokens = tl.load(trajectory_change + b * change_b) != 0, tl.load(live + b * live_b)
    floor: tl.constexpr = (RETENTION >> (64 * (LEVELS - 1))) & 0x7FFFFFFFFFFFFFFF
    can_shrink = tl.max(tl.where(earlier & (old > floor), 1, 0), 0)
    if (change == 0) & ((tokens <= budget) | (can_shrink == 0)):        # as in most steps: nothing is evicted
        tl.store(new_size + b * segments + m, old, mask=there)
        tl.store(new_level + b * segments + m, levels, mask=there)
        tl.store(over_budget + b, tokens > budget)
        return
    planned, levels, left = plan(old, levels, kind, earlier, change, tokens, budget, RETENTION, LEVELS)
    tl.store(new_size + b * segments + m, planned, mask=there)
    tl.store(new_level + b * segments + m, levels, mask=there)
    tl.store(over_budget + b, left > budget)


# Which tokens segments keep ------------------------------------------------------------------------------------------


@triton.jit
def _bfloat16_term(x):
    """float32 rounded to bfloat16. In the interpreter, whose bfloat16 is wrong, the result is stored as float32."""
    if _INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def bfloat16_terms(x):
    """Three numbers of 8 bits each whose sum is x."""
    high = _bfloat16_term(x)
    rest = x - high.to(tl.float32)
    middle = _bfloat16_term(rest)
    return high, middle, _bfloat16_term(rest - middle.to(tl.float32))


@triton.jit
def add_gram(leading, rest, x):
    """Add x x^T to `whole_gram` of leading and rest [TOKENS, TOKENS], for some channels of x [TOKENS, CHANNELS]
    float32.

    Of the nine products of parts, those are omitted that are together below 2^-23 |x_i| |x_j|.
    """
    high, middle, low = bfloat16_terms(x)
    high_t, half_t = tl.trans(high), tl.trans((middle * 0.5).to(middle.dtype))
    leading = tl.dot(high, high_t, leading, input_precision="ieee")
    rest = tl.dot(low, high_t, rest, input_precision="ieee")
    rest = tl.dot(middle, half_t, rest, input_precision="ieee")
    rest = tl.dot(middle, high_t, rest, input_precision="ieee")
    return leading, rest


@triton.jit
def whole_gram(leading, rest):
    """The Gram matrix. Of two products of different parts, `rest` has one; of the product of equal parts, half."""
    return leading + (rest + tl.trans(rest))


@triton.jit
def centred(x, holds, size):
    """Subtract the mean of two rows from the rows of x with tokens, the first `size` >= 2. Other rows become zero.

    The sum of two numbers and zeros is the same in any order, so the layout has no effect on what a segment keeps.
    """
    row = tl.arange(0, holds.shape[0])
    chosen = (row == size // 4) | (row == 3 * size // 4)
    origin = tl.sum(tl.where(chosen[:, None], x, 0.0), 0) * 0.5
    return tl.where(holds[:, None], x - origin[None, :], 0.0)


@triton.jit
def _to_clusters(high, middle, low, label, cluster):
    """sums, counts and the mean of the sums within each cluster (see the module), for tokens in clusters label
    [TOKENS].

    Membership is computed in integers: Triton 3.9 cannot compile a bool that a `tl.dot` depends on.
    """
    member = 1 - tl.minimum(tl.abs(label[:, None] - cluster[None, :]), 1)
    one = _bfloat16_term(member.to(tl.float32))
    sums = tl.dot(low, one, input_precision="ieee")
    sums = tl.dot(middle, one, sums, input_precision="ieee")
    sums = tl.dot(high, one, sums, input_precision="ieee")
    count = tl.sum(member, 0).to(tl.float32)
    sums = sums / tl.maximum(count, 1.0)[None, :]
    within = tl.sum(tl.where(member > 0, sums, 0.0), 0) / tl.maximum(count, 1.0)
    return sums, count, within


@triton.jit
def _nearest(high, middle, low, label, cluster):
    """The nearest cluster of each token, ties to the first. Clusters without tokens are never the nearest."""
    sums, count, within = _to_clusters(high, middle, low, label, cluster)
    distance = tl.where(count[None, :] > 0.0, within[None, :] - 2.0 * sums, float("inf"))
    distance = tl.where(distance == distance, distance, float("inf"))
    return tl.argmin(distance, 1).to(tl.int32)


@triton.jit
def _choose(gram, high, middle, low, label, cluster, holds, keep, TOKENS: tl.constexpr):
    """Which tokens to keep: the nearest of each cluster, and the farthest of the others for empty clusters."""
    token = tl.arange(0, TOKENS)
    member = label[:, None] == cluster[None, :]
    sums, count, within = _to_clusters(high, middle, low, label, cluster)
    norm = tl.sum(tl.where(token[:, None] == token[None, :], gram, 0.0), 1)
    distance = norm + tl.sum(tl.where(member, within[None, :] - 2.0 * sums, 0.0), 1)
    distance = tl.where(distance == distance, distance, float("inf"))
    near = tl.where(member, distance[:, None], float("inf"))
    near = member & ((near == tl.min(near, 0)[None, :]) | (count <= 2.0)[None, :])
    first = tl.min(tl.where(near, token[:, None], TOKENS), 0)                           # ties to the oldest
    keep_mask = tl.sum((token[:, None] == first[None, :]).to(tl.int32), 1) > 0
    missing = keep - tl.sum((count > 0.0).to(tl.int32), 0)
    farness = tl.where(holds & (keep_mask == 0), distance, float("-inf"))
    ahead = (farness[None, :] > farness[:, None]) | (
        (farness[None, :] == farness[:, None]) & (token[None, :] < token[:, None])
    )
    return keep_mask | (holds & (keep_mask == 0) & (tl.sum(ahead.to(tl.int32), 1) < missing))


@triton.jit
def representatives(
    gram, holds, size, keep, assignments,
    TOKENS: tl.constexpr, CLUSTERS: tl.constexpr, ITERATIONS: tl.constexpr, RECORD: tl.constexpr,
):
    """Which of a segment's first `size` tokens to keep, [TOKENS] bool, from their Gram matrix; 0 < keep < size.

    RECORD: also stores the cluster of each token in every iteration in assignments [ITERATIONS, size].
    """
    token = tl.arange(0, TOKENS)
    cluster = tl.arange(0, CLUSTERS)
    high, middle, low = bfloat16_terms(gram)
    begins = (token[:, None] == (cluster * size // keep)[None, :]) & (cluster < keep)[None, :]
    label = tl.max(tl.where(begins, cluster[None, :], -1), 1)
    nearest = tl.zeros([TOKENS], tl.int32)
    moved = 1
    for iteration in range(ITERATIONS):
        # If no token moved, none will move later.
        if moved > 0:
            found = _nearest(high, middle, low, label, cluster)
            moved = tl.sum((holds & ((found != nearest) | (iteration == 0))).to(tl.int32), 0)
            nearest = found
            label = tl.where(holds, nearest, -1)
        if RECORD:
            tl.store(assignments + iteration * size + token, nearest.to(tl.int64), mask=holds)
    return _choose(gram, high, middle, low, label, cluster, holds, keep, TOKENS)


@triton.jit(do_not_specialize=[
    "heads", "key_slots", "channels", "segments", "length", "most", "key_b", "key_h", "key_s", "slots_b", "slots_m",
    "keep_b",
])
def representatives_kernel(
    key, slots, keeps, keep_mask, indices, assignments, heads, key_slots, channels, segments, length, most,
    key_b, key_h, key_s, key_d, slots_b, slots_m, slots_l, keep_b, keep_m,
    CHANNELS: tl.constexpr, TOKENS: tl.constexpr, CLUSTERS: tl.constexpr, ITERATIONS: tl.constexpr,
    UNIT: tl.constexpr, RECORD: tl.constexpr,
):
    """Program (b, m): which tokens of a segment to keep. Keys' strides and number of channels are divided by UNIT.
    Slots from key_slots on are not read: their keys count as 0. RECORD: also stores the indices of these tokens, and
    all assignments."""
    segment = tl.program_id(0).to(tl.int64)
    b, m = segment // segments, segment % segments
    token = tl.arange(0, TOKENS)
    at = slots + b * slots_b + m * slots_m + token.to(tl.int64) * slots_l
    slot = tl.load(at, mask=token < length, other=-1)
    holds = slot >= 0
    size = tl.sum(holds.to(tl.int32), 0)
    keep = tl.load(keeps + b * keep_b + m * keep_m)
    kept = holds & (keep > 0)
    if (keep > 0) & (keep < size) & (keep <= most):
        leading = tl.zeros([TOKENS, TOKENS], tl.float32)
        rest = tl.zeros([TOKENS, TOKENS], tl.float32)
        rows = key + b * key_b * UNIT + slot[:, None] * (key_s * UNIT)
        for _ in range(heads):
            for start in range(0, channels * UNIT, CHANNELS):
                d = start + tl.arange(0, CHANNELS)
                mask = (holds & (slot < key_slots))[:, None] & (d < channels * UNIT)[None, :]
                x = float32(tl.load(rows + d.to(tl.int64)[None, :] * key_d, mask=mask, other=0.0))
                leading, rest = add_gram(leading, rest, centred(x, holds, size))
            rows += key_h * UNIT
        gram = whole_gram(leading, rest)
        kept = representatives(
            gram, holds, size, keep.to(tl.int32), assignments, TOKENS, CLUSTERS, ITERATIONS, RECORD
        )
        if RECORD:
            place = tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(indices + place, token.to(tl.int64), mask=kept)
    tl.store(keep_mask + segment * length + token, kept, mask=token < length)
