"""Adapter for kvpress: ``--kv-impl=kvtwin.conformance.adapters.kvpress``. Needs the extra ``kvpress``.

A press is attached to an attention layer of a model and compresses the prompt's cache. Here the layer is a stub whose
query projection is the identity and whose RoPE angle is 0, so that the press uses the test's queries. Scores and
choices come from kvpress's own ``score`` and ``compress``. The adapter translates:

- A budget becomes a compression ratio with half a token of margin, since 1 - budget / tokens, rounded, can keep one
  token too few.
- The kept tokens are found by calling ``compress`` with the tokens' indices as values. They are sorted, since kvpress
  returns tokens in the order of their scores.
- Scores are converted to float32. SnapKVPress gives the window's tokens the largest score of the batch plus 1; ours is
  +inf.
- A press returns no attention output; the model's layer computes it. The adapter uses torch's attention, which is not
  under test.

Not provided: states (a press only compresses a prompt), heads that share a choice, pairwise scores.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import Capabilities

try:
    from kvpress import KeyDiffPress, ScorerPress, SnapKVPress, StreamingLLMPress, TOVAPress
except ImportError as error:
    raise ImportError(
        f"kvpress cannot be imported ({error}): python -m pip install 'kvtwin[kvpress]', in an environment without "
        "kvtwin's extra hf, since the two want different versions of transformers"
    ) from error


#: Presses choose for each KV head, in their own order among equal tokens. They take neither masks nor scales.
CAPABILITIES = Capabilities(
    masks=False, protected=False, scale=False, per_head=(True,), ties="any", validates_arguments=False,
    options={"anchor": ("mean_normalized",), "similarity": ("cosine",), "recent": (0,)},
)


def score_keydiff(
    key: Tensor, *, occupied: Tensor | None = None, anchor: str = "mean_normalized", similarity: str = "cosine",
) -> Tensor:
    """See ``kvtwin.reference.keydiff.score``."""
    _refuse(occupied=_padded(occupied), anchor=anchor != "mean_normalized", similarity=similarity != "cosine")
    return _score(KeyDiffPress(), key)


def evict_keydiff(
    key: Tensor, value: Tensor, budget: int, *, occupied: Tensor | None = None, recent: int = 0,
    protected: Tensor | None = None, anchor: str = "mean_normalized", similarity: str = "cosine",
) -> dict[str, Tensor]:
    """See ``kvtwin.reference.keydiff.evict``."""
    _refuse(occupied=_padded(occupied), recent=recent > 0, protected=_any(protected),
            anchor=anchor != "mean_normalized", similarity=similarity != "cosine")
    found = _compress(KeyDiffPress(), key, value, budget)
    return found | {"occupied": torch.ones_like(found["kept"], dtype=torch.bool)}


def window_score(
    query_window: Tensor, key: Tensor, occupied: Tensor | None = None, *,
    kernel_size: int = 5, shared_heads: bool = False, scale: float | None = None,
) -> Tensor:
    """See ``kvtwin.reference.baselines.snapkv.window_score``."""
    window = query_window.shape[2]
    _refuse(occupied=_padded(occupied), shared_heads=shared_heads, scale=_scaled(scale, key),
            window_of_all=window >= key.shape[2])
    score = _score(SnapKVPress(window_size=window, kernel_size=kernel_size), key, query_window)
    score[..., -window:] = torch.inf
    return score


def compress(
    query_window: Tensor, key: Tensor, value: Tensor, budget: int, *,
    kernel_size: int = 5, occupied: Tensor | None = None, protected: Tensor | None = None,
    shared_heads: bool = False, scale: float | None = None,
) -> dict[str, Tensor]:
    """See ``kvtwin.reference.baselines.snapkv.compress``."""
    window = query_window.shape[2]
    _refuse(occupied=_padded(occupied), protected=_any(protected), shared_heads=shared_heads,
            scale=_scaled(scale, key), window_of_all=window >= key.shape[2])
    return _compress(SnapKVPress(window_size=window, kernel_size=kernel_size), key, value, budget, query_window)


def attend_tova(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float | None = None
) -> dict[str, Tensor]:
    """See ``kvtwin.reference.baselines.tova.attend``; ``received`` is TOVAPress's score."""
    _refuse(occupied=_padded(occupied), scale=_scaled(scale, key))
    count, total = query.shape[2], key.shape[2]
    causal = torch.ones(count, total, dtype=torch.bool, device=key.device).tril(total - count)
    output = functional.scaled_dot_product_attention(query, key, value, causal, enable_gqa=True)
    return {"output": output, "received": _score(TOVAPress(), key, query)}


