# ruff: noqa
# Written by .ci/stubs.py from the constructors of the caches and the configs of the methods.
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..contract.synckv.types import HeadClusters
from ..contract.thinkv.types import Thresholds
from . import cache_adapter as cache_adapter
from .cache_adapter import StateCache
from .rotation import RotatedCache
from . import cake, epikv, kivi, longflow, pm_kvq, quest, synckv, thinkv

__all__ = [
        "cache", "CAKECache", "EpiKVCache", "H2OCache", "KeyDiffCache", "KIVICache", "LagKVCache",
        "LazyEvictionCache", "LongFlowCache", "PMKVQCache", "QuestCache", "RKVCache", "RaaSCache", "RandomCache",
        "SnapKVCache", "StreamingLLMCache", "SyncKVCache", "ThinKVCache", "TOVACache", "VATPCache",
    ]

def cache(
    method: Literal[
        "cake", "epikv", "h2o", "keydiff", "kivi", "lag_kv", "lazy_eviction", "longflow", "pm_kvq", "quest", "r_kv",
        "raas", "random", "snapkv", "streaming_llm", "synckv", "thinkv", "tova", "vatp",
    ],
    model: Any, **options: Any,
) -> StateCache: ...

class CAKECache(cake.CAKECache):
    def __init__(
        self, config: PreTrainedConfig, *,
        budget: int | None = ..., compression_ratio: float | None = ..., attention_mask: Tensor | None = ...,
        window: int = ..., kernel_size: int = ..., gamma: float = ..., tau1: float = ..., tau2: float = ...,
        whole_batch: bool = ...,
    ) -> None: ...

class EpiKVCache(epikv.EpiKVCache):
    def __init__(
        self, model: PreTrainedModel, *,
        compression_ratio: float | None = ..., budget: int | None = ..., policy: str = ..., layers: Any = ...,
        attention_mask: Tensor | None = ..., recent: int | None = ..., window: int = ..., chunk: int = ...,
        spread: str = ..., keep_prompt: bool = ..., count_prompt: bool = ..., max_prompt: int = ..., tau: int = ...,
        edges: tuple[float, float] | None = ..., sparsity_threshold: float = ..., segments_by: str = ...,
    ) -> None: ...

class H2OCache(StateCache):
    def __init__(
        self, config: PreTrainedConfig, *,
        budget: int | None = ..., compression_ratio: float | None = ..., attention_mask: Tensor | None = ...,
        block_size: int = ..., recent: int | None = ..., sinks: int = ..., interval: int = ...,
    ) -> None: ...

class KeyDiffCache(StateCache):
    def __init__(
        self, config: PreTrainedConfig, *,
        budget: int | None = ..., compression_ratio: float | None = ..., attention_mask: Tensor | None = ...,
        block_size: int = ..., recent: int = ..., anchor: str = ..., similarity: str = ..., refresh: int = ...,
    ) -> None: ...

class KIVICache(kivi.KIVICache):
    def __init__(
        self, config: PreTrainedConfig, *,
        budget: int | None = ..., compression_ratio: float | None = ..., attention_mask: Tensor | None = ...,
        key_bits: int = ..., value_bits: int = ..., group: int = ..., residual: int = ..., max_tokens: int = ...,
    ) -> None: ...

class LagKVCache(StateCache):
    def __init__(
        self, config: PreTrainedConfig, *,
        budget: int | None = ..., compression_ratio: float | None = ..., attention_mask: Tensor | None = ...,
        block_size: int = ..., lag: int = ..., sinks: int = ..., interval: int = ...,
    ) -> None: ...

class LazyEvictionCache(StateCache):
    def __init__(
        self, config: PreTrainedConfig, *,
        budget: int | None = ..., compression_ratio: float | None = ..., attention_mask: Tensor | None = ...,
        block_size: int = ..., alpha: float = ..., recent: int = ..., shifted: bool = ..., interval: int = ...,
    ) -> None: ...

class LongFlowCache(longflow.LongFlowCache):
    def __init__(
        self, config: PreTrainedConfig, *,
        budget: int | None = ..., compression_ratio: float | None = ..., attention_mask: Tensor | None = ...,
        per_head: bool = ..., protect_newest: bool = ..., sinks: int = ..., window: int = ..., kernel_size: int = ...,
        prefix_alone: bool = ..., check_finite: bool = ...,
    ) -> None: ...

