"""SyncKV's cache for transformers, on the Triton kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ...reference.hf.plug_synckv import SyncCache, layer_similarities
from ...reference.synckv.contract import HeadClusters
from ..synckv.heads import cluster_heads, head_similarity
from ..synckv.sets import log_weights
from ..synckv.state import SyncKVState


class SyncKVCache(SyncCache):
    """A SyncKV cache for `generate`, in float32 to bfloat16: no token is evicted, but most heads attend to few.

        model.set_attn_implementation("kvtwin")
        clusters = head_clusters(model, texts, k=64)
        cache = SyncKVCache(model.config, k=1024, head_clusters=clusters, max_tokens=32768)
        model.generate(ids, past_key_values=cache)

    offload=True keeps what is not chosen in pinned memory of the host: RuntimeError where it is compiled, MemoryError
    where there is none, NotImplementedError for a copy of the cache; a captured graph of decode steps ends with
    `cache.join()`, and spread=True lets their transfers have all of a stride to be hidden behind. What the other
    options mean, what comes in a forward pass, and the errors: `SyncKVCache` of the reference. Memory is reserved for
    max_tokens. A model on the CPU needs Triton's interpreter: TRITON_INTERPRET=1 before anything imports triton, which
    importing a transformers model does.
    """

    State = SyncKVState


def head_clusters(
    model: Any, texts: Iterable[Tensor | Mapping[str, Tensor]], *, k: int, clusters: int = 2, steps: int = 64
) -> tuple[HeadClusters, ...]:
    """A model's clusters (SyncKV B.1), first layer first; semantics: the reference's `head_clusters`."""
    found = layer_similarities(
        model, texts, k=k, steps=steps, log_weights=log_weights, head_similarity=head_similarity
    )
    return tuple(cluster_heads(similarity, clusters) for similarity in found)
