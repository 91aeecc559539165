"""Checker of EpiKV: its state against the score intervals of `epikv_scores`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....reference.contract.epikv.config import BANDS, POLICIES, SPREADS, EpiKVConfig
from ...cases import draws, tiny
from ...cases.case import DecodeCase
from .. import lockstep
from ..bounds import Interval
from ..choices import Verdict, assert_eviction_right, assert_kept_right
from ..compare import assert_dtype, assert_same, fail
from ..fields import field
from ..variants import ONE, variant
from . import epikv_hybrids, epikv_scores

__all__ = [
    "DECIDING", "DEFAULTS", "GROUPINGS", "KEEPS_PROMPTS", "SAME", "SMALL", "VARIANTS", "Adapter", "arguments",
    "assert_inside", "configs", "extras", "parts",
]

SEGMENTS = {"tau": 2, "edges": (0.3, 0.6), "sparsity_threshold": 0.3}
BY_ENTROPY = {"tau": 2, "edges": (0.8, 0.88), "segments_by": "entropy"}
#: Prompt tokens may be evicted, so small budgets are allowed.
SMALL = {"keep_prompt": False, "window": 3, "chunk": 2}
KEEPS_PROMPTS = True
DECIDING = {"window": 5}
#: Section 3.3, eq. 2 and 3, has the window. Section 2 classifies by sparsity; table 1 has "segment entropy".
DEFAULTS = {
    "policy": "epikv", "window": 64, "tau": 128, "chunk": 128, "spread": "deviation", "recent": None,
    "keep_prompt": True, "count_prompt": True, "max_prompt": 0, "bands": None, "hidden_size": None, "edges": None,
    "sparsity_threshold": 0.01, "segments_by": "sparsity", "scale": None,
}
SAME = ("window", "chunk", "spread", "policy")
GROUPINGS = (
    {"policy": "lag_kv"}, {"policy": "kv_val"}, {"policy": "attn_x_hs"}, {"policy": "segment_hs", **SEGMENTS},
    {"policy": "segment_hs", **BY_ENTROPY},
)


VARIANTS = (
    # The mean over many heads is close for all tokens: only a long window decides.
    *(variant(name, {"window": 12}, **ONE | {"key_value_heads": heads, "group": group}, prompt=14, steps=6)
      for name, heads, group in (("five-heads-in-groups-of-three", 5, 3), ("nine-heads", 9, 1))),
    variant("zero-values-beside-free-slots", {"window": 12}, content="zero_values", budget=18, prompt=30, steps=8),
    variant("no-prompt", {"window": 7}, prompt=0, steps=24),
    *(variant(f"{policy}", {"policy": policy, **(SEGMENTS if policy == "segment_hs" else {})}, padding="random")
      for policy in POLICIES),
    *(variant(f"{policy}-and-padding-that-comes-last", {
        "policy": policy, "window": 7, **(SEGMENTS if policy == "segment_hs" else {}),
    }, padding="stairs_down", prompt=20, steps=9) for policy in BANDS),
    variant("lag-of-variances", {"policy": "lag_kv", "spread": "variance"}, padding="random", prompt=20, steps=12),
    variant("segments-by-entropy", {"policy": "segment_hs", **BY_ENTROPY}, steps=12),
    variant("bands", {"policy": "band_adaptive", "bands": (1, 3), "recent": 2}, key_value_heads=2),
    variant("prompt-kept", {"keep_prompt": True, "count_prompt": False, "max_prompt": 14}, steps=12),
    variant("prompt-kept-by-a-hybrid", {
        "keep_prompt": True, "count_prompt": False, "max_prompt": 16, "policy": "attn_x_hs",
    }, steps=12, padding="random", batch=3),
    *(variant(f"{policy}-in-five-heads", {"policy": policy, "window": 4, "chunk": 3}, **ONE | {
        "key_value_heads": 5, "batch": 2, "padding": "stairs",
    }, steps=12, long=policy == "lag_kv") for policy in ("kv_key", "kv_val", "lag_kv")),
)


@st.composite
def configs(draw: st.DrawFn, most: int, window: int) -> dict[str, Any]:
    """See the package. Most configs may evict prompt tokens and use windows of more than two values (the scores of two
    values are +-1 and tie), so that most decisions are decisive."""
    budget, kept = draw(draws.budgets(most)), draw(st.sampled_from((False, False, True)))
    policy = draw(st.sampled_from(POLICIES))
    segments = draw(st.sampled_from((SEGMENTS, BY_ENTROPY))) if policy == "segment_hs" else {}
    return {
        "budget": budget, "policy": policy,
        "recent": draw(st.none() | draws.protected(budget)), "window": draw(st.sampled_from((4, 7, 64, 5, 2))),
        "chunk": draw(st.sampled_from((2, 1, 3, 7))),
        **({"count_prompt": False, "max_prompt": 300 if torch.cuda.is_available() else 24} if kept else
           {"keep_prompt": False}),
        **({"spread": draw(st.sampled_from(SPREADS))} if policy == "lag_kv" else {}),
        **({**segments, "tau": draw(st.sampled_from((3, 1, 5)))} if segments else {}),
        **({"bands": draw(st.sampled_from(((2, 1), (1, 3))))} if policy == "band_adaptive" else {}),
    }


def extras(state: Any, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Hidden states made from the tokens: band A from the query, band B from key and value. Layers and channels differ
    by powers of two."""
    config = state.config
    if not config.reads_hidden:
        return {}
    size = config.hidden_size or query.shape[1] * query.shape[-1]

    def flat(tensor: Tensor) -> Tensor:
        return tensor.flatten(1) if tensor.dim() == 3 else tensor.transpose(1, 2).flatten(2)

    def band(vectors: Tensor, layers: int) -> Tensor:
        wide = vectors.repeat(*[1] * (vectors.dim() - 1), -(-size // vectors.shape[-1]))[..., :size]
        channel = torch.arange(size, device=wide.device)
        factors = [torch.exp2(-((channel + layer) % 3).float()).to(wide.dtype) for layer in range(layers)]
        return torch.stack([wide * factor for factor in factors], 1)

    one, other = config.layers
    second = {"hidden_b": band(torch.cat((flat(key), flat(value)), -1), other)} if other else {}
    return {"hidden_a": band(flat(query), one), **second}


def arguments(device: torch.device) -> dict[str, Any]:
    """See the package."""
    hidden = torch.randn(2, tiny.BATCH, tiny.SLOTS, 24, generator=torch.Generator().manual_seed(7)).to(device)
    series = hidden[0, ..., 0].abs().contiguous()
    return {
        "hidden": hidden[0], "previous": hidden[1], "g": series, "change_a": series, "change_b": series.flip(0),
        "key_or_value": tiny.prompt(device, seed=0)[1], "lag_kv.chunk": 2, "window": 3, "select.score": series,
        "score.policy": "hs_variance", "select.prompt": 1, "select.recent": 1, "select.budget": 3,
    }


def parts(module: Any) -> dict[str, Any]:
    """See the package: the scorer, for a policy on hidden states and for one on keys."""
    def scorer(policy: str, device: torch.device) -> Any:
        return module.EpiKVScorer(**sizes(policy, device))

    def sizes(policy: str, device: torch.device) -> dict[str, Any]:
        return {
            "config": EpiKVConfig(budget=2 * tiny.SLOTS, policy=policy, window=3, keep_prompt=False),
            "batch": tiny.BATCH, "hidden_size": 24, "key_value_heads": tiny.KEY_VALUE_HEADS,
            "head_dim": tiny.HEAD_DIM, "dtype": torch.float32, "device": device,
        }

    def hidden(device: torch.device, *time: int) -> tuple[Tensor, Tensor]:
        return tuple(torch.ones(tiny.BATCH, 1, *time, 24, device=device) for _ in range(2))  # type: ignore[return-value]

    def prompt(device: torch.device) -> dict[str, Any]:
        _, key, value = tiny.prompt(device, seed=1)
        mask = torch.ones(tiny.BATCH, tiny.SLOTS, dtype=torch.bool, device=device)
        return {"occupied": mask, "hidden": hidden(device, tiny.SLOTS), "key": key, "value": value, "received": None}

    def step(device: torch.device) -> dict[str, Any]:
        _, key, value = tiny.token(device, seed=1)
        return {"hidden": None, "key": key, "value": value}

    good: dict[str, tuple[str, Any]] = {
        "prefill": ("epikv", prompt), "step": ("kv_key", step),
        "check_prompt": ("epikv", lambda device: {"occupied": prompt(device)["occupied"]}),
        "observe": ("epikv", lambda device: {
            "layer": 1, "hidden": hidden(device, tiny.SLOTS)[0][:, 0], "occupied": prompt(device)["occupied"],
        }),
        "admit": ("epikv", lambda device: {
            "occupied": prompt(device)["occupied"], "scores": prompt(device)["key"][:, 0, :, 0], "received": None,
        }),
        "reorder": ("epikv", lambda device: {"index": torch.tensor([1, 0], device=device)}),
    }

    def method(name: str, device: torch.device) -> tuple[Any, Any, dict[str, Any]]:
        policy, arguments = good[name]
        made = scorer(policy, device)
        return getattr(made, name), made, arguments(device)

    found: dict[str, Any] = {f"EpiKVScorer.{name}": partial(method, name) for name in good}
    found["EpiKVScorer.step of hidden states"] = lambda device: (
        (made := scorer("epikv", device)).step, made, {"hidden": hidden(device)}
    )
    return {"EpiKVScorer": lambda device: (module.EpiKVScorer, None, sizes("epikv", device)), **found}


def assert_inside(actual: Tensor, interval: Interval, *, what: str, where: Tensor | None = None) -> None:
    """Assert that every element (of those under the mask `where`) is within its interval; NaN is not."""
    actual = actual.double()
    wrong = ~((actual >= interval.low) & (actual <= interval.high))
    if where is not None:
        wrong = wrong & where
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        fail(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are out of their bounds; the first, at {at}: "
            f"expected {interval.low[at].item()!r} to {interval.high[at].item()!r}, got {actual[at].item()!r}"
        )


class Adapter(lockstep.Adapter):
    """Checks every token's score against its interval, which is computed once, when the token arrives. The protected
    tokens and the slots that a row may use are derived from positions, the config and the padding."""

    exact: tuple[str, ...] = ("next_slot",)
    any_slot_order = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.history: dict[str, Tensor] = {}
        self.low: Tensor | None = None
        self.high: Tensor | None = None
        self.prompt: Tensor | None = None
        self.sums = epikv_hybrids.Sums()

    def reorder(self, index: Tensor) -> None:
        self.history = {name: tensor.index_select(0, index) for name, tensor in self.history.items()}
        if self.low is not None and self.high is not None:
            self.low, self.high = self.low.index_select(0, index), self.high.index_select(0, index)
        if self.prompt is not None:
            self.prompt = self.prompt.index_select(0, index)
        self.sums.reorder(index)

    # Scores ----------------------------------------------------------------------------------------------------------

    def _arrive(self, state: Any, tokens: dict[str, Tensor], occupied: Tensor) -> None:
        """Compute the intervals of new tokens [B, H, n, D], whose scores are frozen from now on."""
        config, count = state.config, occupied.shape[1]
        if config.reads_hidden:
            new = {name: tensor.double() for name, tensor in self._extras(state, count, tokens).items()}
        else:
            new = {name: tokens[name].double() for name in ("key", "value")}
        new["occupied"] = occupied
        self.history = {
            name: torch.cat((self.history[name], tensor), 1 if name == "occupied" else 2) if self.history else tensor
            for name, tensor in new.items()
        }
        past = self.history
        if config.reads_hidden:
            found = epikv_scores.hidden_interval(
                tuple(past[name] for name in ("hidden_a", "hidden_b") if name in past), past["occupied"],
                policy=config.policy, window=config.window,
            )
        else:
            found = epikv_scores.vector_interval(
                past["key"], past["value"], past["occupied"], policy=config.policy, window=config.window,
                chunk=config.chunk, spread=config.spread,
            )
        low, high = (end[:, -count:] for end in found)
        if self.prompt is None and config.keep_prompt and state.tokens_seen == count:
            low = high = torch.full_like(low, torch.inf)                                 # the prompt is kept
        self.low = low if self.low is None else torch.cat((self.low, low), 1)
        self.high = high if self.high is None else torch.cat((self.high, high), 1)
        self.sums.arrive(occupied)

    def _scores(self, state: Any) -> Interval:
        """The intervals of all tokens so far, by position."""
        assert self.low is not None
        assert self.high is not None
        own = Interval(self.low, self.high)
        return self.sums.added(own) if state.config.policy == "attn_x_hs" else own

    @staticmethod
    def _extras(state: Any, count: int, tokens: dict[str, Tensor]) -> dict[str, Tensor]:
        """hidden_a and hidden_b of `count` tokens, [B, L, n, C]."""
        return extras(state, **tokens)

    def _slot_intervals(self, state: Any) -> Interval:
        """The intervals of the tokens in the slots, [B, S]; -inf in free slots."""
        place = state.positions.clamp_min(0)
        free = state.positions < 0
        return Interval(*(end.gather(1, place).masked_fill(free, -torch.inf) for end in self._scores(state)))

    # Called by lockstep ----------------------------------------------------------------------------------------------

    def after_prompt(self, tested: Any, reference: Any, prompt: dict[str, Tensor]) -> Verdict | None:
        config, occupied = reference.config, prompt["occupied"]
        tokens = {name: prompt[name] for name in ("query", "key", "value")}
        self._arrive(reference, tokens, occupied)
        self.prompt = occupied if config.keep_prompt else occupied[:, :0]
        total = occupied.shape[1]
        verdict = None
        if config.policy == "attn_x_hs" and not config.keep_prompt:
            self.sums.prompt(prompt, reference.scale)
        if not config.keep_prompt and total > config.budget:
            scores = self._scores(reference)
            kept, right = tested.positions[:, :config.budget], reference.positions[:, :config.budget]
            verdict = assert_kept_right(
                kept, right, scores, occupied=occupied, protected=None, window=config.newest,
                tie=exact_ties(scores, occupied), what="tokens kept of the prompt",
            )
            if bool((kept != right).any()):
                self._adopt(reference, kept, prompt)
        self._check_scores(tested, reference, "after the prompt")
        self._choice(tested, reference, "after the prompt")
        return verdict

    def after_step(self, tested: Any, reference: Any, query: Tensor) -> tuple[Tensor, Verdict | None]:
        bound, _ = super().after_step(tested, reference, query)
        when = f"at token {reference.tokens_seen - 1}"
        if reference.config.reads_attention:
            case = DecodeCase.of(query, tested.key, tested.value, reference.occupied, scale=reference.scale)
            if reference.thoughts is None:
                self.sums.step(case.attention, reference.positions)
            else:
                epikv_hybrids.assert_thoughts_right(tested, reference, case, when)
        self._check_scores(tested, reference, when)
        return bound, self._choice(tested, reference, when)

    def before_slots(self, tested: Any, reference: Any, token: dict[str, Tensor]) -> Verdict | None:
        tokens = {name: tensor[:, :, None] for name, tensor in token.items()}
        if self.prompt is None:
            self.prompt = torch.zeros(len(token["key"]), 0, dtype=torch.bool, device=token["key"].device)
        self._arrive(reference, tokens, torch.ones_like(tokens["key"][:, 0, :, 0], dtype=torch.bool))
        return None

    def _adopt(self, reference: Any, kept: Tensor, prompt: dict[str, Tensor]) -> None:
        """Make the reference keep these prompt tokens [B, N] instead."""
        scorer, count = reference.scorer, kept.shape[1]
        scores = torch.full((len(kept), prompt["occupied"].shape[1]), -torch.inf, dtype=torch.float64)
        scores = scores.to(kept.device).scatter(1, scorer.positions.clamp_min(0), scorer.score)
        low, high = self._scores(reference)
        middle = torch.where(scores == -torch.inf, (low + high) / 2, scores)
        if scorer.attention is not None:
            grown = self.sums.exact
            assert grown is not None
            parts = (middle - grown, grown) if reference.config.policy == "attn_x_hs" else (middle, None)
            scorer.attention.admit(kept, *(
                part if part is None else part.gather(1, kept.clamp_min(0)).masked_fill(kept < 0, fill)
                for part, fill in zip(parts, (-torch.inf, 0), strict=True)
            ))
        scorer.positions[:, :count] = kept
        scorer.score[:, :count] = middle.gather(1, kept.clamp_min(0)).masked_fill(kept < 0, -torch.inf)
        for name in ("key", "value"):
            place = kept.clamp_min(0)[:, None, :, None].expand(-1, prompt[name].shape[1], -1, prompt[name].shape[3])
            getattr(reference, name)[:, :, :count] = prompt[name].double().gather(2, place)
        scorer._choose()

    def _check_scores(self, tested: Any, reference: Any, when: str) -> None:
        assert_same(tested.positions, reference.positions, what=f"positions {when}")
        with field("score"):
            assert_dtype(tested.score, torch.float32, what="score")
            assert_inside(tested.score, self._slot_intervals(reference), what=f"score {when}")
        assert_inside(reference.score, self._slot_intervals(reference), what=f"the oracle's score {when}")

    def _choice(self, tested: Any, reference: Any, when: str) -> Verdict:
        """Check the next slot and adopt it."""
        config, positions = reference.config, reference.positions
        slots = positions.shape[1]
        index = torch.arange(slots, device=positions.device).expand(positions.shape)
        assert self.prompt is not None
        room = torch.full_like(positions[:, :1], config.budget)
        if not config.count_prompt:
            room = room + self.prompt.sum(1, keepdim=True)
        usable, occupied = index < room, reference.occupied
        newest = positions > reference.tokens_seen - config.newest
        protected = occupied & (newest | (positions < self.prompt.shape[1])) | ~usable
        if reference.thoughts is not None:
            # Only the least important thoughts among the unprotected tokens may be evicted.
            thought = torch.where(occupied & ~protected, reference.thoughts, 3)
            protected = protected | occupied & (thought > thought.amin(1, keepdim=True))
        # Ties go to the oldest token, so sort the slots by age. Rows with a free slot are compared in slot order.
        full = (occupied | ~usable).all(1, keepdim=True)
        age = positions.where(occupied, reference.tokens_seen + index)
        order = torch.where(full, age.argsort(dim=1, stable=True), index)
        place = torch.empty_like(order).scatter(1, order, index)
        intervals = self._slot_intervals(reference)
        scores = Interval(*(end.gather(1, order) for end in intervals))
        occupied, protected = ((x | ~usable).gather(1, order) for x in (occupied, protected))
        for state in (tested, reference):
            chosen = state.next_slot
            if chosen.dtype != torch.int64 or bool(((chosen < 0) | (chosen >= slots)).any()):
                fail(f"next_slot {when}: expected int64 in 0..{slots - 1}, got {chosen.dtype}: {chosen.tolist()}")
        verdict = assert_eviction_right(
            place.gather(1, tested.next_slot[:, None])[:, 0], place.gather(1, reference.next_slot[:, None])[:, 0],
            scores, occupied=occupied, protected=protected, tie=exact_ties(scores, occupied),
            what=f"next_slot {when} (slots sorted from the oldest to the newest token)",
        )
        reference.next_slot = tested.next_slot.clone()
        return verdict


def exact_ties(scores: Interval, occupied: Tensor) -> Tensor:
    """Classes of slots [B, S] that score the same in any arithmetic, the lowest slot of each: scores without rounding,
    such as 0 for a token without a change or a predecessor, and the infinity of a first chunk."""
    index = torch.arange(occupied.shape[1], device=occupied.device).expand(occupied.shape)
    fixed = (scores.low == scores.high) & occupied
    equal = fixed[:, :, None] & fixed[:, None, :] & (scores.low[:, :, None] == scores.low[:, None, :])
    return torch.where(fixed, index[:, None, :].where(equal, occupied.shape[1]).amin(-1), index)
