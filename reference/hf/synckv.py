"""SyncKV's cache for transformers, on the eager reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ..contract.synckv.types import HeadClusters
from ..synckv.heads import cluster_heads, head_similarity
from ..synckv.sets import log_weights
from ..synckv.state import SyncKVState
from .cache_adapter_synckv import SyncCache, layer_similarities


class SyncKVCache(SyncCache):
    """A SyncKV cache for `generate`, in float64 to bfloat16. No token is evicted, but most heads attend to few tokens.

        model.set_attn_implementation("kvtwin")
        clusters = head_clusters(model, texts, k=64)
        cache = SyncKVCache(model.config, k=1024, head_clusters=clusters, max_tokens=32768)
        model.generate(ids, **cache.argument)

    k: the number of selected tokens that a head other than the R-heads attends to, besides the newest ones.
    budget= is another name of it.
    head_clusters: the clusters of each layer, from `head_clusters` or a file of `HeadClusters.save`. None: `clusters`
    runs of neighboring heads, as in `resolve_clusters`, without measured similarities.
    spread: True gives layer i the phase i mod stride, so that layers anticipate at different steps.
    Other options, as in SyncKVConfig: rho, stride, phase, clusters, exclude_static, union_clusters, max_tokens,
    offload. The slots are in `cache.layers[i].state`, a `SyncKVState`.

    The first forward pass is the prompt, from which R-heads select tokens. All later tokens are decode steps, also
    those of a second chunk of the prompt. ValueError beyond max_tokens tokens, and for clusters that do not fit the
    model's layers and heads. Other arguments, padding and errors: `StateCache`.
    """

    State = SyncKVState


def head_clusters(
    model: Any, texts: Iterable[Tensor | Mapping[str, Tensor]], *, k: int, clusters: int = 2, steps: int = 64
) -> tuple[HeadClusters, ...]:
    """The head clusters of each layer of a model (SyncKV B.1), first layer first. All layers must have full attention.

    texts: input ids [B, T], or the model's keyword arguments, on the model's device. The similarity of heads is
    measured on the last `steps` tokens of each text, by the k tokens with the largest weights. No attention matrix is
    stored; see `cache_adapter_synckv.layer_similarities`.
    """
    found = layer_similarities(
        model, texts, k=k, steps=steps, log_weights=log_weights, head_similarity=head_similarity
    )
    return tuple(cluster_heads(similarity, clusters) for similarity in found)
