"""EpiKV on the GPU; semantics: `kvtwin.reference.epikv`."""

from .scores import hidden_change, kv_variance, lag_kv, rolling_mean, rolling_zscore, score, select

__all__ = ["hidden_change", "kv_variance", "lag_kv", "rolling_mean", "rolling_zscore", "score", "select"]
