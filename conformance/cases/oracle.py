"""The truth: the reference run in float64 on the low-precision inputs of the implementation under test.

`oracle` runs any reference function this way. `attend` does so for attention and keeps everything that the error bounds
need: logits, the magnitudes of the dot products behind them, normalisers, weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...reference import attention as eager
from ...reference.contract.arguments import resolve_scale

T = TypeVar("T")


def upcast(value: Any) -> Any:
    """Convert a floating tensor to float64, which is exact; return anything else unchanged."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def upcast_all(inputs: dict[str, Any]) -> dict[str, Any]:
    """`upcast` every keyword argument."""
    return {name: upcast(value) for name, value in inputs.items()}


def oracle(function: Callable[..., T], case: Any) -> T:
    """Call a reference function in float64 with case.inputs, a dict of keyword arguments. A case of codes with scales
    has the numbers that they stand for as `exact_inputs`."""
    return function(**upcast_all(getattr(case, "exact_inputs", None) or case.inputs))


@dataclass(frozen=True)
class Attention:
    """Exact attention of Q queries per head over S slots in float64, with its inputs.

    logit, dot [B, Hq, Q, S]: scale * q . k (-inf where the slot is masked for the query), and |scale| * sum_d |q_d k_d|
    (0 there). value [B, Hkv, S, D], zero where unoccupied. dtype: that of the low-precision inputs. rotation: the error
    of the logits by rounded queries and keys, [B, Hq, Q, S], 0 where masked; None if they are exact. `dot` is then of
    the largest rounded queries and keys. scales: the largest factors of FP8 keys and values; None for other types.
    softcap: that of the logits, which were `uncapped` before; both None without one. sink_logits: those of attention
    sinks, [Hq] float64, or None; they belong to no slot.
    """

    logit: Tensor
    dot: Tensor
    value: Tensor
    occupied: Tensor
    scale: float
    dtype: torch.dtype
    rotation: Tensor | None = None
    scales: tuple[float, float] | None = None
    softcap: float | None = None
    uncapped: Tensor | None = None
    sink_logits: Tensor | None = None

    def capped(self, softcap: float | None) -> Attention:
        """The attention by softcapped logits."""
        if softcap is None:
            return self
        logit = eager.softcapped(self.logit, softcap).masked_fill(~self.seen, -torch.inf)
        return replace(self, logit=logit, softcap=softcap, uncapped=self.logit)

    def before(self, end: int) -> Attention:
        """The attention of the same queries to the first `end` slots alone."""
        hidden = torch.arange(self.logit.shape[-1], device=self.logit.device) >= end
        return replace(self, logit=self.logit.masked_fill(hidden, -torch.inf), dot=self.dot.masked_fill(hidden, 0))

    @property
    def query_heads(self) -> int:
        return self.logit.shape[1]

    @property
    def key_value_heads(self) -> int:
        return self.value.shape[1]

    @property
    def head_dim(self) -> int:
        return self.value.shape[-1]

    @cached_property
    def seen(self) -> Tensor:
        """The slots that a query attends to, [B, Hq, Q, S] bool."""
        return self.logit != -torch.inf

    @cached_property
    def count(self) -> Tensor:
        """The number of slots that a query attends to, [B, Hq, Q, 1] float64, at least 1."""
        return self.seen.sum(-1, keepdim=True).clamp_min(1).double()

    @property
    def sinks(self) -> int:
        """The number of sinks of a query."""
        return int(self.sink_logits is not None)

    @cached_property
    def row_max(self) -> Tensor:
        """The row maximum m, [B, Hq, Q, 1], with that of the sink; 0 for a query that attends to nothing."""
        row_max = eager.with_sinks(self.logit, self.sink_logits).amax(-1, keepdim=True)
        return row_max.masked_fill(row_max == -torch.inf, 0)

    @cached_property
    def lse(self) -> Tensor:
        """log sum_j exp(s_j), with the sink, [B, Hq, Q, 1]; 0 for a query that attends to nothing."""
        lse = eager.with_sinks(self.logit, self.sink_logits).logsumexp(-1, keepdim=True)
        return lse.masked_fill(lse == -torch.inf, 0)

    @cached_property
    def weight(self) -> Tensor:
        """a_j, [B, Hq, Q, S]; 0 where masked."""
        return eager.softmax(self.logit, self.sink_logits)

    @cached_property
    def output(self) -> Tensor:
        """sum_j a_j v_j, [B, Hq, Q, D]."""
        return eager.weighted_values(self.weight, self.value, self.occupied)

    @cached_property
    def magnitude(self) -> Tensor:
        """||v_j||_1, [B, Hkv, S]."""
        return self.value.abs().sum(-1)


def attend(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float | None = None, causal: bool = False,
    softcap: float | None = None, sink_logits: Tensor | None = None,
) -> Attention:
    """Exact attention of low-precision inputs: query [B, Hq, Q, D], or [B, Hq, D] for Q = 1.

    key, value [B, Hkv, S, D]; occupied [B, S] or [B, Hkv, S] bool. causal: the queries belong to the last Q of the S
    tokens and attend to no later ones; queries at unoccupied positions (padding) attend to nothing.
    """
    factor = resolve_scale(scale, query.shape[-1])
    block = query if query.dim() == 4 else query[:, :, None]
    q, k = upcast(block), upcast(key)
    if causal:
        padding = ~eager.per_kv_head(occupied)[..., key.shape[2] - block.shape[2]:, None]    # [B, 1 or Hkv, Q, 1]
        padding = eager.per_query_head(padding, q.shape[1]) if padding.shape[1] > 1 else padding
        q = q.masked_fill(padding, 0)
        logit = eager.causal_logits(q, k, occupied, scale=factor).masked_fill(padding, -torch.inf)
    else:
        logit = eager.logits(q, k, occupied, scale=factor)
    dot = eager.logits(q.abs(), k.abs(), occupied, scale=abs(factor)).masked_fill(logit == -torch.inf, 0)
    found = Attention(logit, dot, eager.zero_unoccupied(upcast(value), occupied), occupied, factor, query.dtype)
    return replace(found.capped(softcap), sink_logits=upcast(sink_logits))
