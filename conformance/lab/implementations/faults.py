"""Planted faults: a right implementation that is wrong rarely, or only in large, late or unusual calls.

``KVTWIN_PLANTED=row-10 kvtwin verify longflow --impl kvtwin.conformance.lab.implementations.planted`` judges one, and
``python -m kvtwin.conformance.lab.mutation.power`` measures how often the verdict finds each of them. What is random
depends on a seed and on the number of the call, which is counted on the device: in a CUDA graph, too, each launch has
faults of its own.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...cases.case import DecodeCase
from ...judge import bounds
from .longflow import INF, Decode
from .longflow_states import LongFlow
from .others import Compress

#: Constants of splitmix64, as int64.
GOLDEN, FIRST, SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685


class Dice:
    """Random numbers from a seed and a counter."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._counters: dict[torch.device, Tensor] = {}

    def counter(self, device: torch.device) -> Tensor:
        """The number of the call on the device, from 1, [1] int64."""
        if device not in self._counters:
            self._counters[device] = torch.zeros(1, dtype=torch.int64, device=device)
        return self._counters[device].add_(1)

    def roll(self, count: int, device: torch.device) -> Tensor:
        """Uniform numbers from 0 to below 1, [count] float64, others in each call."""
        number = torch.arange(1, count + 1, device=device) + (self.counter(device) << 32)
        mixed = self._mix(number * GOLDEN + self._mix(torch.full_like(number, self.seed)))
        return (mixed & (2**52 - 1)).double() / 2**52

    def _mix(self, number: Tensor) -> Tensor:
        number = (number ^ (number >> 30)) * FIRST
        number = (number ^ (number >> 27)) * SECOND
        return number ^ (number >> 31)


class Fast(Decode):
    """LongFlow's decode step by matrix products in float64, right."""

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        return query.unflatten(1, (key.shape[1], -1)) @ key.transpose(2, 3)


class Call(NamedTuple):
    """A call of `decode_attention`: its tensors, and its other arguments."""

    query: Tensor
    key: Tensor
    value: Tensor
    occupied: Tensor
    options: dict[str, Any]


class Step(NamedTuple):
    output: Tensor
    score: Tensor
    slot: Tensor


class Planted(Fast):
    """`decode_attention`, right but for the fault that a subclass plants."""

    def __init__(self, rate: float, seed: int) -> None:
        self.rate, self.dice = rate, Dice(seed)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, **options: Any) -> Any:
        right = Step(*super().__call__(query, key, value, occupied, **options))
        return self.plant(Call(query, key, value, occupied, options), right)

    def plant(self, call: Call, right: Step) -> Step:
        return right

    def hit(self, count: int, device: torch.device) -> Tensor:
        """Which of `count` things are wrong, [count] bool."""
        return self.dice.roll(count, device) < self.rate

    def one_of(self, tensor: Tensor) -> Tensor:
        """A mask of one drawn element of the tensor."""
        index = torch.arange(tensor.numel(), device=tensor.device)
        return (index == (self.dice.roll(1, tensor.device) * tensor.numel()).long()).view(tensor.shape)


class WrongRow(Planted):
    """Some rows name the second-lowest token."""

    def lowest(self, rank: Tensor, candidate: Tensor, index: Tensor) -> Tensor:
        best = super().lowest(rank, candidate, index)
        others = candidate & (index != best[..., None])
        second = super().lowest(rank.masked_fill(~others, INF), others, index)
        wrong = self.hit(len(rank), rank.device).view(-1, *[1] * (best.dim() - 1))
        return torch.where(wrong & others.any(-1), second, best)


def misplaced(tensor: Tensor, wrong: Tensor) -> Tensor:
    """The tensor with its neighbours' numbers where the mask is True, as by a store to a wrong address."""
    return torch.where(wrong, tensor.flatten().roll(1).view(tensor.shape), tensor)


class WrongElement(Planted):
    """Some elements of the output are their neighbours'."""

    def plant(self, call: Call, right: Step) -> Step:
        wrong = self.hit(right.output.numel(), right.output.device).view(right.output.shape)
        return right._replace(output=misplaced(right.output, wrong))


class OtherBits(Planted):
    """In some launches the last bit of a score is another one."""

    def launches(self, device: torch.device) -> Tensor:
        """Whether this launch has other bits, [1] bool."""
        return self.hit(1, device)

    def plant(self, call: Call, right: Step) -> Step:
        score = right.score
        # A drawn one of the scores that are numbers, since those of free and protected slots are infinite.
        priority = self.dice.roll(score.numel(), score.device).view(score.shape).masked_fill(~score.isfinite(), -1)
        one = (priority == priority.amax()) & score.isfinite() & self.launches(score.device)
        return right._replace(score=torch.where(one, torch.nextafter(score, torch.full_like(score, INF)), score))


class OtherBitsOnASecondStream(OtherBits):
    """As by a race with the first stream."""

    def launches(self, device: torch.device) -> Tensor:
        second = device.type == "cuda" and torch.cuda.current_stream(device) != torch.cuda.default_stream(device)
        return torch.full((1,), second, device=device)


class LargeBatch(Planted):
    """Rows from 16 on are those from 0 on, as by a grid that is too small."""

    def plant(self, call: Call, right: Step) -> Step:
        row = torch.arange(len(right.output), device=right.output.device) % 16
        return Step(*(tensor[row] for tensor in right))