class PMKVQCache(pm_kvq.PMKVQCache):
    def __init__(
        self, config: PreTrainedConfig, *,
        budget: int | None = ..., compression_ratio: float | None = ..., attention_mask: Tensor | None = ...,
        bits: float | Sequence[float] = ..., window: int = ..., sinks: int = ..., group: int = ...,
        least_scale: float = ..., max_tokens: int = ...,
    ) -> None: ...

class QuestCache(quest.QuestCache):
    def __init__(
        self, config: PreTrainedConfig, *,
        budget: int | None = ..., compression_ratio: float | None = ..., skip_layers: int = ...,
        attention_mask: Tensor | None = ..., page_size: int = ..., keep_last: bool = ..., least_pages: int = ...,
        round_scores: bool = ..., max_tokens: int = ...,
    ) -> None: ...

class RKVCache(StateCache):
    def __init__(
        self, config: PreTrainedConfig, *,
        budget: int | None = ..., compression_ratio: float | None = ..., attention_mask: Tensor | None = ...,
        block_size: int = ..., window: int = ..., kernel_size: int = ..., mix_lambda: float = ...,
        threshold: float = ..., exempts_first: bool = ..., order: str = ..., interval: int = ...,
    ) -> None: ...

class RaaSCache(StateCache):
    def __init__(
        self, config: PreTrainedConfig, *,
        budget: int | None = ..., compression_ratio: float | None = ..., attention_mask: Tensor | None = ...,
        block_size: int = ..., alpha: float | None = ..., recent: int = ..., sinks: int = ..., interval: int = ...,
        page_size: int | None = ...,
    ) -> None: ...

class RandomCache(StateCache):
    def __init__(
        self, config: PreTrainedConfig, *,
        budget: int | None = ..., compression_ratio: float | None = ..., attention_mask: Tensor | None = ...,
        block_size: int = ..., seed: int = ...,
    ) -> None: ...

class SnapKVCache(StateCache):
    def __init__(
        self, config: PreTrainedConfig, *,
        budget: int | None = ..., compression_ratio: float | None = ..., attention_mask: Tensor | None = ...,
        block_size: int = ..., window: int = ..., kernel_size: int = ..., interval: int = ...,
    ) -> None: ...

class StreamingLLMCache(RotatedCache):
    def __init__(
        self, config: PreTrainedConfig, *,
        budget: int | None = ..., compression_ratio: float | None = ..., rerotate_keys: bool = ...,
        attention_mask: Tensor | None = ..., block_size: int = ..., sinks: int = ...,
    ) -> None: ...

class SyncKVCache(synckv.SyncKVCache):
    def __init__(
        self, config: PreTrainedConfig, *,
        k: int | None = ..., budget: int | None = ..., compression_ratio: float | None = ...,
        head_clusters: Sequence[HeadClusters] | None = ..., spread: bool = ..., attention_mask: Tensor | None = ...,
        rho: float = ..., stride: int = ..., clusters: int = ..., exclude_static: bool = ...,
        union_clusters: bool = ..., phase: int = ..., max_tokens: int = ..., offload: bool = ...,
    ) -> None: ...

class ThinKVCache(thinkv.ThinKVCache):
    def __init__(
        self, config: PreTrainedConfig, *,
        budget: int | None = ..., compression_ratio: float | None = ..., thresholds: Thresholds | None = ...,
        attention_mask: Tensor | None = ..., tau: int = ..., group: int = ..., block: int = ...,
        retention: tuple[int, ...] = ..., formats: Mapping[str, str] = ..., sparsity_threshold: float = ...,
        max_tokens: int = ..., sparsity_of: str = ...,
    ) -> None: ...

class TOVACache(StateCache):
    def __init__(
        self, config: PreTrainedConfig, *,
        budget: int | None = ..., compression_ratio: float | None = ..., attention_mask: Tensor | None = ...,
        block_size: int = ..., interval: int = ..., per_head: bool = ...,
    ) -> None: ...

class VATPCache(StateCache):
    def __init__(
        self, config: PreTrainedConfig, *,
        budget: int | None = ..., compression_ratio: float | None = ..., attention_mask: Tensor | None = ...,
        block_size: int = ..., recent: int | None = ..., sinks: int = ..., interval: int = ...,
    ) -> None: ...
