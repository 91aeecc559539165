"""Record the requests of a Triton language function to the interpreter's builder, and replay them.

In the interpreter, ``a + b`` calls some twenty functions. They inspect the types of both operands, convert, broadcast
and check them, and then request the sum of two arrays from the builder. The requests depend only on the types, numbers
and names among the arguments. So the first call makes a recording, the list of its requests to the builder. The
next call with arguments of the same kinds replays it. The interpreter's own builder computes on the same arrays, so the
results have the same bits.

Recording replaces each handle by a proxy (`_Watched`). The proxy detects a function that reads the handle's values
instead of passing it on. Such a function gets no recording, nor does one that returns anything but a tensor or None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from types import ModuleType
from typing import Any

from .arrays import Compiler

ALL = slice(None)
FULL = object()  # in keys: the slice [:]
MOST_RECORDINGS = 10_000  # per function, a few kB each
#: The functions that get recordings: language functions whose only effect is what they return or store.
_NAMES = """
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ __rfloordiv__ __mod__
    __rmod__ __neg__ __invert__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __lshift__ __rlshift__ __rshift__
    __rrshift__ __lt__ __rlt__ __le__ __rle__ __gt__ __rgt__ __ge__ __rge__ __eq__ __req__ __ne__ __rne__ __getitem__
    logical_and logical_or abs add arange broadcast broadcast_to cast ceil clamp div_rn dot exp exp2 expand_dims fdiv
    floor fma full join load log log2 maximum minimum mul num_programs permute program_id reshape rsqrt sqrt sqrt_rn
    store sub to trans where
"""
RECORDED = frozenset(_NAMES.split())
OPERATORS = frozenset(name for name in RECORDED if name.startswith("__")) - {"__neg__", "__invert__", "__getitem__"}
#: Parts of the names of builder methods that may return different results for the same arguments.
CHANGING = ("load", "store", "atomic", "program", "print", "assert", "assume", "barrier")


class Refused(Exception):
    """Raised for arguments that cannot be part of a recording's key."""


class _Data:
    """Proxy of a watched handle's array. Its size follows from the type; any other attribute counts as a value read."""

    def __init__(self, handle: _Watched) -> None:
        self._handle = handle

    @property
    def size(self) -> int:
        return self._handle.real.data.size

    def __getattr__(self, name: str) -> Any:
        self._handle.seen.append(name)
        return getattr(self._handle.real.data, name)

    def __bool__(self) -> bool:
        self._handle.seen.append("__bool__")
        return bool(self._handle.real.data)


class _Watched:
    """Proxy of a handle while a call is recorded."""

    def __init__(self, real: Any, place: int, seen: list[str]) -> None:
        self.real, self.place, self.seen = real, place, seen
        self.data = _Data(self)

    def __getattr__(self, name: str) -> Any:
        self.seen.append(name)
        return getattr(self.real, name)

    def __bool__(self) -> bool:
        self.seen.append("__bool__")
        return bool(self.real)


class Recorder:
    """Proxy of the builder while a call is recorded: forwards each request and records it."""

    def __init__(self, builder: Any, handles: Sequence[Any]) -> None:
        self.builder = builder
        self.seen: list[str] = []  # what the function read from handles; unless it is empty, there is no recording
        self.watched = [_Watched(handle, place, self.seen) for place, handle in enumerate(handles)]
        self.requests: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.builder, name)
        if not callable(method):
            return method

        def ask(*arguments: Any, **named: Any) -> Any:
            real = method(*map(real_of, arguments), **{name: real_of(value) for name, value in named.items()})
            constant = not any(type(argument) is _Watched for argument in (*arguments, *named.values()))
            if constant and not any(word in name for word in CHANGING):
                return real  # the same at every call
            if named or any(isinstance(argument, (list, tuple)) and _holds_watched(argument) for argument in arguments):
                self.seen.append(name)
            return self.add(method, arguments, real)

        return ask

    def add(self, method: Callable[..., Any], arguments: tuple[Any, ...], real: Any) -> Any:
        """Record a request with its result `real`. Returns the result's proxy, or a tuple of proxies."""
        self.requests.append((method, arguments))
        watched = _Watched(real, len(self.watched), self.seen)
        self.watched.append(watched)
        if type(real) is tuple:
            return tuple(self.add(itemgetter(number), (watched,), part) for number, part in enumerate(real))
        return watched


def real_of(argument: Any) -> Any:
    if type(argument) is _Watched:
        return argument.real
    return type(argument)(map(real_of, argument)) if type(argument) in (list, tuple) else argument


