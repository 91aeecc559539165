"""EpiKV on the GPU. Semantics: `kvtwin.reference.epikv`."""

from ...reference.contract.epikv.config import EpiKVConfig
from .scorer import EpiKVScorer
from .scores import hidden_change, kv_variance, lag_kv, rolling_mean, rolling_zscore, score, select
from .state import EpiKVState

__all__ = [
    "EpiKVConfig", "EpiKVScorer", "EpiKVState", "hidden_change", "kv_variance", "lag_kv", "rolling_mean",
    "rolling_zscore", "score", "select",
]
