"""Cases of KeyDiff's functions: keys over S slots, a budget and protected tokens.

KeyDiff uses the directions of keys, so the contents vary these: nearly parallel keys, keys that cancel, zero keys, keys
of every magnitude.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...reference.contract.scales import FP8
from . import contents, draws, supported
from .case import Case
from .layouts import REPEATED
from .strategies import TRIPLES, _common, _counts, _layouts, contents_of

#: Failing examples shrink to the first. "sizes" and "subnormal" are for cosines; other similarities overflow.
CONTENTS = ("ordinary", "collinear", "duplicates", "near_ties", "zero_keys", "integers", "equal_keys", "opposite",
            "outliers", "sizes", "subnormal")
#: Contents whose ranks are too close for any arithmetic to order.
UNDECIDED = ("near_ties", "opposite")
COSINE_ONLY = ("sizes", "subnormal")
#: Contents of FP8 keys: all but `near_ties`, which rounding to FP8 turns into `duplicates`.
FP8_CONTENTS = tuple(content for content in CONTENTS if content != "near_ties")
ANCHORS = ("mean_normalized", "mean", "median")
SIMILARITIES = ("cosine", "dot", "euclidean")
PROTECTIONS = ("none", "none", "random", "newest", "all_but_one", "all")


def fill(content: str, generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Keys [B, Hkv, S, D] of the given content, rounded to `dtype`, one of FP8 included."""
    if dtype in FP8:
        info = torch.finfo(dtype)
        factor = {"sizes": 2.0**-3, "subnormal": info.smallest_normal / 2}.get(content, 8.0)
        own = "ordinary" if content == "subnormal" else content
        plain = fill(own, generator, shape, torch.float16 if content == "sizes" else torch.float32)
        return (plain.float() * factor).clamp(info.min, info.max).to(dtype)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=generator.device)

    def integers(low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high, sizes, generator=generator, device=generator.device)

    batch, heads, slots, head_dim = shape
    key, lead = normal(*shape), normal(batch, heads, 1, head_dim)
    chosen = torch.randperm(slots, generator=generator, device=generator.device)[:2 + slots // 4]
    if content == "collinear":
        # cos(k_i, k_j) is about 0.99, as the paper reports for models.
        key = lead + 0.1 * key
    elif content == "zero_keys":
        key[:, :, chosen[1:]] = 0
    elif content == "integers":
        # Equal ranks of different keys.
        key = key.round().clamp(-1, 1)
    elif content == "equal_keys":
        key = key[:, :, :1].expand(shape)
    elif content == "opposite":
        # The anchor is 0 up to rounding (and an unpaired key).
        key = lead * torch.exp2(integers(-3, 4, 1, 1, slots, 1).float())
        key[:, :, 1::2] *= -1
    elif content == "outliers":
        key = lead + 0.5 * key
        key[:, :, chosen[0]] *= -50
    elif content == "sizes":
        half = {torch.float16: 10, torch.bfloat16: 120, torch.float32: 120}[dtype]
        key = key * torch.exp2(integers(-half, half, 1, 1, slots, 1).float())
        key = key.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    elif content == "subnormal":
        least = -24 if dtype == torch.float16 else -126
        key[:, :, chosen] *= 2.0**least
    key = key.to(dtype)
    if content in ("duplicates", "near_ties"):
        key = key.clone()
        key[:, :, chosen] = key[:, :, chosen[:1]]
        for place, slot in enumerate(chosen[1:].tolist() if content == "near_ties" else ()):
            channel = place % head_dim
            key[:, :, slot, channel] = contents.next_up(key[:, :, slot, channel])
    return key


@dataclass(frozen=True, repr=False)
class KeyCase(Case):
    """key, value [B, Hkv, S, D]; occupied and protected [B, S], or [B, Hkv, S] with per_head, or None. At most
    `budget` tokens per head are recent or protected."""

    kind: ClassVar[str] = "keys"

    slots: int = 1
    budget: int = 1
    recent: int = 0
    occupancy: str = "none"
    protect: str = "none"
    per_head: bool = False
    anchor: str = "mean_normalized"
    similarity: str = "cosine"

    key = property(lambda self: self.tensor("key"))
    value = property(lambda self: self.tensor("value"))
    occupied = property(lambda self: self.tensors["occupied"])
    protected = property(lambda self: self.tensors["protected"])

    def make(self) -> dict[str, Tensor | None]:
        generator = self.generator()
        shape = (self.batch, self.key_value_heads, self.slots, self.head_dim)
        key = fill(self.content, generator, shape, self.dtype)
        value = torch.randn(shape, generator=generator, device=generator.device).to(self.dtype)
        heads = (self.key_value_heads,) if self.per_head else ()
        masks = (self.batch, *heads, self.slots)
        occupied = None if self.occupancy == "none" else contents.occupancy(self.occupancy, generator, masks)
        if occupied is not None and self.layout not in REPEATED:
            key, value = (contents.poison(self.poison, tensor, occupied) for tensor in (key, value))
        protected = contents.protection(self.protect, generator, masks)
        if protected is not None:
            # Protect at most budget - recent tokens, the first ones; any number of unoccupied slots may be protected.
            tokens = protected if occupied is None else protected & occupied
            protected = protected & ((tokens.cumsum(-1) <= self.budget - self.recent) | ~tokens)
        return {"key": key, "value": value, "occupied": occupied, "protected": protected}

    def place(self, name: str, tensor: Tensor) -> Tensor:
        # Only keys and values have a repeated axis.
        return tensor if self.layout in REPEATED and name not in ("key", "value") else super().place(name, tensor)

    @property
    def mask(self) -> Tensor:
        """occupied as [B, Hkv, S], all True if it was not given."""
        return self._wide(self.occupied, default=True)

    @property
    def protected_or_recent(self) -> Tensor:
        """The tokens that must not be evicted, protected or recent, [B, Hkv, S]."""
        mask = self.mask
        later = mask.flip(-1).cumsum(-1).flip(-1)
        return mask & ((later <= self.recent) | self._wide(self.protected, default=False))

    def _wide(self, mask: Tensor | None, *, default: bool) -> Tensor:
        shape = (self.batch, self.key_value_heads, self.slots)
        if mask is None:
            return torch.full(shape, default, device=self.device)
        return (mask if mask.dim() == 3 else mask[:, None]).expand(shape)

    @property
    def pairwise_inputs(self) -> dict[str, Any]:
        """Keyword arguments of `pairwise_score`."""
        self.used()
        return {"key": self.key, "occupied": self.occupied}

    @property
    def score_inputs(self) -> dict[str, Any]:
        """Keyword arguments of `score`."""
        return {**self.pairwise_inputs, "anchor": self.anchor, "similarity": self.similarity}

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of `evict`."""
        return {
            **self.score_inputs, "value": self.value, "budget": self.budget, "recent": self.recent,
            "protected": self.protected,
        }

    @classmethod
    def of(cls, key: Tensor, value: Tensor | None = None, *, budget: int = 1, recent: int = 0,
           occupied: Tensor | None = None, protected: Tensor | None = None, anchor: str = "mean_normalized",
           similarity: str = "cosine") -> KeyCase:
        """Make a case from given tensors; the values default to the keys."""
        batch, heads, slots, head_dim = key.shape
        case = cls(
            batch=batch, key_value_heads=heads, head_dim=head_dim, dtype=key.dtype, content="given", slots=slots,
            budget=budget, recent=recent, anchor=anchor, similarity=similarity, device=str(key.device),
        )
        case._adopt({
            "key": key, "value": key if value is None else value, "occupied": occupied, "protected": protected,
        })
        return case


@st.composite
def key_cases(
    draw: st.DrawFn, *, device: torch.device | str | None = None, slots: tuple[int, int] | None = None,
    content: tuple[str, ...] = CONTENTS, anchor: Sequence[str] = ANCHORS, similarity: Sequence[str] = SIMILARITIES,
    occupancy: tuple[str, ...] = ("none", *contents.OCCUPANCIES), layout: tuple[str, ...] | None = None,
    protect: tuple[str, ...] = PROTECTIONS,
) -> KeyCase:
    """Budgets from 1 to beyond S. Most cases use KeyDiff's own anchor and similarity and have no free slots."""
    plain, masks = draws.plain_only(), supported.occupancies(occupancy)
    similarity, anchor = supported.values("similarity", similarity), supported.values("anchor", anchor)
    layouts = None if layout is None else st.sampled_from(supported.layouts(layout))
    protections = st.just("none") if plain else st.sampled_from(supported.protections(protect))
    sizes = draw(_common(device, TRIPLES))
    sizes["group"] = 1
    least, most = slots or (1, None)
    total = draw(_counts(sizes, most, gpu=8192, least=max(2, least) if plain else least))
    budget = draw(st.integers(1, max(1, total - 1) if plain else total + 2))
    own = draw(st.sampled_from((True, True, False)))
    cosine = "cosine" in similarity and set(content) <= set(COSINE_ONLY)
    metric = "cosine" if cosine else similarity[0] if own else draw(st.sampled_from(similarity))
    recents = supported.values("recent", (0, 0, 1, min(budget, 3), budget))
    fitting = [name for name in content if metric == "cosine" or name not in COSINE_ONLY]
    return KeyCase(
        **sizes,
        content=draw(contents_of(fitting)),
        layout=draw(_layouts(sizes["dtype"]) if layouts is None else layouts),
        poison=draw(st.sampled_from(contents.POISONS)),
        seed=draw(st.integers(0, 2**31 - 1)),
        slots=total,
        budget=budget,
        recent=0 if plain else draw(st.sampled_from(recents)),
        occupancy=draw(st.sampled_from(masks[:1]) if plain else st.sampled_from(masks[:1]) | st.sampled_from(masks)),
        protect=draw(protections),
        per_head=draw(supported.mask_per_head()),
        anchor=anchor[0] if own else draw(st.sampled_from(anchor)),
        similarity=metric,
    )


@st.composite
def fp8_key_cases(draw: st.DrawFn, **more: Any) -> KeyCase:
    """The same with FP8 keys and values, compared by cosines. more: arguments of `key_cases`."""
    dtypes = supported.fp8(FP8)
    content = tuple(one for one in more.pop("content", CONTENTS) if one in FP8_CONTENTS)
    case = draw(key_cases(**more, similarity=("cosine",), content=content))
    return dataclasses.replace(case, dtype=draw(st.sampled_from(dtypes)))
