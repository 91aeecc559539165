"""Checker of SyncKV's state: at each step, every head's attention over its set of tokens, and the R-heads' choices.

The reference adopts a choice that differs within the bounds of its log-weights. The tokens that a head attends to come
from the reference: the sets in use, which are equal on both sides by then, and the tokens that arrived since.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....reference.synckv.sets import split_budget
from ...cases.case import DecodeCase
from ...cases.synckv_cases import RATIOS, SetsCase
from .. import bounds, lockstep
from ..choices import Verdict
from ..compare import assert_same, fail, named
from ..selections import assert_selected_right
from ..ties import tie_classes
from ..variants import variant
from . import synckv_sets
from .synckv_sets import weight_interval

BUDGET, EVICTS = "k", False
SMALL = {"stride": 2, "clusters": 1, "max_tokens": 160 if torch.cuda.is_available() else 24}
#: Anticipates at every step, so that tests cover its operations.
GROUPINGS = ({"stride": 1, "exclude_static": False}, {"stride": 1, "clusters": 2, "union_clusters": True})
COMPILED = ({"offload": True},)


VARIANTS = (
    variant("one-stride", {"stride": 1, "exclude_static": False}, prompt=20),
    variant("union", {"stride": 1, "clusters": 2, "union_clusters": True}, steps=9),
    variant("phase", {"stride": 3, "phase": 2, "clusters": 3, "rho": 0.25}, steps=11),
    variant("all-static", {"rho": 1.0, "stride": 2}, padding="random"),
    variant("nothing-static", {"rho": 0.0, "stride": 2, "clusters": 2}, steps=9),
    variant("offload-lists-turn-over", {"stride": 1, "rho": 0.0, "offload": True}, budget=2, prompt=20, steps=12,
            long=False),
    variant("offload-and-union", {"stride": 2, "offload": True, "clusters": 2, "union_clusters": True}, steps=10),
    variant("offload-and-strides", {"stride": 2, "offload": True}, padding="random", layout="spread", steps=9),
)


def configs(most: int, window: int) -> st.SearchStrategy[dict[str, Any]]:
    """Configs that exclude static tokens from the dynamic set; only then a budget of k tokens covers k tokens."""
    return st.builds(
        lambda stride, **drawn: {**drawn, "stride": stride[0], "phase": stride[1]},
        k=st.integers(1, 2 * most), rho=st.sampled_from(RATIOS),
        stride=st.sampled_from(((1, 0), (2, 0), (3, 0), (3, 2), (5, 0), (5, 3))), clusters=st.just(1),
        max_tokens=st.just(400 if torch.cuda.is_available() else 36),
    )


def max_kept(state: Any, tokens: int) -> int:
    """All tokens: SyncKV evicts none."""
    return tokens


def bytes_of(state: Any) -> int:
    """The bytes of the keys and values that a step attends to, without the newest tokens."""
    representatives = len(state.head_clusters.representatives)
    chosen = int((state.chosen >= 0).sum()) / representatives
    if state.config.union_clusters:
        chosen = int(named(state.chosen, state.sizes.slots).any(1).sum())
    tokens = representatives * int(state.occupied.sum()) + (state.sizes.key_value_heads - representatives) * chosen
    return int(2 * tokens * state.sizes.head_dim * state.dtype.itemsize)


def sets_case(state: Any, query: Tensor, key: Tensor, occupied: Tensor) -> SetsCase:
    """The inputs of the R-heads' choice: query [B, Hq, D] of the layer, key [B, Hkv, S, D], occupied [B, S]."""
    heads = list(state.head_clusters.representatives)
    query = query.unflatten(1, (key.shape[1], -1))[:, heads].flatten(1, 2)
    case = SetsCase.of(query, key[:, heads], key[:, heads], occupied, scale=lockstep.scale_of(state))
    assert isinstance(case, SetsCase)
    return case


def assert_union_right(chosen: Tensor, truth: Tensor, case: SetsCase, static: Tensor) -> Verdict:
    """Assert that `chosen` [B, N_r, k] int64 holds the static tokens and the best others, ascending, then -1."""
    free = case.occupied[:, None].expand(-1, case.key_value_heads, -1)
    return assert_selected_right(
        chosen, truth, weight_interval(case), candidates=free, forced=named(static, case.slots),
        tie=tie_classes(case.key, torch.ones_like(case.key), free, per_head=True), what="chosen",
    )


