"""Cases of ThinKV's thoughts and eviction: decode steps with a threshold, and segments of keys to cluster.

The contents of segments vary the distances: clusters of keys, keys far from 0, copies, keys of every magnitude, and
lattices, on which different keys have equal distances.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from . import contents, draws, supported
from .case import Case, DecodeCase
from .strategies import DTYPES, HEAD_DIMS, PLAIN_DTYPES, contents_of, decode_cases, default_device

#: Failing examples shrink to the first.
CONTENTS = ("ordinary", "clumps", "offset", "duplicates", "sizes", "equal_keys", "integers", "near_ties")
#: Contents with many distances too close for any arithmetic to order.
UNDECIDED = ("integers", "near_ties")
DECIDED = tuple(content for content in CONTENTS if content not in UNDECIDED)
LAYOUTS = ("contiguous", "transposed", "sliced", "spread", "channels_first")
#: head_dim and dtype on a GPU: few, since each takes seconds to compile.
GPU_PAIRS = ((128, torch.bfloat16), (64, torch.float16), (40, torch.float32))


@dataclass(frozen=True, repr=False)
class SparsityCase(DecodeCase):
    """Arguments of `attention_sparsity`."""

    kind: ClassVar[str] = "sparsity"

    threshold: float = 0.01
    sparsity_of: str = "heads"

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of `attention_sparsity`."""
        self.used()
        return {
            "query": self.query, "key": self.key, "occupied": self.occupied, "threshold": self.threshold,
            "scale": self.scale, "sparsity_of": self.sparsity_of,
        }

    @classmethod
    def given(cls, query: Tensor, key: Tensor, occupied: Tensor | None = None, *, threshold: float = 0.01,
              scale: float | None = None, sparsity_of: str = "heads") -> SparsityCase:
        """Make a case from given tensors."""
        case = cls.of(query, key, key, occupied, scale=scale)
        made = cls(**_fields(case), threshold=threshold, sparsity_of=sparsity_of)
        made._adopt(case.tensors)
        return made


def _fields(case: DecodeCase) -> dict[str, Any]:
    """The fields of a DecodeCase."""
    return {field.name: getattr(case, field.name) for field in dataclasses.fields(DecodeCase)}


@st.composite
def sparsity_cases(draw: st.DrawFn, **narrowed: Any) -> SparsityCase:
    """Decode steps with a threshold; arguments as for `decode_cases`."""
    case = draw(decode_cases(per_head=False, protect=("none",), **narrowed))
    threshold = draw(st.sampled_from((0.01, 0.01, 0.3, 0.9, 1e-4)))
    return SparsityCase(
        **_fields(case), threshold=threshold, sparsity_of=draw(st.sampled_from(("heads", "mean")))
    )


def fill(content: str, generator: torch.Generator, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """Keys [Hkv, L, D] of the given content, rounded to `dtype`."""
    heads, tokens, head_dim = shape
    device = generator.device

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    key = normal(*shape)
    chosen = torch.randperm(tokens, generator=generator, device=device)
    if content == "clumps":
        clumps = 1 + tokens // 5
        which = torch.randint(clumps, (tokens,), generator=generator, device=device)
        key = 3 * normal(heads, clumps, head_dim)[:, which] + 0.2 * key
    elif content == "offset":
        key = key + 8 * normal(heads, 1, head_dim)
    elif content == "sizes":
        key = key * torch.exp2(torch.randint(-6, 7, (tokens, 1), generator=generator, device=device).float())
    elif content == "equal_keys":
        key = key[:, :1].expand(shape)
    elif content == "integers":
        key = key.round().clamp(-1, 1)
    key = key.to(dtype).clone()
    if content == "duplicates":
        # Half of the tokens are copies of others.
        half = (tokens + 1) // 2
        source = torch.randint(half, (tokens - half,), generator=generator, device=device)
        key[:, chosen[half:]] = key[:, chosen[source]]
    elif content == "near_ties":
        copies = chosen[:1 + tokens // 2]
        key[:, copies] = key[:, copies[:1]]
        for place, token in enumerate(copies[1:].tolist()):
            channel = place % head_dim
            key[:, token, channel] = contents.next_up(key[:, token, channel])
    return key


@dataclass(frozen=True, repr=False)
class SegmentCase(Case):
    """Arguments of `select_representatives`: key_segment [Hkv, L, D], or [L, D] if flat (one KV head)."""

    kind: ClassVar[str] = "segment"

    tokens: int = 1
    keep: int = 1
    flat: bool = False

    key_segment = property(lambda self: self.tensor("key_segment"))

    def make(self) -> dict[str, Tensor | None]:
        shape = (self.key_value_heads, self.tokens, self.head_dim)
        return {"key_segment": fill(self.content, self.generator(), shape, self.dtype)}

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of `select_representatives`."""
        self.used()
        flat = self.flat and self.key_value_heads == 1              # a test may have given a case more heads
        return {"key_segment": self.key_segment[0] if flat else self.key_segment, "keep": self.keep}

    @property
    def vectors(self) -> Tensor:
        """One vector per token, [L, F], in the case's dtype."""
        vectors: Tensor = self.key_segment.transpose(0, 1).flatten(1)
        return vectors

    @classmethod
    def of(cls, key_segment: Tensor, keep: int) -> SegmentCase:
        """Make a case from given keys [Hkv, L, D]."""
        heads, tokens, head_dim = key_segment.shape
        case = cls(
            key_value_heads=heads, head_dim=head_dim, dtype=key_segment.dtype, content="given", tokens=tokens,
            keep=keep, device=str(key_segment.device),
        )
        case._adopt({"key_segment": key_segment})
        return case


@st.composite
def segment_cases(
    draw: st.DrawFn, *, device: torch.device | str | None = None, content: tuple[str, ...] = DECIDED,
    tokens: tuple[int, int] = (1, 48), shrinks: bool = False, layout: tuple[str, ...] = LAYOUTS,
) -> SegmentCase:
    """Segments of up to 48 tokens, or 128 on a GPU. keep goes from 1 to beyond the number of tokens, or stays below it
    if `shrinks`."""
    where = torch.device(device) if device is not None else default_device()
    least, most = tokens
    dtypes, layouts = draws.plain_among(supported.dtypes(DTYPES), PLAIN_DTYPES), supported.layouts(layout)
    if where.type == "cpu":
        head_dim, dtype = draw(st.sampled_from(supported.sizes("head_dims", HEAD_DIMS))), draw(st.sampled_from(dtypes))
        total = draw(st.integers(least, most))
    else:
        head_dim, dtype = draw(st.sampled_from([pair for pair in GPU_PAIRS if pair[1] in dtypes]))
        total = draw(st.integers(max(17, least), 32) | st.integers(65, 128))
    heads = draw(st.sampled_from(supported.sizes("kv_heads", (1, 2, 3))))
    return SegmentCase(
        key_value_heads=heads, head_dim=head_dim, dtype=dtype,
        content=draw(contents_of(content)),
        layout=draw(st.sampled_from(layouts)),
        seed=draw(st.integers(0, 2**31 - 1)),
        device=str(where),
        tokens=total,
        keep=draw(st.integers(1, max(1, total - 1)) if shrinks else st.integers(1, total + 2)),
        flat=heads == 1 and draw(st.booleans()),
    )
