"""Compile a recording (recordings.py) to one Python function of arrays.

The builder wraps each array that it computes, checks the array's size against its type, and unwraps it for the next
request. For the methods in METHODS, this module knows the computation and emits only that, as Python source compiled
once per kind of recording. internals.py lists the sources of these methods. All other methods are called as usual.

A scalar or row that is broadcast to a block is not copied if the block is an operand of an elementwise operation: the
operation gives the same result for the scalar or row itself, except for the sign and payload of a NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType, ModuleType
from typing import Any

import numpy as np

from . import arithmetic, elementary, internals
from .elementary import bare

#: Methods of the builder whose computation this module knows.
METHODS = {
    "binary_op", "unary_op", "ternary_op", "cast_impl", "create_bitcast", "create_expand_dims", "create_broadcast",
    "create_splat", "create_addptr", "create_idiv", "create_masked_load", "create_masked_store",
}  # fmt: skip
COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}
BITWISE = {np.bitwise_and, np.bitwise_or, np.bitwise_xor}
OF_INTEGERS = {np.left_shift, np.right_shift, *BITWISE}
#: The replacements of numpy's functions for floats, and numpy's functions, which are right for integers.
CHOICES = {
    bare(arithmetic.minimum): np.minimum, bare(arithmetic.maximum): np.maximum, bare(arithmetic.fmin): np.fmin,
    bare(arithmetic.fmax): np.fmax,
}  # fmt: skip
OF_NUMBERS = {np.add, np.subtract, np.multiply, np.fmod, *CHOICES}
OF_FLOATS = {np.divide}
TRUTH = np.dtype(bool)
UNARY = {
    *map(bare, (elementary.exp, elementary.exp2, elementary.log, elementary.log2, elementary.sin, elementary.cos)),
    np.sqrt, np.floor, np.ceil, np.negative, np.abs,
}  # fmt: skip


@dataclass(eq=False)
class Value:
    """A value of the recording, as expressions in the generated source: an array with its type, or any other object."""

    real: Any  # the value when the recording was made
    array: str = ""
    dtype: str = ""
    name: str = ""  # the name of the handle, or of the object if it is not a handle
    source: int | None = None  # the input that it takes its element type from
    compact: tuple[str, tuple[int, ...]] | None = None  # the array before it is broadcast to a block, and its shape

    @property
    def numpy_type(self) -> Any:
        return self.real.data.dtype


class _Listener:
    """Stands in for the builder in a one-line method, ``self.binary_op(lhs, rhs, np.add)``, and records its request."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self.answer = object()  # a method can do nothing with it but return it

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> Any:
            self.asked.append((name, arguments))
            return self.answer

        return ask


class Compiler:
    """Compiles recordings of one interpreter."""

    def __init__(self, interpreter: ModuleType) -> None:
        accesses = {"create_load", "create_store"}
        self.methods = METHODS | (accesses if internals.has_sources(interpreter, internals.ACCESSES) else set())
        self.handle: Any = interpreter.TensorHandle
        self.builder = type(interpreter.interpreter_builder)
        self.tensor, self.block = interpreter.tl.core.tensor, interpreter.tl.core.block_type
        self.memory: Any = interpreter._interpreter
        # Filters of numpy's warnings go by the calling module, so the generated code runs under the interpreter's name.
        self.module = interpreter.__name__

    def player(
        self, requests: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], handles: Sequence[Any],
        answers: Sequence[Any], returned: Any, place: Callable[[Any], int | None],
        otherwise: Callable[..., Any],
    ) -> Callable[..., Any] | None:  # fmt: skip
        """A function of handles that does the same as `otherwise`, for handles of the same types as `handles`.

        Returns None if none of the requests are known. place: the index of a watched argument among handles and
        answers, None for a constant.
        """
        if not all(self._is_array(handle) for handle in handles):
            return None
        return _Writer(self, handles).player(requests, answers, returned, place, otherwise)

    def _is_array(self, value: Any) -> bool:
        return type(value) is self.handle and type(value.data) is np.ndarray and type(value.dtype) is not self.block


