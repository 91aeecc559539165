"""KeyDiff's and SnapKV's choices in Python loops over rows, KV heads and queries. Results are dictionaries."""

from __future__ import annotations

import types

import torch
from torch import Tensor

from .... import Capabilities

CAPABILITIES = Capabilities(
    max_batch=4, max_slots=512,  # more would take seconds
    options={"anchor": ("mean_normalized",), "similarity": ("cosine",)}, validates_arguments=False,
)


def _mask(given: Tensor | None, key: Tensor, row: int, head: int, default: bool) -> Tensor:
    """The mask [S] of a row and KV head, of one [B, S] or [B, Hkv, S]."""
    if given is None:
        return torch.full(key.shape[2:3], default, device=key.device)
    return given[row] if given.dim() == 2 else given[row, head]


def _first(rank: Tensor, held: Tensor, spared: Tensor, count: int) -> list[int]:
    """The indices of the `count` tokens that stay, ascending: spared ones, then those of the highest rank, and of equal
    ones the higher index."""
    ranks, is_held, is_spared = rank.tolist(), held.tolist(), spared.tolist()
    indices = [index for index in range(len(ranks)) if is_held[index]]
    indices.sort(key=lambda index: (is_spared[index], ranks[index], index), reverse=True)
    return sorted(indices[:count])


def _padded(kept: list[int], count: int, device: torch.device) -> Tensor:
    return torch.tensor([*kept, *[-1] * (count - len(kept))], dtype=torch.int64, device=device)


def _unit(vector: Tensor) -> Tensor:
    largest = vector.abs().max()
    if largest == 0:
        return vector
    scaled = vector / largest
    return scaled / scaled.square().sum().sqrt()


def _gathered(tensor: Tensor, kept: Tensor) -> Tensor:
    """[B, Hkv, T, D] at kept [B, Hkv, N], zeros for -1."""
    made = tensor.new_zeros(*kept.shape, tensor.shape[3])
    for row in range(kept.shape[0]):
        for head in range(kept.shape[1]):
            found = kept[row, head][kept[row, head] >= 0]
            made[row, head, :len(found)] = tensor[row, head, found]
    return made


# KeyDiff --------------------------------------------------------------------------------------------------------------


def _dissimilarities(key: Tensor, held: Tensor, *, of_anchor: bool) -> Tensor:
    """Of one KV head's keys [S, D]: minus the cosine with the anchor, or with the sum of the units. [S] float64."""
    units = [_unit(one.double()) if here else None for one, here in zip(key, held.tolist(), strict=True)]
    anchor = torch.zeros_like(key[0], dtype=torch.float64)
    for unit in units:
        anchor = anchor if unit is None else anchor + unit
    anchor = _unit(anchor) if of_anchor else anchor
    none = torch.tensor(-torch.inf, dtype=torch.float64, device=key.device)
    return torch.stack([none if unit is None else -(unit * anchor).sum() for unit in units])


def score(
    key: Tensor, *, occupied: Tensor | None = None, anchor: str = "mean_normalized", similarity: str = "cosine"
) -> Tensor:
    return torch.stack([
        torch.stack([
            _dissimilarities(key[row, head], _mask(occupied, key, row, head, True), of_anchor=True)
            for head in range(key.shape[1])
        ]) for row in range(key.shape[0])
    ]).float()


def evict(
    key: Tensor, value: Tensor, budget: int, *, occupied: Tensor | None = None, recent: int = 0,
    protected: Tensor | None = None, anchor: str = "mean_normalized", similarity: str = "cosine",
) -> dict[str, Tensor]:
    count, rows = min(budget, key.shape[2]), []
    for row in range(key.shape[0]):
        heads = []
        for head in range(key.shape[1]):
            held = _mask(occupied, key, row, head, True)
            spared = _mask(protected, key, row, head, False).clone()
            spared[held.nonzero()[:, 0].flip(0)[:recent]] = True
            # Rounded, so that equal keys tie although float64 sums may differ.
            rank = _dissimilarities(key[row, head], held, of_anchor=False).float()
            heads.append(_padded(_first(rank, held, spared, count), count, key.device))
        rows.append(torch.stack(heads))
    kept = torch.stack(rows)
    return {"key": _gathered(key, kept), "value": _gathered(value, kept), "kept": kept, "occupied": kept >= 0}


# SnapKV ---------------------------------------------------------------------------------------------------------------


def _received(query: Tensor, key: Tensor, held: Tensor, scale: float) -> Tensor:
    """The mean attention that each token gets from the window's queries of one query head: [T] float64."""
    window, length = query.shape[0], key.shape[0]
    total, observing = torch.zeros(length, dtype=torch.float64, device=key.device), 0
    key = key.double().where(held[:, None], 0)
    for number in range(window):
        end = length - window + number + 1
        if not bool(held[end - 1]):
            continue
        logit = (query[number].double() * key[:end]).sum(-1) * scale
        total[:end] += logit.where(held[:end], -torch.inf).softmax(0)
        observing += 1
    return total / max(observing, 1)


def _mean(tensors: list[Tensor]) -> Tensor:
    total = torch.zeros_like(tensors[0])
    for tensor in tensors:
        total = total + tensor
    return total / len(tensors)


def _pooled(received: Tensor, width: int) -> Tensor:
    """The mean of the `width` tokens around each, zeros beyond the ends."""
    padded = torch.nn.functional.pad(received, (width // 2, width // 2))
    return torch.stack([padded[start:start + width].sum() / width for start in range(len(received))])


def compress(
    query_window: Tensor, key: Tensor, value: Tensor, budget: int, *, kernel_size: int = 5,
    occupied: Tensor | None = None, protected: Tensor | None = None, shared_heads: bool = False,
    scale: float | None = None,
) -> dict[str, Tensor]:
    heads, length, window = key.shape[1], key.shape[2], query_window.shape[2]
    group, count = query_window.shape[1] // heads, min(budget, length)
    scale = key.shape[3] ** -0.5 if scale is None else scale
    rows = []
    for row in range(key.shape[0]):
        held, spared = _mask(occupied, key, row, 0, True), _mask(protected, key, row, 0, False)
        received = [
            _mean([
                _received(query_window[row, head * group + number], key[row, head], held, scale)
                for number in range(group)
            ]) for head in range(heads)
        ]
        received = [_mean(received)] if shared_heads else received
        kept = []
        for one in received:
            rank = torch.full((length,), torch.inf, device=key.device)
            if length > window:
                rank[:-window] = _pooled(one[:-window], kernel_size).float()
            kept.append(_padded(_first(rank, held, spared, count), count, key.device))
        rows.append(torch.stack(kept))
    found = torch.stack(rows)
    wide = found.expand(-1, heads, -1)
    return {
        "key": _gathered(key, wide), "value": _gathered(value, wide), "kept": found[:, 0] if shared_heads else found,
    }


keydiff = types.SimpleNamespace(score=score, evict=evict)
snapkv = types.SimpleNamespace(compress=compress)
