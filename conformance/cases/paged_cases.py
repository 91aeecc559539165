"""Cases of ThinKV's paged cache: tokens of several thought types, some evicted, some still in the buffer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...reference.contract.thinkv.config import ThinKVConfig
from ...reference.contract.thinkv.types import BITS, LETTERS
from . import contents, draws, strategies, supported
from .case import Case

#: Formats of R, E and T that do not quantize, all or some of them.
WHOLE = ("unquantized unquantized unquantized", "unquantized nvfp4 ternary")
#: Formats of R, E and T: the paper's choice, then combinations of one to three formats.
FORMATS = (
    "nvfp4 nvfp4 ternary", "fp8 nvfp4 ternary", "int4 int4 int2", "nvfp4 int4 ternary", "nvfp4 int4 fp8",
    *WHOLE, "fp8 fp8 fp8",
)
#: The formats that fragment kernels read.
IN_FRAGMENTS = tuple(one for one in FORMATS if "fp8" not in one and "unquantized" not in one)
CONTENTS = (
    "ordinary", "duplicates", "zero_values", "dominant", "equal_keys", "overflow_88", "extreme_1e4", "zero_query",
    "tiny_values", "identical",
)


def config_of(formats: str, *, tokens: int, group: int = 4, block: int = 2, **options: Any) -> ThinKVConfig:
    """A config for up to `tokens` live tokens. formats: those of R, E and T, separated by spaces."""
    given: dict[str, Any] = {"budget": tokens, "tau": 8, "retention": (4, 2), "max_tokens": tokens, **options}
    return ThinKVConfig(group=group, block=block, formats=dict(zip("RET", formats.split(), strict=True)), **given)


def of_types(config: ThinKVConfig) -> tuple[str, ...]:
    """The formats by thought type number."""
    return tuple(config.formats[letter] for letter in sorted(LETTERS, key=lambda letter: LETTERS[letter]))


@dataclass(frozen=True, repr=False)
class PagedCase(Case):
    """A cache after `tokens` tokens: query [B, Hq, D], key and value [B, Hkv, T, D].

    Each window of tau tokens is a segment with a thought type per row. Rows after the first start at a later token.
    Buffers are flushed when they are full and at the end of a window, and a share of the quantized tokens is evicted
    `evictions` times. The thoughts, the first tokens and the evictions come from `schedule`, by default the seed.
    """

    kind: ClassVar[str] = "thinkv_paged"

    tokens: int = 1
    shared: int = 4
    block: int = 2
    formats: str = FORMATS[0]
    evictions: int = 0
    sparsity_of: str = "heads"
    schedule: int | None = None

    query = property(lambda self: self.tensor("query"))

    def make(self) -> dict[str, Tensor | None]:
        made = contents.fill(
            self.content, self.generator(), batch=self.batch, key_value_heads=self.key_value_heads, group=self.group,
            queries=1, slots=self.tokens, head_dim=self.head_dim, dtype=self.dtype, scale=self.factor,
        )
        return {"query": made.query[:, :, 0], "key": made.key, "value": made.value}

    @property
    def config(self) -> ThinKVConfig:
        return config_of(
            self.formats, tokens=self.tokens, group=self.shared, block=self.block, sparsity_of=self.sparsity_of
        )

    def cache(self, module: Any, dtype: torch.dtype | None = None) -> Any:
        """`module`'s PagedCache with these tokens; dtype float64 for the oracle's."""
        self.used()
        return self.filled(module, self.tensors, dtype)

    def filled(self, module: Any, tensors: Mapping[str, Any], dtype: torch.dtype | None = None) -> Any:
        """The same with other keys and values."""
        cache = module.PagedCache(
            self.config, batch=self.batch, key_value_heads=self.key_value_heads, head_dim=self.head_dim,
            dtype=dtype or self.dtype, device=self.device,
        )
        for call, *given in self.calls(tensors):
            getattr(cache, call)(*(
                x.to(cache.dtype) if isinstance(x, Tensor) and x.is_floating_point()
                else torch.isin(cache.positions, x) & (cache.groups >= 0) if call == "evict" else x for x in given
            ))
        return cache

    def calls(self, tensors: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
        """The calls on the cache: method and arguments. `evict` gets positions instead of slots."""
        rng = random.Random(self.seed if self.schedule is None else self.schedule)
        config, rows = self.config, range(self.batch)
        joins = [rng.randrange(self.tokens) if row else 0 for row in rows]
        goes = {rng.randrange(self.tokens) for _ in range(self.evictions)}
        waiting, kinds = [0] * self.batch, [0] * self.batch
        for t in range(self.tokens):
            if t % config.tau == 0:
                kinds = [rng.randrange(3) for _ in rows]
            here = [t if t >= joins[row] else -1 for row in rows]
            yield "append", tensors["key"][:, :, t], tensors["value"][:, :, t], self.numbers(here)
            waiting = [count + (position >= 0) for count, position in zip(waiting, here, strict=True)]
            full = [count == config.group or (count > 0 and (t + 1) % config.tau == 0) for count in waiting]
            if any(full):
                yield "flush", self.numbers(full), self.numbers(kinds), self.numbers([t // config.tau] * self.batch)
                waiting = [0 if flushed else count for count, flushed in zip(waiting, full, strict=True)]
            if t in goes:
                share = rng.choice((0.3, 0.7, 1.0))
                yield "evict", self.numbers([p for p in range(t + 1) if rng.random() < share])

    def numbers(self, of_rows: list[Any]) -> Tensor:
        kind = torch.bool if of_rows and isinstance(of_rows[0], bool) else torch.int64
        return torch.tensor(of_rows, dtype=kind, device=self.device)


# Built by tests ------------------------------------------------------------------------------------------------------


def empty(module: Any, device: torch.device, *, batch: int = 1, heads: int = 1, dtype: torch.dtype = torch.float32,
          formats: str = FORMATS[0], head_dim: int = 16, **options: Any) -> Any:
    """An empty cache for up to 24 tokens, or with other options of `config_of`."""
    config = config_of(formats, **{"tokens": 24, **options})
    return module.PagedCache(config, batch=batch, key_value_heads=heads, head_dim=head_dim, dtype=dtype, device=device)


def numbers(*of_rows: Any, device: torch.device) -> Tensor:
    return torch.tensor(of_rows, device=device)


def put(
    cache: Any, first: int, count: int, *, thought: int | None = None, segment: int = 0, seed: int = 0,
    dtype: torch.dtype | None = None,
) -> None:
    """Append tokens first to first + count - 1 to every row, rounded to `dtype`; with a thought, flush them."""
    batch, heads, head_dim = cache.shape
    generator = torch.Generator().manual_seed(1000 * seed + first)
    for position in range(first, first + count):
        key, value = torch.randn(2, batch, heads, head_dim, generator=generator).to(cache.device, dtype or cache.dtype)
        key, value = key.to(cache.dtype), value.to(cache.dtype)
        cache.append(key, value, torch.full((batch,), position, device=cache.device))
    if thought is not None:
        asked = torch.ones(batch, dtype=torch.bool, device=cache.device)
        cache.flush(asked, torch.full((batch,), thought, device=cache.device),
                    torch.full((batch,), segment, device=cache.device))


def leave(cache: Any, *positions: int) -> None:
    """Evict the tokens at these positions in every row."""
    cache.evict(torch.isin(cache.positions, torch.tensor(positions, device=cache.device)))


# Drawn ---------------------------------------------------------------------------------------------------------------


@st.composite
def paged_cases(
    draw: st.DrawFn, *, device: torch.device | None = None, content: tuple[str, ...] = CONTENTS,
    formats: tuple[str, ...] = FORMATS, dtypes: tuple[torch.dtype, ...] = strategies.DTYPES, most: int | None = None,
    layout: tuple[str, ...] = ("contiguous",), evictions: tuple[int, ...] = (0, 1, 2, 3),
) -> PagedCase:
    """Small cases in Triton's interpreter; on a GPU also the paper's groups and blocks."""
    where = device or strategies.default_device()
    small = where.type == "cpu"
    dtypes, layouts = tuple(supported.dtypes(dtypes)), supported.layouts(layout)
    scales = supported.scales(strategies.SCALES)
    sparsities = supported.values("sparsity_of", ("heads", "mean"))
    tables = _tables(*(((4, 2), (6, 4), (3, 3), (16, 8), (5, 1)) if small else ((16, 8), (4, 2))))
    sizes: dict[str, Any]
    if small:
        batch = draw(st.integers(1, supported.rows(2)))
        sizes = {"batch": batch, "key_value_heads": draw(strategies._heads(3 - batch)),
                 "group": draw(st.sampled_from(supported.sizes("groups", (1, 2, 3, 5, 8)))),
                 "dtype": draw(st.sampled_from(dtypes)),
                 "head_dim": draw(st.sampled_from(supported.sizes("head_dims", (16, 32, 24, 17, 80))))}
        shared, block = draw(st.sampled_from(tables))
        low = [dtype for dtype in dtypes if dtype != torch.float32]
        wide = [size for size in (64, 128) if supported.size("head_dims", size)]
        if draw(st.booleans()) and low and wide and (16, 8) in tables:                        # for fragment kernels
            sizes.update(head_dim=draw(st.sampled_from(wide)), dtype=draw(st.sampled_from(low)))
            shared, block = 16, 8
            formats = tuple(one for one in formats if one in IN_FRAGMENTS) or formats
    else:
        triples = strategies._triples(strategies.TRIPLES, dtypes)
        head_dim, group, dtype = triple = draw(st.sampled_from(triples))
        sizes = {"batch": draw(st.integers(1, supported.rows(4))),
                 "key_value_heads": draw(st.sampled_from(supported.sizes("kv_heads", (1, 2, 8)))),
                 "group": group, "head_dim": head_dim, "dtype": dtype}
        shared, block = draw(st.sampled_from(tables))
        # Each combination is compiled, so a triple has two of the formats, and one with the small blocks. With the
        # profile gpu there are two triples, and so three formats.
        formats = tuple(draws.of_run(formats, 3))
        turn = triples.index(triple)
        formats = tuple(formats[(turn + other) % len(formats)] for other in ((0,) if block == 2 else (0, 1)))
    first, last, unit = supported.slots(1, most or (18 if small else 300))
    return PagedCase(
        **sizes, device=str(where), seed=draw(st.integers(0, 2**31 - 1)), content=draw(st.sampled_from(content)),
        layout=draw(st.sampled_from(layouts)),
        scale=draw(st.sampled_from(scales)), tokens=unit * draw(st.integers(first, last)),
        shared=shared, block=block, formats=draw(st.sampled_from(formats)),
        evictions=draw(st.sampled_from(evictions)),
        sparsity_of=draw(st.sampled_from(sparsities)),
    )


def _tables(*pairs: tuple[int, int]) -> list[tuple[int, int]]:
    """(tokens of a group of scales, slots of a block): those whose numbers the config may have."""
    return supported.among(
        pairs, lambda pair: supported.option("group", pair[0]) and supported.option("block", pair[1]), "group, block"
    )


assert all(set(formats.split()) <= BITS.keys() for formats in FORMATS)