def keep_streaming_llm(positions: Tensor, budget: int, *, sinks: int = 4) -> Tensor:
    """See ``kvtwin.reference.baselines.streaming_llm.keep``."""
    slots = positions.shape[-1]
    _refuse(free_slots=bool((positions < 0).any()), order=bool((positions.diff() < 0).any()), sinks=slots <= sinks)
    key = torch.zeros(1, 1, slots, 1, device=positions.device)
    kept = _compress(StreamingLLMPress(n_sink=sinks), key, key, budget)["kept"][0, 0]
    keep_mask = torch.zeros(slots, dtype=torch.bool, device=positions.device).index_fill(0, kept, True)
    return keep_mask.expand(positions.shape)


keydiff = SimpleNamespace(score=score_keydiff, evict=evict_keydiff)
snapkv = SimpleNamespace(window_score=window_score, compress=compress)
tova = SimpleNamespace(attend=attend_tova)
streaming_llm = SimpleNamespace(keep=keep_streaming_llm)


def _score(press: ScorerPress, key: Tensor, query: Tensor | None = None) -> Tensor:
    return press.score(*_layer(key, query, key)).float()


def _compress(
    press: ScorerPress, key: Tensor, value: Tensor, budget: int, query: Tensor | None = None
) -> dict[str, Tensor]:
    batch, heads, tokens, head_dim = key.shape
    _refuse(budget=budget < 1)
    press.compression_ratio = max(0.0, 1 - (budget + 0.5) / tokens)
    index = torch.arange(tokens, device=key.device)[:, None].expand(batch, heads, tokens, head_dim)
    kept = press.compress(*_layer(key, query, index))[1][..., 0]
    short_key, short_value = press.compress(*_layer(key, query, value))
    kept, order = kept.sort()
    order = order[..., None].expand(short_key.shape)
    return {"key": short_key.gather(2, order), "value": short_value.gather(2, order), "kept": kept}


def _layer(key: Tensor, query: Tensor | None, value: Tensor) -> tuple[Any, ...]:
    """The arguments of a press, with a stub layer whose hidden states are the queries of the last tokens."""
    batch, heads, tokens, head_dim = key.shape
    query = key.new_zeros(batch, heads, 1, head_dim) if query is None else query
    config = SimpleNamespace(num_attention_heads=query.shape[1], num_key_value_heads=heads)
    layer = SimpleNamespace(config=config, head_dim=head_dim, q_proj=torch.nn.Identity())
    hidden = functional.pad(query.transpose(1, 2).flatten(2), (0, 0, tokens - query.shape[2], 0))   # [B, T, Hq D]
    cosine = key.new_ones(batch, tokens, head_dim)
    return layer, hidden, key, value, None, {"position_embeddings": (cosine, torch.zeros_like(cosine))}


def _refuse(**asked: bool) -> None:
    for name, wanted in asked.items():
        if wanted:
            raise NotImplementedError(name)


def _padded(occupied: Tensor | None) -> bool:
    return occupied is not None and not bool(occupied.all())


def _any(mask: Tensor | None) -> bool:
    return mask is not None and bool(mask.any())


def _scaled(scale: float | None, key: Tensor) -> bool:
    return scale is not None and scale != key.shape[-1] ** -0.5
