"""The peers of attention benchmarks: PyTorch's fused attention kernels, each in two layouts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}

#: Parts of the messages with which PyTorch and cuDNN reject arguments for which they have no kernel.
REFUSALS = ("No available kernel", "No viable backend", "cuDNN Frontend error")


def decode_peers(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Attention of one query per head over all slots: query [B, Hq, D]; key, value [B, Hkv, S, D].

    Each backend has two variants: query [B, Hq, 1, D] with enable_gqa, and "-rows", with the heads of a group as G
    query rows of one KV head. Both compute the same. Results: [B, Hq, 1, D] or [B, Hkv, G, D], both views of
    [B, Hq, D]. Variants that this machine does not support are omitted.
    """
    batch, query_heads, head_dim = query.shape
    rows = query.view(batch, key.shape[1], query_heads // key.shape[1], head_dim)
    found = {}
    for name, backend in BACKENDS.items():
        found[name] = _attention(backend, query[:, :, None], key, value, enable_gqa=True)
        found[f"{name}-rows"] = _attention(backend, rows, key, value)
    return _that_run(found)


def causal_peers(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Causal attention of a prompt to itself: query [B, Hq, T, D]; key, value [B, Hkv, T, D]. Results like query."""
    return _that_run({
        name: _attention(backend, query, key, value, enable_gqa=True, is_causal=True)
        for name, backend in BACKENDS.items()
    })


def _attention(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, **options)

    return run


def _that_run(peers: dict[str, Callable[[], Tensor]]) -> dict[str, Callable[[], Tensor]]:
    """The peers that this machine supports. A threshold that names another one reports it as missing."""
    found = {}
    for name, peer in peers.items():
        # PyTorch warns about the reason before it raises.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                peer()
            except RuntimeError as error:
                if not any(text in str(error) for text in REFUSALS):
                    raise
                continue
        found[name] = peer
    return found
