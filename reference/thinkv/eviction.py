"""Thought-based eviction (TBE, section 3.3): how many tokens each segment keeps, and which ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._ranks import Heads
from ..attention import accumulate_dtype
from ..contract.ranks import ProcessGroup, check_heads
from ..contract.thinkv.arguments import check_anneal, check_segment, check_segments
from ..contract.thinkv.types import AnnealResult, RepresentativesResult
from ..selection import top_k, victims

#: Iterations of k-means.
ITERATIONS = 10


def anneal(
    size: Tensor, level: Tensor, thought: Tensor, current: Tensor, trajectory_change: Tensor, *,
    live: Tensor, budget: int, retention: Sequence[int],
) -> AnnealResult:
    """How many tokens each segment keeps (definition 3, section 3.3.2), in integer arithmetic.

    size, level, thought [B, M] int64: the segments of each row, oldest first: their number of tokens (0: no such
    segment), how often they were selected, and their `Thought`. current [B] int64: the current segment; it and later
    ones are not reduced. trajectory_change [B] bool: a transition thought has just ended (case 1), and every segment
    before `current` is selected once. Then, while the row's `live` [B] int64 tokens (in all segments and the buffer)
    exceed `budget` (case 2), the least important segment before `current` that is above its minimum is selected: T
    before E before R, then the oldest. A segment that is selected for the n-th time keeps at most retention[n - 1]
    tokens; the last entry of retention applies to all further selections and is the minimum size. With a minimum of 0,
    a segment is evicted wholly, and not selected any more. TypeError or ValueError for invalid arguments.
    """
    retention = check_anneal(size, level, thought, current, trajectory_change, live, budget, retention)
    sizes, levels, over = size.tolist(), level.tolist(), []
    for row, (thoughts, end) in enumerate(zip(thought.tolist(), current.tolist(), strict=True)):
        sizes_of, levels_of, tokens = sizes[row], levels[row], int(live[row])
        earlier = [segment for segment, count in enumerate(sizes_of) if segment < end and count > 0]
        if trajectory_change[row]:                                                      # case 1
            tokens -= sum(_shrink(segment, sizes_of, levels_of, retention) for segment in earlier)
        while tokens > budget:                                                          # case 2
            above = [segment for segment in earlier if sizes_of[segment] > retention[-1]]
            if not above:
                break
            least = min(above, key=lambda segment: (thoughts[segment], segment))
            tokens -= _shrink(least, sizes_of, levels_of, retention)
        over.append(tokens > budget)
    return AnnealResult(*(torch.tensor(values, device=size.device) for values in (sizes, levels, over)))


def _shrink(segment: int, sizes: list[int], levels: list[int], retention: Sequence[int]) -> int:
    """Select a segment once: update its size and its level. Returns the number of tokens that it loses."""
    before = sizes[segment]
    levels[segment] += 1
    sizes[segment] = min(before, retention[min(levels[segment], len(retention)) - 1])
    return before - sizes[segment]


def select_representatives(
    key_segment: Tensor, keep: int, *, process_group: ProcessGroup | None = None, replicas: int = 1
) -> RepresentativesResult:
    """The tokens that represent a segment, by k-means on the keys (section 3.3.2, D.4).

    key_segment [Hkv, L, D], post-RoPE keys of all KV heads, oldest token first, or [L, F], one vector per token. Keeps
    exactly min(keep, L) tokens. With keep >= L all tokens are kept, each a cluster of its own.

    The k = keep initial centroids are the tokens (i L) // k. In each of ITERATIONS iterations, every token is assigned
    to the nearest centroid, ties to the first; then each centroid moves to the mean of its tokens. A cluster without
    tokens keep empty. Finally each cluster keeps the token nearest to its centroid, ties to the oldest; of a cluster of
    two, which are equally near, the older. For each empty cluster, one more token is kept: the farthest from its
    centroid among the others, ties to the oldest.

    process_group: the ranks that hold the keys of the other KV heads, of which every `replicas` in a row hold the same
    ones. All ranks keep the same tokens. TypeError or ValueError for invalid arguments.
    """
    token = check_segment(key_segment, keep)                                            # [L, F]
    size = len(token)
    check_heads(process_group, replicas, key_segment.shape[0], keep=keep, tokens=size)
    if process_group is not None:
        parts = key_segment if key_segment.dim() == 3 else key_segment[None]            # [Hkv, L, D]
        every = Heads(process_group, replicas).once(parts[None])[0]
        token = every.transpose(0, 1).flatten(1)                                        # [L, F] of all ranks
    if keep >= size:
        index = torch.arange(size, device=token.device)
        return RepresentativesResult(index, index.repeat(ITERATIONS, 1))
    # Contiguous: with other strides, equal keys may be summed in different orders.
    token = token.to(accumulate_dtype(token)).contiguous()
    centroid = token[torch.arange(keep, device=token.device) * size // keep]            # [k, F]
    empty = torch.zeros(keep, dtype=torch.bool, device=token.device)
    assignments = []
    for _ in range(ITERATIONS):
        distance = _distances(token, centroid).masked_fill(empty, torch.inf)            # [L, k]
        assignments.append(victims(distance, 1)[:, 0])
        member = assignments[-1] == torch.arange(keep, device=token.device)[:, None]    # [k, L]
        empty = ~member.any(-1)
        centroid = (token * member[..., None]).sum(1) / member.sum(-1, keepdim=True).clamp_min(1)
    own = _distances(token, centroid).gather(1, assignments[-1][:, None])[:, 0]         # [L]
    return RepresentativesResult(_nearest_then_farthest(member, own), torch.stack(assignments))


def segment_representatives(key: Tensor, slots: Tensor, keep: Tensor, *, most: int | None = None) -> Tensor:
    """`select_representatives` for many segments of a cache: the tokens to keep, [B, M, L] bool.

    key [B, Hkv, S, D]; slots [B, M, L] int64: the slots of the tokens of each row's segments, below S, oldest first,
    then -1; keep [B, M] int64: the number of tokens to keep. Segments that keep more than `most` tokens (by default L)
    are left unchanged. TypeError or ValueError for invalid arguments.
    """
    most = check_segments(key, slots, keep, most)
    result = slots >= 0
    for row, segment in result.any(-1).nonzero().tolist():
        members, count = slots[row, segment][result[row, segment]], int(keep[row, segment])
        if count < min(len(members), most + 1):
            kept = select_representatives(key[row][:, members], count).indices if count > 0 else members[:0]
            result[row, segment] = torch.isin(torch.arange(slots.shape[-1], device=key.device), kept)
    return result


def _distances(token: Tensor, centroid: Tensor) -> Tensor:
    """Squared distances ||x_j - c_i||^2: token [L, F], centroid [k, F] -> [L, k]."""
    return (token[:, None] - centroid).square().sum(-1)


def _nearest_then_farthest(member: Tensor, distance: Tensor) -> Tensor:
    """The tokens to keep, ascending: the nearest of each cluster, and the farthest of the others for empty clusters.

    member [k, L] bool: the tokens of each cluster; distance [L]: of each token to its own centroid.
    """
    keep = torch.zeros_like(member[0])
    for cluster in member:
        tokens = cluster.nonzero()[:, 0]                                                # oldest first
        if len(tokens) > 2:
            tokens = tokens[victims(distance[tokens], 1)]
        keep[tokens[:1]] = True
    rest = (~keep).nonzero()[:, 0]
    keep[rest[top_k(distance[rest], len(member) - int(keep.sum()))]] = True
    return keep.nonzero()[:, 0]
