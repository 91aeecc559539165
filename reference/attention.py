"""Eager attention over a cache of slots: grouped query heads, logits, softmax, output.

All functions compute in `accumulate_dtype`: float64 for float64 inputs (the oracle), float32 for all others.
The contents of unoccupied slots, NaN included, do not affect any result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

INF = math.inf


def accumulate_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for a float64 tensor, float32 for any other."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def exact(tensor: Tensor) -> torch.autocast:
    """A context without autocast, which would lower the precision of matrix products."""
    return torch.autocast(tensor.device.type, enabled=False)


def per_query_head(tensor: Tensor, query_heads: int) -> Tensor:
    """Repeat each KV head for its group: [B, Hkv, ...] -> [B, Hq, ...]. Query head h reads KV head h // G."""
    return tensor.repeat_interleave(query_heads // tensor.shape[1], dim=1)


def per_kv_head(mask: Tensor) -> Tensor:
    """A slot mask [B, S] or [B, Hkv, S] as [B, 1 or Hkv, S]."""
    return mask if mask.dim() == 3 else mask[:, None]


def zero_unoccupied(value: Tensor, occupied: Tensor) -> Tensor:
    """value [B, Hkv, S, D] with zeros in unoccupied slots, since a weight of 0 times NaN is NaN."""
    return value.masked_fill(~per_kv_head(occupied)[..., None], 0)


def sum_in_order(tensor: Tensor, dim: int) -> Tensor:
    """The sum over a dimension, from its first element to its last.

    torch.sum may choose another order for the last elements of the other dimensions, and equal tokens must get equal
    sums. The dimension must not be empty.
    """
    total, *rest = tensor.unbind(dim)
    for part in rest:
        total = total + part
    return total


def logsumexp_in_order(tensor: Tensor, dim: int) -> Tensor:
    """log sum exp over a dimension; equal for equal elements wherever they lie, see `sum_in_order`."""
    return tensor.movedim(dim, -1).contiguous().logsumexp(-1)  # torch adds along rows of memory in one order


def softcapped(logit: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(logit / softcap) (Gemma 2, section 2); the logit itself without a softcap."""
    return logit if softcap is None else softcap * (logit / softcap).tanh()


def logits(
    query: Tensor, key: Tensor, occupied: Tensor, *, scale: float, softcap: float | None = None
) -> Tensor:
    """scale * q . k for every slot (eq. 1 of every paper), `softcapped`, -inf where unoccupied.

    query [B, Hq, D] or [B, Hq, Q, D]; key [B, Hkv, S, D]; occupied [B, S] or [B, Hkv, S] bool.
    Returns [B, Hq, S] or [B, Hq, Q, S] in accumulate_dtype.
    """
    dtype, slots = accumulate_dtype(query), key.shape[2]
    with exact(query):
        ends = [slots] * (query.shape[2] if query.dim() == 4 else 1)
        return _logits(query.to(dtype), key.to(dtype), occupied, scale, softcap, ends)


def _logits(
    query: Tensor, key: Tensor, occupied: Tensor, scale: float, softcap: float | None, ends: Sequence[int]
) -> Tensor:
    """`logits`, of query i only before slot ends[i], beyond it -inf."""
    # Contiguous, since the order of a sum over channels depends on strides.
    keys, slots = zero_unoccupied(key, occupied).contiguous()[:, :, None], key.shape[2]  # [B, Hkv, 1, S, D]
    # No matrix product: it may sum the last slots in another order, and equal keys must get equal logits.
    grouped = query.contiguous().unflatten(1, (keys.shape[1], -1))                     # [B, Hkv, G, D] or with Q
    queries = grouped if query.dim() == 4 else grouped[:, :, :, None]                  # [B, Hkv, G, Q, D]
    product = queries.new_full((*queries.shape[:-1], slots), -INF)
    for number, end in enumerate(ends):
        part = (queries[..., number, None, :] * keys[..., :end, :]).sum(-1)
        product[..., number, :end] = softcapped(scale * part, softcap)
    product = product.flatten(1, 2)                                                    # [B, Hq, Q, S]
    mask = per_kv_head(occupied)
    mask = per_query_head(mask, query.shape[1]) if mask.shape[1] > 1 else mask         # [B, 1 or Hq, S]
    product = product.masked_fill(~mask[:, :, None], -INF)
    return product if query.dim() == 4 else product[:, :, 0]


def softmax(logit: Tensor, sink_logits: Tensor | None = None) -> Tensor:
    """Softmax over the last dimension; a row that is all -inf (no occupied slot) gives zeros instead of NaN.

    sink_logits [Hq], for logit [B, Hq, Q, S]: of each query head's attention sink, a further logit in the denominator.
    The weights then sum to less than 1.
    """
    if sink_logits is not None:
        return softmax(with_sinks(logit, sink_logits))[..., :-1]
    empty = logit.amax(-1, keepdim=True) == -INF
    return logit.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)


def with_sinks(logit: Tensor, sink_logits: Tensor | None) -> Tensor:
    """logit [B, Hq, ..., S] with those of the sinks, [Hq], as a last slot, if there are any: [B, Hq, ..., S + 1]."""
    if sink_logits is None:
        return logit
    sinks = sink_logits.to(logit.dtype).view(-1, *[1] * (logit.dim() - 2))
    return torch.cat([logit, sinks.expand(*logit.shape[:-1], 1)], -1)


def attention_weights(query: Tensor, key: Tensor, occupied: Tensor, *, scale: float) -> Tensor:
    """softmax(scale * q . k) over the occupied slots: [B, Hq, S] (or [B, Hq, Q, S]) in accumulate_dtype."""
    return softmax(logits(query, key, occupied, scale=scale))


def weighted_values(weight: Tensor, value: Tensor, occupied: Tensor) -> Tensor:
    """sum_j a_j v_j: weight [B, Hq, S] or [B, Hq, Q, S] -> [B, Hq, D] or [B, Hq, Q, D] in weight's dtype."""
    values = per_query_head(zero_unoccupied(value, occupied).to(weight.dtype), weight.shape[1])
    with exact(weight):
        return weight @ values if weight.dim() == 4 else (weight[:, :, None] @ values)[:, :, 0]


def causal_logits(
    query: Tensor, key: Tensor, occupied: Tensor, *, scale: float, softcap: float | None = None
) -> Tensor:
    """Causal `logits` of the last Q of T tokens: [B, Hq, Q, T], -inf for later tokens and unoccupied slots.

    query [B, Hq, Q, D], of the last Q tokens; key [B, Hkv, T, D]; occupied [B, T] bool.
    """
    dtype, total = accumulate_dtype(query), key.shape[2]
    with exact(query):
        ends = range(total - query.shape[2] + 1, total + 1)
        return _logits(query.to(dtype), key.to(dtype), occupied, scale, softcap, ends)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float, softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Full causal attention of a prompt: query [B, Hq, T, D], key and value [B, Hkv, T, D], occupied [B, T] bool.

    Returns [B, Hq, T, D] in query's dtype, zeros at unoccupied positions (padding).
    """
    weight = softmax(causal_logits(query, key, occupied, scale=scale, softcap=softcap), sink_logits)
    output = weighted_values(weight, value, occupied)
    return output.masked_fill(~occupied[:, None, :, None], 0).to(query.dtype)