def _holds_watched(argument: Any) -> bool:
    return any(type(value) is _Watched for value in argument)


class Recordings:
    """Makes versions of one interpreter's language functions that replay recordings."""

    def __init__(self, semantic: Any, language: ModuleType, compiler: Compiler | None = None) -> None:
        self.semantic, self.tensor, self.compiler = semantic, language.core.tensor, compiler
        self.constexpr = language.core.constexpr
        self.types = (language.core.dtype, language.core.pointer_type, language.core.block_type)
        self.known: dict[str, dict[Any, Any]] = {}  # the of each function; None for a call that cannot have one
        self.plain = False  # whether functions run without recordings, which they do while a call is recorded

    def with_recordings(self, member: Callable[..., Any]) -> Callable[..., Any]:
        """`member` with the interpreter's semantic. The first call with a key makes a recording; later ones play it."""
        known: dict[tuple[Any, ...], Callable[..., Any] | None] = {}
        self.known[member.__qualname__] = known
        semantic, tensor = self.semantic, self.tensor

        def call(*arguments: Any, **named: Any) -> Any:
            named.pop("_semantic", None)
            if self.plain:
                return member(*arguments, _semantic=semantic, **named)
            try:
                found, handles = self.key(arguments, named)
            except Refused:
                return member(*arguments, _semantic=semantic, **named)
            play = known.get(found)
            if play is not None:
                return play(*handles)
            if found in known or len(known) >= MOST_RECORDINGS:
                return member(*arguments, _semantic=semantic, **named)
            returned, known[found] = self.record(member, arguments, named, handles)
            return returned

        def operator(lhs: Any, rhs: Any, **named: Any) -> Any:
            """The same, faster: most calls are of operators."""
            if type(lhs) is tensor and not self.plain:
                kind = type(rhs)
                if kind is tensor:
                    play = known.get((lhs.type.name, rhs.type.name))
                    if play is not None:
                        return play(lhs.handle, rhs.handle)
                elif kind is int or (kind is float and rhs):
                    play = known.get((lhs.type.name, kind, rhs))
                    if play is not None:
                        return play(lhs.handle)
            return call(lhs, rhs, **named)

        axes: dict[tuple[str, bool], Callable[..., Any] | None] = {}

        def new_axis(lhs: Any, rhs: Any, **named: Any) -> Any:
            """x[:, None] and x[None, :], without a look at each part of the index."""
            if type(rhs) is not tuple or len(rhs) != 2 or type(lhs) is not tensor or self.plain:
                return call(lhs, rhs, **named)
            last = rhs[1] is None
            if rhs[last] is None and type(rhs[not last]) is slice and rhs[not last] == ALL:
                play = axes.get((lhs.type.name, last))
                if play is not None:
                    return play(lhs.handle)
                made = call(lhs, rhs, **named)
                axes[lhs.type.name, last] = known.get(self.key((lhs, rhs), {})[0])
                return made
            return call(lhs, rhs, **named)

        if member.__name__ == "__getitem__":
            return new_axis
        return operator if member.__name__ in OPERATORS else call

    def key(self, arguments: Sequence[Any], named: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]]:
        """What a recording depends on in the arguments, and the handles of their tensors. Raises Refused."""
        key: list[Any] = []
        handles: list[Any] = []
        tensor = self.tensor
        for argument in arguments:
            if type(argument) is tensor:
                key.append(argument.type.name)
                handles.append(argument.handle)
            else:
                self._add_key(argument, key, handles)
        for name, argument in named.items():
            key += (tensor, name)
            self._add_key(argument, key, handles)
        return tuple(key), handles

    def _add_key(self, argument: Any, key: list[Any], handles: list[Any]) -> None:
        """Append to key what a recording depends on in one argument. Types precede values: keys are unambiguous."""
        kind = type(argument)
        if kind is self.tensor:
            key.append(argument.type.name)
            handles.append(argument.handle)
        elif kind is int or kind is bool or kind is str:
            key += (kind, argument)
        elif kind is float:  # -0.0 == 0.0 and NaN != NaN
            key += (kind, argument if argument and argument == argument else argument.hex())
        elif argument is None:
            key.append(None)
        elif kind is self.constexpr:
            key.append(kind)
            # constexpr * tensor is a constexpr of a tensor, outside of the compiler.
            self._add_keys([argument.value], key)
        elif kind in self.types:
            key += (kind, argument.name)
        elif kind is slice and argument.start is argument.stop is argument.step is None:
            key.append(FULL)
        elif kind is slice:
            key.append(kind)
            self._add_keys((argument.start, argument.stop, argument.step), key)
        elif kind in (list, tuple):
            key += (kind, len(argument))
            self._add_keys(argument, key)
        else:
            raise Refused

    def _add_keys(self, parts: Sequence[Any], key: list[Any]) -> None:
        """`_add_key` for parts of an argument, none of which may hold a tensor: its handle would be a constant."""
        inside: list[Any] = []
        for part in parts:
            self._add_key(part, key, inside)
        if inside:
            raise Refused

    def record(
        self, member: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any], handles: Sequence[Any],
        several: bool = False,
    ) -> tuple[Any, Callable[..., Any] | None]:  # fmt: skip
        """The result of `member`, and its recording for handles of the same types, or None if it cannot have one.

        several: a tuple of tensors can be the result of a recording.
        """
        recorder = Recorder(self.semantic.builder, handles)
        watched = iter(recorder.watched[:])

        def stand_in(argument: Any) -> Any:
            return self.tensor_of(next(watched), vars(argument)) if type(argument) is self.tensor else argument

        watching = [stand_in(argument) for argument in arguments]  # before `named`: the order of the handles
        named = {name: stand_in(value) for name, value in named.items()}
        self.plain, self.semantic.builder = True, recorder
        try:
            returned = member(*watching, _semantic=self.semantic, **named)
        finally:
            self.plain, self.semantic.builder = False, recorder.builder
        result = self._unwatched(returned)
        if recorder.seen or not self._can_be_played(returned, several):
            return result, None
        return result, self._replay_of(recorder, len(handles), returned)

    def _can_be_played(self, returned: Any, several: bool) -> bool:
        if several and type(returned) is tuple:
            return all(type(part) is self.tensor for part in returned)
        return returned is None or type(returned) is self.tensor

    def _unwatched(self, returned: Any) -> Any:
        if type(returned) is self.tensor:
            return self.tensor_of(real_of(returned.handle), vars(returned))
        return tuple(map(self._unwatched, returned)) if type(returned) is tuple else returned

    def tensor_of(self, handle: Any, attributes: dict[str, Any]) -> Any:
        made = object.__new__(self.tensor)
        made.__dict__ = {**attributes, "handle": handle}
        return made

    def _replay_of(self, recorder: Recorder, inputs: int, returned: Any) -> Callable[..., Any]:
        """A function of handles that replays the requests. Its list of values starts with the inputs and the constants;
        each request appends its result."""
        tensors: tuple[Any, ...] = returned if type(returned) is tuple else () if returned is None else (returned,)
        asked = [value for _, arguments in recorder.requests for value in arguments]
        asked += [tensor.handle for tensor in tensors]
        constants = [_read_only(value) for value in asked if type(value) is not _Watched]
        unused = iter(range(inputs, inputs + len(constants)))

        def place(value: Any) -> int:
            if type(value) is not _Watched:
                return next(unused)
            return value.place if value.place < inputs else value.place + len(constants)

        steps = [(method, [place(value) for value in arguments]) for method, arguments in recorder.requests]
        results = [(place(tensor.handle), vars(tensor)) for tensor in tensors]
        play = _player(steps, constants)

        def play_one_by_one(*handles: Any) -> Any:
            values = play([*handles])
            made = tuple([self.tensor_of(values[number], attributes) for number, attributes in results])
            return made if type(returned) is tuple else made[0] if made else None

        if self.compiler is None:
            return play_one_by_one
        real = [watched.real for watched in recorder.watched]
        at_once = self.compiler.player(
            recorder.requests, real[:inputs], real[inputs:], returned,
            lambda value: value.place if type(value) is _Watched else None, play_one_by_one,
        )  # fmt: skip
        return at_once or play_one_by_one


def _player(
    requests: Sequence[tuple[Callable[..., Any], list[int]]], constants: list[Any]
) -> Callable[[list[Any]], list[Any]]:
    steps = [(method, _picker(places)) for method, places in requests]

    def play(values: list[Any]) -> list[Any]:
        values += constants
        for method, pick in steps:
            values.append(method(*pick(values)))
        return values

    return play


def _picker(places: list[int]) -> Callable[[list[Any]], Any]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: [values[place] for place in places]


def _read_only(constant: Any) -> Any:
    """Make a constant's array read-only: every tensor that is made from the constant shares the array."""
    data: Any = getattr(constant, "data", None)
    if hasattr(data, "flags"):
        data.flags.writeable = False
    return constant
