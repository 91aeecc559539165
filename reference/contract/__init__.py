"""What both sides share, without mathematics: types, configs, results and checks of arguments.

Here are the sizes of an attention call, caches in pages, and the base class of configs. The modules have the rest:
`arguments`, `attention`, `pages`, `scales` and `ranks` check arguments, `results` and `blocks` have results and configs
of several methods, `interruption` tells whole states from incomplete ones. The others are of one method each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from .arguments import check_integer, check_scale


class Sizes(NamedTuple):
    """The sizes of an attention call or of a state: B, Hq, Hkv, S (T for a prompt) and D."""

    batch: int
    query_heads: int
    key_value_heads: int
    slots: int
    head_dim: int

    @property
    def group(self) -> int:
        """G, the number of query heads per KV head."""
        return self.query_heads // self.key_value_heads


class Pages(NamedTuple):
    """The keys and values of several sequences in pages of one cache.

    key_cache, value_cache [pages, page_size, Hkv, D], any strides: pass ``cache.transpose(1, 2)`` of a cache
    [pages, Hkv, page_size, D], and ``cache[:, 0]``, ``cache[:, 1]`` of a cache [pages, 2, page_size, Hkv, D].
    block_table [B, n] int32: the page of each page_size slots of a row. Slot s of row b is place s % page_size of page
    block_table[b, s // page_size]. A function, which only reads, accepts an entry of -1 if all of its slots are free. A
    state needs all of its pages from the start. Further columns are ignored.
    """

    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor

    @property
    def page_size(self) -> int:
        return self.key_cache.shape[1]


@dataclass(frozen=True)
class MethodConfig:
    """Base class of the configs of methods that evict.

    budget: the largest number of tokens that a row of the cache holds, an int of at least 1.
    scale: the factor on query . key, by default head_dim ** -0.5.
    Raises TypeError for arguments of a wrong type and ValueError for values out of range.
    """

    budget: int
    scale: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_integer("budget", self.budget, minimum=1)
        check_scale("scale", self.scale)

    @classmethod
    def defaults_for(cls, budget: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options that a cache for transformers takes if they are not `given`, where the config has no default or one
        that small budgets cannot have. Accuracy is measured with them."""
        return {}
