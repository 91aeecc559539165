"""The peers that attention is measured against: PyTorch's fused kernels, each in the layouts that suit it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}

#: In the messages with which PyTorch and cuDNN refuse arguments that they have no kernel for.
REFUSALS = ("No available kernel", "No viable backend", "cuDNN Frontend error")


def decode_peers(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Attention of one query per head over every slot: query [B, Hq, D]; key, value [B, Hkv, S, D].

    Each backend twice: as PyTorch has it, query [B, Hq, 1, D] with enable_gqa, and "-rows", with the group's heads as
    G query rows of one KV head, which is the same mathematics. Results: [B, Hq, 1, D] or [B, Hkv, G, D], that is
    [B, Hq, D] with the axes of a view. Those that this machine lacks are left out.
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
    """Without those whose backend refuses. Thresholds that name one of them then say that it is missing."""
    found = {}
    for name, peer in peers.items():
        # PyTorch warns why it refuses before it raises.
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
