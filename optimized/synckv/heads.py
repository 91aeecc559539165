"""The similarity of heads, computed on the GPU, and their clusters, found on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference.contract.synckv.arguments import check_heads_attention, check_sets, check_similarity
from ...reference.contract.synckv.types import HeadClusters
from .._common.launch import SMALL_TILES, check_launchable, on_device_of
from .._common.operation import operation
from ._select import select

__all__ = ["cluster_heads", "head_similarity", "overlap"]

ITERATIONS = 20


def overlap(first: Tensor, second: Tensor) -> Tensor:
    """The overlap coefficient of index sets (SyncKV eq. 1): first [..., N], second [..., M] int64, -1 for none.

    Returns [...] float64. Semantics: `kvtwin.reference.synckv.overlap`. TypeError or ValueError for invalid arguments,
    including empty sets, and for CPU tensors outside Triton's interpreter.
    """
    check_sets(first, second)
    check_launchable(first=first, second=second)
    common = common_tokens(first.reshape(-1, 1, first.shape[-1]), second.reshape(-1, 1, second.shape[-1]))
    smaller = torch.minimum((first >= 0).sum(-1), (second >= 0).sum(-1))
    return common.view(smaller.shape).double() / smaller


def head_similarity(attention: Tensor, k: int, *, occupied: Tensor | None = None) -> Tensor:
    """The overlap of the top-k tokens of each pair of heads, averaged over steps (SyncKV eq. 2).

    attention [steps, Hkv, n] float32, float16 or bfloat16, any strides; occupied [steps, n] bool, by default all.
    Returns [Hkv, Hkv] float64. Semantics: `kvtwin.reference.synckv.head_similarity`. TypeError or ValueError for
    invalid arguments, including steps without tokens, for inputs that require grad, and for CPU tensors outside
    Triton's interpreter.
    """
    check_heads_attention(attention, k, occupied)
    check_launchable(attention=attention, occupied=occupied)
    steps, heads, tokens = attention.shape
    if occupied is None:
        occupied = attention.new_ones((steps, tokens), dtype=torch.bool)
    nothing = attention.new_empty((steps, heads, 0), dtype=torch.int64)
    best = select(attention, occupied, nothing, min(k, tokens))
    size = occupied.sum(-1).clamp_max(k)[:, None, None]
    # Divide by a tensor: torch multiplies by the rounded inverse of a number, and the diagonal would not be 1.
    share = (common_tokens(best, best).double() / size).sum(0) / size.new_full((1, 1), steps)
    return share.triu() + share.triu(1).T                                               # symmetric despite rounding


def cluster_heads(similarity: Tensor, clusters: int) -> HeadClusters:
    """Clusters of similar heads, each represented by the head nearest to its centroid (SyncKV B.1).

    similarity [Hkv, Hkv] floating, on any device. Computed on the host in double precision, with every sum in ascending
    order. Semantics and errors: `kvtwin.reference.synckv.cluster_heads`.
    """
    clusters = check_similarity(similarity, clusters)
    table: list[list[float]] = similarity.detach().double().tolist()
    largest = max(map(max, table))
    points = [[largest - number for number in row] for row in table]
    heads = range(len(points))
    centres = [points[0]]
    while len(centres) < clusters:
        # max returns the first of equal elements.
        centres.append(points[max(heads, key=lambda head: min(_distance(points[head], at) for at in centres))])
    labels: list[int] = []
    for _ in range(ITERATIONS):
        labels = [_nearest(range(clusters), centres, point) for point in points]
        for cluster in range(clusters):
            if cluster not in labels:
                others = [head for head in heads if labels.count(labels[head]) > 1]
                labels[max(others, key=lambda head: _distance(points[head], centres[labels[head]]))] = cluster
        centres = [_mean([points[head] for head in heads if labels[head] == cluster]) for cluster in range(clusters)]
    nearest = []
    for cluster, centre in enumerate(centres):
        members = [head for head in heads if labels[head] == cluster]
        # Two heads are equally near to their mean; rounding must not decide between them.
        nearest.append(members[0] if len(members) <= 2 else _nearest(members, points, centre))
    return HeadClusters(tuple(labels), tuple(nearest))


def _distance(point: list[float], centre: list[float]) -> float:
    """The squared distance. A loop, because Python's sum compensates for rounding since version 3.12."""
    total = 0.0
    for x, c in zip(point, centre, strict=True):
        total += (x - c) * (x - c)
    return total


def _nearest(members: Sequence[int], points: list[list[float]], centre: list[float]) -> int:
    # min returns the first of equal elements.
    return min(members, key=lambda number: _distance(points[number], centre))


def _mean(points: list[list[float]]) -> list[float]:
    total = points[0]
    for point in points[1:]:
        total = [one + other for one, other in zip(total, point, strict=True)]
    return [one / len(points) for one in total]


# Operation -----------------------------------------------------------------------------------------------------------


@operation("kvtwin::synckv_common_tokens", mutates_args=())
def common_tokens(first: Tensor, second: Tensor) -> Tensor:
    """The number of tokens in both sets: first [R, I, N], second [R, J, M] int64, -1 for none -> [R, I, J] int64."""
    first, second = first.contiguous(), second.contiguous()
    rows, left, size = first.shape
    right, other_size = second.shape[1:]
    block = 16 if SMALL_TILES else 128
    tiles = triton.cdiv(size, block)
    counts = torch.empty(rows, left, right, tiles, dtype=torch.int32, device=first.device)
    with on_device_of(first):
        common_kernel[(rows * left * right * tiles,)](
            first, second, counts, size, other_size, left, right, tiles, BLOCK=block, num_warps=4
        )
    return counts.sum(-1)


@common_tokens.register_fake
def _(first: Tensor, second: Tensor) -> Tensor:
    return first.new_empty((*first.shape[:2], second.shape[1]))


@triton.jit(do_not_specialize=["size", "other_size", "left", "right", "tiles"])
def common_kernel(first, second, counts, size, other_size, left, right, tiles, BLOCK: tl.constexpr):
    """Program (tile, pair): counts the tokens of a tile of one set that the other set contains."""
    tile = tl.program_id(0) % tiles
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    one = pair // right
    other = one // left * right + pair % right
    number = tile * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(first + one * size + number, mask=number < size, other=-1)
    common = tl.zeros([BLOCK], tl.int32)
    for start in range(0, other_size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        rival = tl.load(second + other * other_size + place, mask=place < other_size, other=-1)
        common += tl.sum((token[:, None] == rival[None, :]).to(tl.int32), 1)
    tl.store(counts + pair * tiles + tile, tl.sum(tl.where(token >= 0, common, 0), 0))
