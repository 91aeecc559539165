"""Which tokens of past thoughts stay (TBE, section 3.3): how many per segment, and which of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention import accumulate_dtype
from ..selection import top_k, victims
from .contract import AnnealResult, RepresentativesResult
from .contract_thoughts import check_anneal, check_segment, check_segments

#: Rounds of k-means.
ITERATIONS = 10


def anneal(
    size: Tensor, level: Tensor, thought: Tensor, current: Tensor, trajectory_change: Tensor, *,
    live: Tensor, budget: int, retention: Sequence[int],
) -> AnnealResult:
    """How many tokens each segment keeps (definition 3, section 3.3.2). Integers alone: nothing to round.

    size, level, thought [B, M] int64: the segments of each row, oldest first: tokens (0: there is no such segment),
    how often it was selected, its `Thought`. current [B] int64: the segment that is being written; eviction leaves it
    and what comes after it alone. trajectory_change [B] bool: a transition thought has just ended (case 1): every
    segment before `current` is selected once. Then, while the row's `live` [B] int64 tokens (of all segments and the
    buffer) exceed `budget` (case 2), the least important segment before `current` that is still above its floor is
    selected, T before E before R, then the oldest. A segment that is selected for the n-th time keeps at most
    retention[n - 1] tokens, of a retention that does not increase; beyond its end, and as the floor, its last entry.
    """
    retention = check_anneal(size, level, thought, current, trajectory_change, live, budget, retention)
    sizes, levels, over = size.tolist(), level.tolist(), []
    for row, (thoughts, end) in enumerate(zip(thought.tolist(), current.tolist(), strict=True)):
        sizes_of, levels_of, tokens = sizes[row], levels[row], int(live[row])
        earlier = [segment for segment, held in enumerate(sizes_of) if segment < end and held > 0]

        def select(segment: int, sizes_of: list[int] = sizes_of, levels_of: list[int] = levels_of) -> int:
            """One level down; returns how many tokens go."""
            before = sizes_of[segment]
            levels_of[segment] += 1
            sizes_of[segment] = min(before, retention[min(levels_of[segment], len(retention)) - 1])
            return before - sizes_of[segment]

        if trajectory_change[row]:                                                      # case 1
            tokens -= sum(select(segment) for segment in earlier)
        while tokens > budget:                                                          # case 2
            above = [segment for segment in earlier if sizes_of[segment] > retention[-1]]
            if not above:
                break
            tokens -= select(min(above, key=lambda segment: (thoughts[segment], segment)))
        over.append(tokens > budget)
    made = (torch.tensor(values, device=size.device) for values in (sizes, levels, over))
    return AnnealResult(*made)


def select_representatives(key_segment: Tensor, keep: int) -> RepresentativesResult:
    """The tokens of a segment that stand for the others, by k-means on their keys (section 3.3.2, D.4).

    key_segment [Hkv, L, D], post-RoPE keys of all KV heads, oldest token first, or [L, F]: one vector per token. Keeps
    exactly min(keep, L) tokens; keep of at least L keeps all, each a cluster of its own.

    k = keep clusters begin at the tokens (i L) // k. Each of ITERATIONS rounds assigns every token to the nearest
    centroid, of equals the first; a centroid is then the mean of its tokens, and a cluster without tokens has none any
    more. In the end each cluster keeps the token nearest to its centroid, of equals the oldest; of a cluster of two,
    both equally near, the older. In place of each empty cluster, the token farthest from its centroid stays that does
    not stay anyhow, of equals the oldest.
    """
    token = check_segment(key_segment, keep)                                            # [L, F]
    size = len(token)
    if keep >= size:
        index = torch.arange(size, device=token.device)
        return RepresentativesResult(index, index.repeat(ITERATIONS, 1))
    # Dense: along other strides equal keys may be summed in different orders.
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
    """`select_representatives` of many segments of a cache: which of their tokens stay, [B, M, L] bool.

    key [B, Hkv, S, D]; slots [B, M, L] int64: where the tokens of each row's segments lie, oldest first, then -1; keep
    [B, M] int64: to how many a segment shrinks. One that keeps more than `most` (default: L) is left as it is.
    """
    most = check_segments(key, slots, keep, most)
    stays = slots >= 0
    for row, segment in stays.any(-1).nonzero().tolist():
        held, count = slots[row, segment][stays[row, segment]], int(keep[row, segment])
        if count < min(len(held), most + 1):
            kept = select_representatives(key[row][:, held], count).indices if count > 0 else held[:0]
            stays[row, segment] = torch.isin(torch.arange(slots.shape[-1], device=key.device), kept)
    return stays


def _distances(token: Tensor, centroid: Tensor) -> Tensor:
    """||x_j - c_i||^2: token [L, F], centroid [k, F] -> [L, k]."""
    return (token[:, None] - centroid).square().sum(-1)


def _nearest_then_farthest(member: Tensor, distance: Tensor) -> Tensor:
    """The tokens that stay, ascending: of each cluster the nearest, then the farthest in place of the empty ones.

    member [k, L] bool; distance [L]: of each token to its own centroid.
    """
    stays = torch.zeros_like(member[0])
    for cluster in member:
        tokens = cluster.nonzero()[:, 0]                                                # oldest first
        if len(tokens) > 2:
            tokens = tokens[victims(distance[tokens], 1)]
        stays[tokens[:1]] = True
    rest = (~stays).nonzero()[:, 0]
    stays[rest[top_k(distance[rest], len(member) - int(stays.sum()))]] = True
    return stays.nonzero()[:, 0]