class _Writer:
    """Generates the source of one recording."""

    def __init__(self, compiler: Compiler, handles: Sequence[Any]) -> None:
        self.compiler = compiler
        self.space: dict[str, Any] = {"__name__": compiler.module, "new": object.__new__, "Handle": compiler.handle}
        self.lines: list[str] = []
        self.inputs = [Value(real, f"a{i}", f"h{i}.dtype", f"h{i}", i) for i, real in enumerate(handles)]
        self.values = self.inputs[:]
        self.arrays_alone = 0  # the number of requests that are known
        self.typed: set[int] = {i for i, real in enumerate(handles) if real.data.dtype != TRUTH}
        self.flat = False  # whether the guards must check the number of dimensions

    def player(
        self, requests: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], answers: Sequence[Any], returned: Any,
        place: Callable[[Any], int | None], otherwise: Callable[..., Any],
    ) -> Callable[..., Any] | None:  # fmt: skip
        for (method, arguments), real in zip(requests, answers, strict=True):
            values = []
            for argument in arguments:
                where = place(argument)
                values.append(self._constant(argument) if where is None else self.values[where])
            self.values.append(self._request(method, values, real))
        if requests and not self.arrays_alone:
            return None
        if returned is not None:
            several = type(returned) is tuple
            made = [self._result(tensor, place) for tensor in (returned if several else (returned,))]
            self.lines += [f"return {', '.join(made)}{',' if several else ''}"]
        self.space |= {"tensor": self.compiler.tensor, "otherwise": otherwise}
        names = ", ".join(value.name for value in self.inputs)
        begin = [f"{value.array} = {value.name}.data" for value in self.inputs]
        if self.arrays_alone and self.inputs:
            begin += [f"if not ({' and '.join(self._guards())}):", f"    return otherwise({names})"]
        source = "\n    ".join([f"def play({names}):", *begin, *(self.lines or ["pass"])])
        exec(_compiled(source), self.space)
        return self.space["play"]

    def _result(self, returned: Any, place: Callable[[Any], int | None]) -> str:
        """The name of a new tensor like `returned`."""
        where = place(returned.handle)
        handle = self._handle(self._constant(returned.handle) if where is None else self.values[where])
        made = f"made{len(self.lines)}"
        self.lines += [f"{made} = new(tensor)"]
        self.lines += [
            f"{made}.{name} = {handle if name == 'handle' else self._name(value)}"
            for name, value in vars(returned).items()
        ]
        return made

    def _guards(self) -> list[str]:
        found = []
        for i, value in enumerate(self.inputs):
            found.append(f"{value.array}.dtype is {self._name(value.numpy_type)}")
            if i in self.typed:
                found.append(f"{value.name}.dtype.name == {self._name(value.real.dtype.name)}")
            if self.flat:
                found.append(f"{value.array}.ndim == {value.real.data.ndim}")
        return found

    def _name(self, value: Any) -> str:
        name = f"k{len(self.space)}"
        self.space[name] = value
        return name

    def _constant(self, real: Any) -> Value:
        name = self._name(real)
        if not self.compiler._is_array(real):
            return Value(real, name=name)
        return Value(real, self._name(real.data), self._name(real.dtype), name)

    def _handle(self, value: Value) -> str:
        if not value.name:
            value.name = f"h{len(self.space)}_{len(self.lines)}"
            self.lines += [
                f"{value.name} = new(Handle)", f"{value.name}.data = {self._array(value)}",
                f"{value.name}.dtype = {value.dtype}", f"{value.name}.attr = {{}}",
            ]  # fmt: skip
        return value.name

    def _array(self, value: Value) -> str:
        if not value.array:
            assert value.compact is not None
            value.array = f"a_{len(self.lines)}"
            shape, kind = self._name(value.real.data.shape), self._name(value.numpy_type)
            self.space["empty"] = np.empty
            self.lines += [f"{value.array} = empty({shape}, {kind})", f"{value.array}[...] = {value.compact[0]}"]
        return value.array

    def _request(self, method: Callable[..., Any], values: list[Value], real: Any) -> Value:
        found = self._known(method, values, real)
        if found is not None:
            self.arrays_alone += 1
            return found
        arguments = ", ".join(value.name or self._handle(value) for value in values)
        name = f"r{len(self.lines)}"
        self.lines += [f"{name} = {self._name(method)}({arguments})"]
        if not self.compiler._is_array(real):
            return Value(real, name=name)
        self.lines += [f"{name}_a = {name}.data"]
        return Value(real, f"{name}_a", f"{name}.dtype", name)

    def _known(self, method: Callable[..., Any], values: list[Value], real: Any) -> Value | None:
        function = getattr(method, "__func__", None)
        if function is None or type(getattr(method, "__self__", None)) is not self.compiler.builder:
            return None
        handles = [value.real for value in values if type(value.real) is self.compiler.handle]
        if not all(map(self.compiler._is_array, handles)) or not (real is None or self.compiler._is_array(real)):
            return None
        kind, arguments = function.__name__, values
        operation: Any = None
        if kind == "<lambda>":
            listener = _Listener()
            try:
                answer = function(listener, *values)
            except Exception:
                return None
            if answer is not listener.answer or len(listener.asked) != 1:
                return None
            [(kind, given)] = listener.asked
            arguments = [value for value in given if isinstance(value, Value)]
            rest = [value for value in given if not isinstance(value, Value)]
            if arguments != values[: len(arguments)] or len(rest) > 1:
                return None
            operation = rest[0] if rest else None
        write = getattr(self, f"_{kind}", None) if kind in self.compiler.methods else None
        return write(operation, real, *arguments) if write is not None else None

    def _computed(self, source: str, real: Any, like: Value) -> Value:
        name = f"a_{len(self.lines)}"
        self.lines += [f"{name} = {source}"]
        return Value(real, name, like.dtype, source=like.source)

    def _of_type(self, source: str, real: Any) -> Value:
        name = f"a_{len(self.lines)}"
        self.lines += [f"{name} = {source}"]
        return Value(real, name, self._name(real.dtype))

    def _operands(self, real: Any, *values: Value) -> list[str]:
        """The arrays of operands: before broadcasting, if the result is the same."""
        if any(value.compact for value in values):
            compact = [value.compact or (self._array(value), value.real.data.shape) for value in values]
            try:
                shape = np.broadcast_shapes(*(shape for _, shape in compact))
            except ValueError:
                shape = ()
            if shape == real.data.shape:
                self.flat = True
                return [array for array, _ in compact]
        return [self._array(value) for value in values]

    def _binary_op(self, operation: Any, real: Any, lhs: Value, rhs: Value) -> Value | None:
        kind = lhs.numpy_type
        if rhs.numpy_type != kind:
            return None
        whole = kind.kind in "iu"
        # triton 3.9 first converts bool operands to numbers for other operations, which changes their result.
        may_be = BITWISE if kind == TRUTH else COMPARISONS | OF_NUMBERS | (OF_INTEGERS if whole else OF_FLOATS)
        if operation not in may_be or real.data.dtype != (TRUTH if operation in COMPARISONS else kind):
            return None
        operation = CHOICES.get(operation, operation) if whole else operation
        left, right = self._operands(real, lhs, rhs)
        return self._computed(f"{self._name(operation)}({left}, {right})", real, lhs)

    def _unary_op(self, operation: Any, real: Any, value: Value) -> Value | None:
        if operation not in UNARY or real.data.dtype != value.numpy_type:
            return None
        return self._computed(f"{self._name(operation)}({self._array(value)})", real, value)

    def _ternary_op(self, operation: Any, real: Any, condition: Value, lhs: Value, rhs: Value) -> Value | None:
        if operation is not np.where or condition.numpy_type != TRUTH:
            return None
        if not lhs.numpy_type == rhs.numpy_type == real.data.dtype:
            return None
        arrays = self._operands(real, condition, lhs, rhs)
        return self._computed(f"{self._name(np.where)}({', '.join(arrays)})", real, rhs)

    def _cast_impl(self, _: Any, real: Any, value: Value, target: Value) -> Value | None:
        if "bf16" in (value.real.dtype.name, real.dtype.name):
            return None
        self._look_at_type(value)
        made = self._name(real.data.dtype)
        if value.numpy_type.kind == "f" and real.data.dtype.kind in "iu":
            if not real.dtype.is_int():  # a float8, which numpy stores as an integer
                return None
            return self._of_type(f"{self._name(bare(arithmetic.to_integer))}({self._array(value)}, {made})", real)
        return self._of_type(f"{self._array(value)}.astype({made})", real)

    def _look_at_type(self, value: Value) -> None:
        if value.source is not None:
            self.typed.add(value.source)

    def _create_bitcast(self, _: Any, real: Any, value: Value, target: Value) -> Value:
        return self._of_type(f"{self._array(value)}.view({self._name(real.data.dtype)})", real)

    def _create_expand_dims(self, _: Any, real: Any, value: Value, axis: Value) -> Value | None:
        if type(axis.real) is not int or not 0 <= axis.real <= value.real.data.ndim:
            return None
        index = (*[slice(None)] * axis.real, None)
        return self._computed(f"{self._array(value)}[{self._name(index)}]", real, value)

    def _create_broadcast(self, _: Any, real: Any, value: Value, shape: Value) -> Value:
        return Value(real, dtype=value.dtype, source=value.source, compact=(self._array(value), value.real.data.shape))

    def _create_splat(self, _: Any, real: Any, target: Value, value: Value) -> Value | None:
        if real.data.dtype != value.numpy_type:
            return None
        self._look_at_type(value)
        return Value(real, dtype=value.dtype, source=value.source, compact=(self._array(value), value.real.data.shape))

    def _create_addptr(self, _: Any, real: Any, pointer: Value, offset: Value) -> Value | None:
        width = max(1, pointer.real.get_element_ty().primitive_bitwidth // 8)
        if pointer.numpy_type != np.uint64 or offset.numpy_type.kind not in "iu":
            return None
        base, steps = self._operands(real, pointer, offset)
        self.space["uint64"] = np.dtype(np.uint64)
        steps = steps if offset.numpy_type == np.uint64 else f"{steps}.astype(uint64)"
        return self._computed(f"{base} + {width} * {steps}", real, pointer)

    def _create_idiv(self, _: Any, real: Any, lhs: Value, rhs: Value) -> Value | None:
        if lhs.numpy_type != rhs.numpy_type or lhs.numpy_type.kind not in "iu":
            return None
        left, right = self._operands(real, lhs, rhs)
        return self._computed(f"({left} - {self._name(np.fmod)}({left}, {right})) // {right}", real, lhs)

    def _create_masked_load(
        self, _: Any, real: Any, pointers: Value, mask: Value, other: Value, *policies: Value
    ) -> Value | None:
        if mask.numpy_type != TRUTH:
            return None
        kind, source = self._name(real.data.dtype), self._array(pointers)
        self.space["zeros"] = np.zeros
        rest = f"zeros({source}.shape, {kind})" if other.real is None else self._array(other)
        return self._of_type(f"{self._load()}({source}, {self._array(mask)}, {rest}, {kind})", real)

    def _create_load(self, _: Any, real: Any, pointers: Value, *policies: Value) -> Value:
        kind, shape = real.data.dtype, real.data.shape
        rest = [self._read_only(array) for array in (np.ones(shape, bool), np.zeros(shape, kind))]
        return self._of_type(f"{self._load()}({self._array(pointers)}, {', '.join(rest)}, {self._name(kind)})", real)

    def _read_only(self, array: Any) -> str:
        array.flags.writeable = False
        return self._name(array)

    def _load(self) -> str:
        self.space["load"] = self.compiler.memory.load
        return "load"

    def _create_masked_store(
        self, _: Any, real: Any, pointers: Value, value: Value, mask: Value, *policies: Value
    ) -> Value | None:
        if mask.numpy_type != TRUTH:
            return None
        return self._stored(real, pointers, value, self._array(mask))

    def _create_store(self, _: Any, real: Any, pointers: Value, value: Value, *policies: Value) -> Value:
        return self._stored(real, pointers, value, self._read_only(np.ones(pointers.real.data.shape, bool)))

    def _stored(self, real: Any, pointers: Value, value: Value, mask: str) -> Value:
        self.space["store"] = self.compiler.memory.store
        self.lines += [f"store({self._array(pointers)}, {self._array(value)}, {mask})"]
        return Value(real, name="None")


@cache
def _compiled(source: str) -> CodeType:
    return compile(source, "<recording>", "exec")
