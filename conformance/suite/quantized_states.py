"""States that quantize tokens and evict none, for their tests: new ones, tokens, and checks that all must pass."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ..cases.case import DecodeCase
from ..cases.oracle import attend
from ..judge import bounds, checkers, reconstructed
from ..judge.compare import assert_same, assert_within

CODES = ("codes_of_keys", "codes_of_values")


@dataclass(frozen=True)
class Kit:
    """The states of a method, with small options."""

    method: str
    options: dict[str, Any]
    batch: int = 2
    query_heads: int = 4
    heads: int = 2
    head_dim: int = 16

    def state(self, side: Any, device: torch.device, **options: Any) -> Any:
        """A new state. batch, head_dim and dtype are options, too."""
        pair = checkers.pair(self.method)
        module = checkers.module(side, pair)
        sizes = {
            "batch": options.pop("batch", self.batch), "head_dim": options.pop("head_dim", self.head_dim),
            "dtype": options.pop("dtype", torch.float32),
        }
        assert pair.state is not None and pair.config is not None
        return getattr(module, pair.state.__name__)(
            pair.config(**{**self.options, **options}), query_heads=self.query_heads, key_value_heads=self.heads,
            device=device, **sizes,
        )

    def tokens(self, device: torch.device, count: int, *, seed: int = 1, batch: int | None = None) -> list[Tensor]:
        """query [B, Hq, T, D]; key, value [B, Hkv, T, D]."""
        generator = torch.Generator().manual_seed(seed)
        rows = self.batch if batch is None else batch
        return [
            torch.randn(rows, heads, count, self.head_dim, generator=generator).to(device)
            for heads in (self.query_heads, self.heads, self.heads)
        ]

    def check_steps_store_what_a_prompt_does(self, side: Any, device: torch.device, count: int) -> None:
        """One token at a time: the codes are the same bits."""
        whole, stepped = (self.state(side, device) for _ in range(2))
        given = self.tokens(device, count)
        whole.prefill(*given)
        for number in range(count):
            stepped.step(*at(given, number))
        assert_same_codes(stepped, whole)
        for name in ("key", "value", "positions"):
            assert_same(getattr(stepped, name), getattr(whole, name), what=name)

    def check_output_is_unquantized(
        self, output: Tensor, given: list[Tensor], number: int, *, times: float = 1
    ) -> None:
        """The output of step `number` is that of full attention to the tokens as they came."""
        query, key, value = given
        occupied = torch.ones(len(key), number + 1, dtype=torch.bool, device=key.device)
        case = DecodeCase.of(query[:, :, number], key[:, :, :number + 1], value[:, :, :number + 1], occupied)
        assert_within(output, case.attention.output[:, :, 0], times * bounds.decode_output(case), what="output")

    def check_a_full_state_refuses_a_token(self, side: Any, device: torch.device, max_tokens: int) -> None:
        """And stays as it was."""
        state, given = self.state(side, device, max_tokens=max_tokens), self.tokens(device, max_tokens)
        state.prefill(*given)
        before = contents(state)
        with pytest.raises(ValueError, match=f"^max_tokens={max_tokens} is too small for {max_tokens + 1} tokens"):
            state.step(*at(given, 0))
        for one, other in zip(contents(state), before, strict=True):
            assert_same(one, other, what="state")
        assert state.tokens_seen == max_tokens

    def check_a_replay_beyond_the_last_slot_drops_its_token(
        self, side: Any, device: torch.device, max_tokens: int
    ) -> None:
        """The host does not count replays of a graph. The kernels do, and attend to the tokens that there are."""
        state, given = self.state(side, device, max_tokens=max_tokens), self.tokens(device, max_tokens)
        if not hasattr(state, "_counted"):
            pytest.skip("counts tokens on the host in an attribute of kvtwin's own state, `_counted`")
        state.prefill(*given)
        before = contents(state)
        state._counted = 0
        token = at(self.tokens(device, 1, seed=5), 0)
        output = state.step(*token)
        assert state.tokens_seen == max_tokens
        for one, other in zip(contents(state), before, strict=True):
            assert_same(one, other, what="state")
        occupied = torch.ones(self.batch, max_tokens, dtype=torch.bool, device=device)
        case = DecodeCase.of(token[0], state.key, state.value, occupied)
        # The stored numbers are exact in float32 up to their own rounding, which the judge bounds elsewhere.
        error = (output.double() - case.attention.output[:, :, 0]).abs()
        assert float((error / bounds.decode_output(case)).max()) < 2


def at(given: list[Tensor], number: int) -> list[Tensor]:
    """One of the tokens."""
    return [tensor[:, :, number] for tensor in given]


def contents(state: Any) -> list[Tensor]:
    """Copies of what a state stores."""
    codes = [part for name in CODES for part in getattr(state, name)()]
    return [tensor.clone() for tensor in (state.positions, state.key, state.value, *codes)]


def assert_same_codes(one: Any, other: Any, rows: slice = slice(None)) -> None:
    """Both states have the same codes, scales and minima; `rows`: those of `one`."""
    for name in CODES:
        for found, expected in zip(getattr(one, name)(), getattr(other, name)(), strict=True):
            assert_same(found[rows], expected, what=name)


def checked_step(judge: ModuleType, state: Any, token: tuple[Tensor, ...], rows: int) -> Tensor:
    """Take a step. Its output for the first rows must be within the bound of float64 over the numbers that the codes
    stand for. judge: the method's checker. Returns the output of all rows."""
    seen = state.tokens_seen
    key, value, key_error, value_error = judge.read_by(state, rows)
    query, new_key, new_value = (tensor[:rows] for tensor in token)
    key[:, :, seen], value[:, :, seen] = new_key.double(), new_value.double()
    occupied = (torch.arange(key.shape[2], device=key.device) <= seen).expand(rows, -1)
    output: Tensor = state.step(*token)
    truth = attend(query, key, value, occupied).output[:, :, 0]
    bound = reconstructed.decode_output(query, key, value, occupied, key_error, value_error, scale=None)
    assert_within(output[:rows], truth, bound, what="output")
    return output