class ManySlots(Planted):
    """The output lacks the slots from 2,048 on, as by a loop that ends too early."""

    def seen(self, slots: int) -> int:
        return min(slots, 2048)

    def plant(self, call: Call, right: Step) -> Step:
        seen, slots = self.seen(call.key.shape[2]), call.key.shape[2]
        if seen == slots:
            return right
        attended = call.occupied & (torch.arange(slots, device=call.key.device) < seen)
        short = Decode.__call__(Fast(), call.query, call.key, call.value, attended, **call.options)
        return right._replace(output=short[0])


class LastTile(ManySlots):
    """The output lacks the last slots, those after the last whole tile of 128."""

    def seen(self, slots: int) -> int:
        return slots // 128 * 128 or slots


class SecondCall(Planted):
    """The second call with a shape adds to what the first left behind: a sixteenth of its output."""

    def __init__(self, rate: float, seed: int) -> None:
        super().__init__(rate, seed)
        self._first: dict[Any, Tensor | None] = {}

    def plant(self, call: Call, right: Step) -> Step:
        place = (call.query.shape, call.key.shape, call.query.dtype, call.query.device)
        if place not in self._first:
            self._first[place] = right.output.clone()
            return right
        left, self._first[place] = self._first[place], None
        return right if left is None else right._replace(output=right.output + left / 16)


class OneDtype(Planted):
    """An element of the output is its neighbour's if the inputs are bfloat16."""

    def plant(self, call: Call, right: Step) -> Step:
        if call.query.dtype != torch.bfloat16:
            return right
        return right._replace(output=misplaced(right.output, self.one_of(right.output)))


class ThreeBounds(Planted):
    """An element of the output is three times its bound away from where it was."""

    def plant(self, call: Call, right: Step) -> Step:
        case = DecodeCase.of(call.query, call.key, call.value, call.occupied, **call.options)
        error = 3 * bounds.decode_output(case) * self.one_of(right.output)
        return right._replace(output=(right.output.double() + error).to(right.output.dtype))


class WrongElementOfAPrompt(Compress):
    """`snapkv.compress`: some elements of the kept keys are their neighbours'."""

    def __init__(self, rate: float, seed: int) -> None:
        self.rate, self.dice = rate, Dice(seed)

    def __call__(self, *args: Any, **options: Any) -> Any:
        key, value, kept = super().__call__(*args, **options)
        wrong = self.dice.roll(key.numel(), key.device).view(key.shape) < self.rate
        return misplaced(key, wrong), value, kept


def late_state(rate: float, seed: int) -> type[LongFlow]:
    """`LongFlowState`: in each 500th step of a state, the slot with the second-lowest score is the next one."""
    class Late(LongFlow):
        steps = 0

        def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            output = super().step(query, key, value)
            self.steps += 1
            if self.steps % round(1 / rate) == 0 and self.config.budget > 1:
                second = self.score.topk(2, dim=-1, largest=False).indices[..., 1]
                self.next_slot = torch.where(self.occupied.all(-1), second, self.next_slot)
            return output

    return Late


@dataclass(frozen=True)
class Fault:
    """made(rate, seed): what is provided in place of `method`.`function`. shows: the property under which the fault is
    likely to be found. blind: by device, why a verdict there finds it by luck alone, or not at all."""

    what: str
    made: Callable[[float, int], Any]
    rate: float = 1.0
    method: str = "longflow"
    function: str = "decode_attention"
    shows: str = "accuracy"
    blind: Mapping[str, str] = field(default_factory=lambda: NOTHING)

    def provided(self, seed: int) -> types.SimpleNamespace:
        """A module of the method with the fault alone."""
        return types.SimpleNamespace(**{self.function: self.made(self.rate, seed)})


NOTHING: Mapping[str, str] = MappingProxyType({})
NO_STREAM = MappingProxyType({"cpu": "it has no streams"})
FEW_STEPS = MappingProxyType({"cpu": "its states run fewer steps"})
RATES = (10, 100, 1000)


def _all() -> Iterator[tuple[str, Fault]]:
    rated: tuple[tuple[str, Any, str, dict[str, Any]], ...] = (
        ("row", WrongRow, "a row names the second-lowest token: 1 row in {}", {"shows": "decisions"}),
        ("element", WrongElement, "an element of the output is its neighbour's: 1 element in {}", {}),
        ("bits", OtherBits, "a launch has another last bit in a score: 1 launch in {}",
         {"shows": "repeatability"}),
        ("prompt-element", WrongElementOfAPrompt, "an element of a kept key is its neighbour's: 1 element in {}",
         {"method": "snapkv", "function": "compress"}),
    )
    for name, made, what, more in rated:
        for rate in RATES:
            yield f"{name}-{rate}", Fault(what.format(f"{rate:,}"), made, 1 / rate, **more)
    yield "batch", Fault("rows from 16 on are those from 0 on", LargeBatch)
    yield "slots", Fault("the output lacks the slots from 2,048 on", ManySlots)
    yield "last-tile", Fault("the output lacks the last S % 128 slots, if S > 128", LastTile)
    yield "second-call", Fault("the second call with a shape adds to what the first one left", SecondCall)
    yield "stream", Fault(
        "on a second stream, a score has another last bit", OtherBitsOnASecondStream, shows="repeatability",
        blind=NO_STREAM,
    )
    yield "state-500", Fault(
        "each 500th step of a state names the second-lowest token", late_state, 1 / 500, function="LongFlowState",
        shows="state", blind=FEW_STEPS,
    )
    yield "bfloat16", Fault("with bfloat16, an element of the output is its neighbour's", OneDtype)
    yield "three-bounds", Fault("an element of the output is 3 bounds away", ThreeBounds)


FAULTS: dict[str, Fault] = dict(_all())
