"""The states of all ranks, seen as one state by the judge, which runs on every rank with the same inputs."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from ...judge.mismatch import fail

#: Attributes with a KV head per rank; of a state whose heads decide for themselves, also those of EACH.
HEADS = ("key", "value")
EACH = ("occupied", "positions", "score", "next_slot")
#: Arguments of `prefill` and `step` by heads. Others are the same on all ranks.
QUERY, KEY_VALUE = ("query",), ("key", "value")


class Share(NamedTuple):
    """The heads of a rank: from first to end - 1."""

    query: tuple[int, int]
    key_value: tuple[int, int]


def shares(query_heads: int, key_value_heads: int, ranks: int) -> list[Share]:
    """The heads of each rank, in order. Ranks have nearly as many KV heads each. If there are more ranks than KV heads,
    several of them hold the same KV head, each with a part of its query heads. ValueError if that does not come out
    even."""
    group = query_heads // key_value_heads
    if ranks <= key_value_heads:
        ends = [key_value_heads * rank // ranks for rank in range(ranks + 1)]
        return [Share((first * group, end * group), (first, end)) for first, end in pairwise(ends)]
    copies, rest = divmod(ranks, key_value_heads)
    if rest or group % copies:
        raise ValueError(f"{query_heads} query heads of {key_value_heads} KV heads cannot be spread over {ranks} ranks")
    part = group // copies
    return [Share((rank * part, rank * part + part), (rank // copies, rank // copies + 1)) for rank in range(ranks)]


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_same_on_all_ranks(tensor: Tensor, name: str, group: Any) -> None:
    """Assert that all ranks hold the same bits: the least and the greatest of their hashes are the same."""
    digest = hashlib.blake2b(bits_of(tensor).cpu().numpy().tobytes(), digest_size=7).digest()
    least = torch.tensor([int.from_bytes(digest, "little")], device=tensor.device)
    greatest = least.clone()
    distributed.all_reduce(least, distributed.ReduceOp.MIN, group)
    distributed.all_reduce(greatest, distributed.ReduceOp.MAX, group)
    if not torch.equal(least, greatest):
        fail(f"{name} differs between the ranks")


class Sharded:
    """A state of all heads that consists of a state on each rank. Tensors are whole, on every rank."""

    def __init__(
        self, method: Any, state: str, group: Any, config: Any, *, query_heads: int, key_value_heads: int, **sizes: Any
    ) -> None:
        self.config, self._method, self._group = config, method, group
        ranks, kind = distributed.get_world_size(group), getattr(method, state)
        self._shares = shares(query_heads, key_value_heads, ranks)
        mine = self._shares[distributed.get_rank(group)]
        self._query, self._key_value = slice(*mine.query), slice(*mine.key_value)
        self._more = {"process_group": group}
        if "replicas" in inspect.signature(kind).parameters:
            self._more["replicas"] = max(1, ranks // key_value_heads)
        self.state = kind(
            config, query_heads=mine.query[1] - mine.query[0],
            key_value_heads=mine.key_value[1] - mine.key_value[0], **self._more, **sizes,
        )

    def prefill(self, *tokens: Any, **named: Any) -> Tensor:
        return torch.cat(parts(self.state.prefill(**self._mine(tokens, named)), self._group), 1)

    def step(self, *tokens: Any, **named: Any) -> Tensor:
        return torch.cat(parts(self.state.step(**self._mine(tokens, named)), self._group), 1)

    def _mine(self, tokens: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        """The arguments of this rank's state, from those of the whole."""
        given = dict(zip((*QUERY, *KEY_VALUE, "occupied"), tokens, strict=False)) | named
        given |= {name: given[name][:, self._query] for name in QUERY}
        return given | {name: given[name][:, self._key_value] for name in KEY_VALUE}

    def function_of(self, name: str) -> Any:
        """A function of the method by the keys of all heads [Hkv, ...], which all ranks compute together; None if there
        is none."""
        real = getattr(self._method, name, None)
        return None if real is None else lambda key, *more: real(key[self._key_value], *more, **self._more)

    def reset(self) -> None:
        self.state.reset()

    def reorder(self, index: Tensor) -> None:
        self.state.reorder(index)

    @property
    def tokens_seen(self) -> int:
        return int(self.state.tokens_seen)

    def __getattr__(self, name: str) -> Any:
        tensor = None if name.startswith("_") or "state" not in vars(self) else getattr(self.state, name)
        if not isinstance(tensor, Tensor):
            raise AttributeError(name)
        if name in HEADS or (name in EACH and getattr(self.config, "per_head", False)):
            return once(tensor, name, self._group, self._shares)
        assert_same_on_all_ranks(tensor, name, self._group)
        return tensor


def parts(tensor: Tensor, group: Any) -> list[Tensor]:
    """The tensors of all ranks."""
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, tensor.cpu(), group)
    return [part.to(tensor.device) for part in found]


def once(tensor: Tensor, name: str, group: Any, spread: Sequence[Share]) -> Tensor:
    """The tensors of all ranks, with each KV head once. Ranks with the same KV head must hold the same bits of it."""
    found: dict[tuple[int, int], Tensor] = {}
    for share, part in zip(spread, parts(tensor, group), strict=True):
        one = found.setdefault(share.key_value, part)
        if not torch.equal(bits_of(one), bits_of(part)):
            fail(f"{name} of a KV head differ between the ranks that hold it")
    return torch.cat(list(found.values()), 1)


def module_of(method: Any, state: str, group: Any, prepare: Callable[[Any], None] | None = None) -> Any:
    """A stand-in for a method's module, whose state is spread over the ranks of `group`. prepare: changes a rank's
    state."""
    def construct(config: Any, **sizes: Any) -> Sharded:
        made = Sharded(method, state, group, config, **sizes)
        if prepare is not None:
            prepare(made.state)
        return made

    return SimpleNamespace(**{state: construct})