class Adapter(lockstep.Adapter):
    """The lockstep adapter; the module's docstring describes its checks."""

    exact = ("static", "chosen")

    def after_prompt(self, tested: Any, reference: Any, prompt: dict[str, Tensor]) -> Verdict | None:
        occupied, query = prompt["occupied"], prompt["query"]
        total = occupied.shape[1]
        token = torch.arange(total, device=occupied.device)
        last = torch.where(occupied, token, 0).amax(1)
        newest = query.take_along_dim(last[:, None, None, None], 2)[:, :, 0]
        # In a row without tokens the query is padding, which may hold anything.
        newest = newest.masked_fill(~occupied.any(1)[:, None, None], 0)
        case = sets_case(reference, newest, prompt["key"], occupied)
        static = split_budget(reference.config.k, reference.config.rho)[0]
        for name, count in (("static", min(static, total)), ("chosen", min(reference.config.k, total))):
            one, other = getattr(tested, name), getattr(reference, name)
            assert_same(one[..., count:], other[..., count:], what=f"{name} beyond all tokens")
            if count:
                synckv_sets.assert_chosen_right(one[..., :count], other[..., :count], case, None, what=name)
        reference._static = named(tested.static, reference.sizes.slots)
        self._adopt(tested, reference)
        return None

    def before_slots(self, tested: Any, reference: Any, token: dict[str, Tensor]) -> Verdict | None:
        config = reference.config
        if reference._steps % config.stride:
            return None
        slots = reference.tokens_seen
        key = reference.key[:, :, :slots].to(token["key"].dtype)
        case = sets_case(reference, token["query"], key, reference.occupied[:, :slots])
        static, chosen, truth = reference.static, tested.chosen, reference.chosen
        # Only compare as many entries as there are slots; `compare` checks the -1 after them.
        chosen, truth = (tokens[..., :min(slots, tokens.shape[-1])] for tokens in (chosen, truth))
        verdict = None
        if config.exclude_static:
            verdict = assert_union_right(chosen, truth, case, static)
        else:
            self._dynamic(chosen, case, static, split_budget(config.k, config.rho)[1])
        self._adopt(tested, reference)
        return verdict

    @staticmethod
    def _dynamic(chosen: Tensor, case: SetsCase, static: Tensor, count: int) -> None:
        """Check a dynamic set that may contain static tokens (eq. 6 literally). Only its tokens outside the static set
        are visible; assume that the rest of it are the best static tokens."""
        fixed, visible = named(static, case.slots), named(chosen, case.slots)
        assert_same(visible & fixed, fixed, what="static tokens among the chosen")
        low, high = weight_interval(case)
        candidates = case.occupied[:, None].expand(low.shape)
        size = min(count, case.slots)
        if not size:
            assert_same(visible, fixed, what="chosen without a dynamic set")
            return
        if bool(((visible & ~fixed).sum(-1) > size).any()):
            fail(f"chosen: expected at most {size} tokens that are not static, "
                 f"got {int((visible & ~fixed).sum(-1).max())}")
        score = torch.where(visible & ~fixed, torch.inf, torch.where(fixed, low, torch.nan))
        score = score.masked_fill(~fixed & ~visible, -torch.inf).masked_fill(~candidates, -torch.inf)
        dynamic = best_candidates(score, fixed | visible, size)
        truth = best_candidates((low + high) / 2, candidates, size)
        synckv_sets.assert_chosen_right(dynamic, truth, case, None, what="dynamic")

    @staticmethod
    def _adopt(tested: Any, reference: Any) -> None:
        reference._chosen = named(tested.chosen, reference.sizes.slots)

    def after_step(self, tested: Any, reference: Any, query: Tensor) -> tuple[Tensor, Verdict | None]:
        seen = slice(0, reference.tokens_seen)
        key, value = (tensor[:, :, seen].to(query.dtype) for tensor in (reference.key, reference.value))
        case = DecodeCase.of(
            query, key, value, reference._attended[:, :, seen], scale=lockstep.scale_of(reference), per_head=True
        )
        self.bound = bounds.decode_output(case)
        return self.bound, None


def best_candidates(score: Tensor, candidates: Tensor, count: int) -> Tensor:
    """The best `count` candidates (the first in a tie), ascending, then -1."""
    slots = score.shape[-1]
    score = score.double().clamp_min(-1e300).masked_fill(~candidates, -torch.inf)
    best = score.sort(stable=True, dim=-1, descending=True).indices[..., :count]
    best = best.masked_fill(~candidates.gather(-1, best), slots).sort(-1).values
    return best.masked_fill(best == slots, -1)
