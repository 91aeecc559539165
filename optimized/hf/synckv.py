"""SyncKV's cache for transformers, on the Triton kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ...reference.contract.synckv.types import HeadClusters
from ...reference.hf.cache_adapter_synckv import SyncCache, layer_similarities
from ..synckv.heads import cluster_heads, head_similarity
from ..synckv.sets import log_weights
from ..synckv.state import SyncKVState


class SyncKVCache(SyncCache):
    """A SyncKV cache for `generate`, in float32 to bfloat16. No token is evicted, but most heads attend to few tokens.

        model.set_attn_implementation("kvtwin")
        clusters = head_clusters(model, texts, k=64)
        cache = SyncKVCache(model.config, k=1024, head_clusters=clusters, max_tokens=32768)
        model.generate(ids, **cache.argument)

    offload=True keeps the tokens of all heads except R-heads in pinned host memory and only the selected ones on the
    GPU. It raises RuntimeError under torch.compile, MemoryError without enough host memory, and NotImplementedError for
    a copy of the cache. A captured graph of decode steps must end with `cache.join()`. spread=True spreads the
    layers' transfers over the steps of a stride, which hides them better. Other options, forward passes and errors:
    `SyncKVCache` of the reference. Memory is allocated for max_tokens. A model on the CPU needs Triton's interpreter:
    TRITON_INTERPRET=1 before anything imports triton, which importing a transformers model does.
    """

    State = SyncKVState


def head_clusters(
    model: Any, texts: Iterable[Tensor | Mapping[str, Tensor]], *, k: int, clusters: int = 2, steps: int = 64
) -> tuple[HeadClusters, ...]:
    """The head clusters of each layer of a model (SyncKV B.1), first layer first. Semantics: the reference's function.
    """
    found = layer_similarities(
        model, texts, k=k, steps=steps, log_weights=log_weights, head_similarity=head_similarity
    )
    return tuple(cluster_heads(similarity, clusters) for similarity in found)
