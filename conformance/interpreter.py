"""Triton's interpreter, without work that it does twice.

To interpret a kernel, Triton replaces every function of ``triton.language`` by one that computes with numpy, and puts
them back afterwards. It goes over the whole language again at every call of a device function from within the kernel,
and finds all of it replaced: about a third of the time of a kernel that is made of small functions. Here that second
round is left out. What is computed stays the same, since the kernel's own round has done it all. Of what it asks again
and again the answers are kept: which functions a module has, which numpy type is meant, what becomes of two operands
whose types have met before, what a function of the language asks of the builder (interpreter_tape.py). Sums of integers
are not computed a second time to look for overflow that nobody reports.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from .interpreter_arrays import Compiler
from .interpreter_launch import Members, copy_nothing, remember_parameters
from .interpreter_tape import TAPED, Tapes

MODULE = "triton.runtime.interpreter"
MOST_NUMBERS = 10_000  # kept as tensors: a few hundred bytes each


class _Nothing:
    """The patches of a device function whose kernel made them: there is nothing to undo."""

    def restore(self) -> None:
        """Undo nothing."""


def patch_once() -> bool:
    """Make the interpreter patch the language once per kernel; whether it does now.

    False where no kernel can be interpreted in this process, or where the interpreter is built otherwise than the ones
    that this was written for (triton 3.6 to 3.9): it is then left as it is.
    """
    interpreter = sys.modules.get(MODULE)
    if interpreter is None:
        return False
    original = getattr(interpreter, "_patch_lang", None)
    if not callable(original) or _parameters(original) != ["fn"] or not hasattr(interpreter, "tl"):
        return False
    if not hasattr(original, "patches"):
        interpreter._patch_lang = _once(original, interpreter.tl)  # type: ignore[attr-defined]
        _read_numbers(interpreter)
        _remember(interpreter)
        _remember_shapes(interpreter.tl.core)
        _remember_operands(interpreter)
        remember_parameters(interpreter)
        copy_nothing(interpreter)
    return True


def _read_numbers(interpreter: ModuleType) -> None:
    """A tensor of one element is a number, also where numpy (2.4 and later) refuses the array that triton 3.6 takes."""
    original = getattr(interpreter, "_patch_lang_tensor", None)
    if original is None or _parameters(original) != ["tensor", "scope"]:
        return

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor  # type: ignore[attr-defined]


def _remember_shapes(core: ModuleType) -> None:
    """Types of blocks, and tensors, get what the first of their kind made of its shape."""
    kinds, tensors = getattr(core, "block_type", None), getattr(core, "tensor", None)
    constant, sequence = getattr(core, "constexpr", ()), (list, tuple, getattr(core, "tuple", tuple))

    def kind(element_ty: Any, shape: Any) -> Any:
        if not isinstance(shape, sequence):
            return None
        sizes = tuple(size.value if isinstance(size, constant) else size for size in shape)
        return (element_ty.name, sizes) if all(type(size) is int for size in sizes) else None

    if inspect.isclass(kinds) and _parameters(kinds.__init__) == ["self", "element_ty", "shape"]:
        kinds.__init__ = _kept(  # type: ignore[method-assign]
            kinds.__init__, kind, {"shape", "numel", "name"}, lambda element_ty, shape: {"element_ty": element_ty}
        )
        if _parameters(getattr(kinds, "with_element_ty", kind)) == ["self", "scalar_ty"]:
            kinds.with_element_ty = _of_one_name(kinds.with_element_ty)  # type: ignore[attr-defined]
    if inspect.isclass(tensors) and _parameters(tensors.__init__) == ["self", "handle", "type"]:
        tensors.__init__ = _kept(  # type: ignore[method-assign]
            tensors.__init__, lambda handle, type: type.name, {"shape", "numel"},
            lambda handle, type: {"handle": handle, "type": type, "dtype": type.scalar},
        )


def _of_one_name(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Of a function of two types: what it returned for two of the same names. Types never change."""
    known: dict[tuple[str, str], Any] = {}

    def made_of(self: Any, scalar_ty: Any) -> Any:
        key = (self.name, scalar_ty.name)
        if key not in known:
            known[key] = original(self, scalar_ty)
        return known[key]

    return made_of


def _remember_operands(interpreter: ModuleType) -> None:
    """Tensors of types that once went unchanged through an operator's preparations do so at once from then on."""
    semantic, tensor = getattr(interpreter, "interpreter_semantic", None), interpreter.tl.core.tensor
    for name, parameters in OPERANDS.items():
        if not callable(getattr(semantic, name, None)) or _parameters(getattr(semantic, name)) != parameters:
            return
    assert semantic is not None
    # On this object alone: the compiler's, of the same class, has handles of its own.
    semantic.cast = _unchanged_cast(semantic.cast)
    semantic.broadcast_impl_value = _unchanged_pair(semantic.broadcast_impl_value, tensor)
    semantic.binary_op_type_checking_impl = _unchanged_pair(
        semantic.binary_op_type_checking_impl, tensor, semantic.broadcast_impl_value
    )
    looks_for_overflow, options = semantic.binary_op_sanitize_overflow_impl, semantic.builder.options

    def look_for_overflow(lhs: Any, rhs: Any, binary_op: Any) -> None:
        if options.debug:  # else what it finds is thrown away
            looks_for_overflow(lhs, rhs, binary_op)

    semantic.binary_op_sanitize_overflow_impl = look_for_overflow


OPERANDS = {
    "cast": ["input", "dst_ty", "fp_downcast_rounding"],
    "broadcast_impl_value": ["lhs", "rhs"],
    "binary_op_type_checking_impl": [
        "lhs", "rhs", "allow_lhs_ptr", "allow_rhs_ptr", "arithmetic_check", "div_or_mod",
    ],
    "binary_op_sanitize_overflow_impl": ["lhs", "rhs", "binary_op"],
}  # fmt: skip


def _unchanged_cast(original: Callable[..., Any]) -> Callable[..., Any]:
    known: set[tuple[str, str]] = set()

    def cast(input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        key = (input.type.name, dst_ty.name)
        if fp_downcast_rounding is None and key in known:
            return input
        found = original(input, dst_ty, fp_downcast_rounding)
        if fp_downcast_rounding is None and found is input:
            known.add(key)
        return found

    return cast


def _unchanged_pair(
    original: Callable[..., Any], tensor: type, broadcast: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Of `original(lhs, rhs, ...)`, which returns both made alike. Numbers that meet a tensor are kept as tensors.

    broadcast: what it does in the end, and all it does with tensors whose element types it leaves as they are.
    """
    unchanged: set[Any] = set()
    of_another_shape: set[Any] = set()
    numbers: dict[Any, Any] = {}

    def made_alike(lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
        key: tuple[Any, ...]
        tensors = (type(lhs) is tensor, type(rhs) is tensor)
        if named or not any(tensors):
            return original(lhs, rhs, *options, **named)
        if all(tensors):
            key = (lhs.type.name, rhs.type.name, options)
            if key in unchanged:
                return lhs, rhs
            if broadcast is not None and key in of_another_shape:
                return broadcast(lhs, rhs)
            found = original(lhs, rhs, *options)
            if found[0] is lhs and found[1] is rhs:
                unchanged.add(key)
            elif [side.type.scalar.name for side in found] == [lhs.type.scalar.name, rhs.type.scalar.name]:
                of_another_shape.add(key)
            return found
        number, other = (rhs, lhs) if tensors[0] else (lhs, rhs)
        kind = type(number)
        # -0.0 equals 0.0 and NaN not itself: no keys.
        if not (kind is int or kind is bool or (kind is float and number and number == number)):
            return original(lhs, rhs, *options)
        key = (tensors, other.type.name, kind, number, options)
        if key in numbers:
            return (lhs, numbers[key]) if tensors[0] else (numbers[key], rhs)
        found = original(lhs, rhs, *options)
        if found[tensors[1]] is other and len(numbers) < MOST_NUMBERS:
            made = found[tensors[0]]
            made.handle.data.flags.writeable = False
            numbers[key] = made
        return found

    return made_alike


def _kept(
    original: Callable[..., None], key_of: Callable[..., Any], kept: set[str], own: Callable[..., dict[str, Any]]
) -> Callable[..., None]:
    """An `__init__` that runs once for each key of its arguments. Objects of one key share the attributes `kept`, which
    must be all but their `own`; those without a key, and those of a class with other attributes, are made as ever."""
    known: dict[Any, dict[str, Any]] = {}

    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        key = None if named else key_of(*arguments)
        found = known.get(key) if key is not None else None
        if found is not None:
            made = self.__dict__
            made.update(found)
            made.update(own(*arguments))
            return
        original(self, *arguments, **named)
        made = vars(self)
        mine = {} if key is None else own(*arguments)
        if mine and made.keys() == kept | mine.keys() and all(made[name] is value for name, value in mine.items()):
            known[key] = {name: made[name] for name in kept}

    return __init__


def _remember(interpreter: ModuleType) -> None:
    """Keep the answers of two functions of the interpreter, where it has them as we know them."""
    types = getattr(interpreter, "_get_np_dtype", None)
    if callable(types) and _parameters(types) == ["tt_dtype"]:
        interpreter._get_np_dtype = _numpy_types(types, interpreter.tl)  # type: ignore[attr-defined]
    builtins, one = getattr(interpreter, "_patch_builtin", None), getattr(interpreter, "_patch_attr", None)
    if hasattr(builtins, "tapes"):
        return  # ours
    if not callable(builtins) or not callable(one) or _parameters(builtins) != ["pkg", "builder", "scope"]:
        return
    if _parameters(one) != ["obj", "name", "member", "builder", "scope"]:
        return
    semantic = getattr(interpreter, "interpreter_semantic", None)
    tapes = Tapes(semantic, interpreter.tl, Compiler(interpreter)) if semantic is not None else None

    @cache
    def members(pkg: Any) -> list[tuple[str, Any]]:
        is_builtin = interpreter.tl.core.is_builtin
        return [(name, member) for name, member in inspect.getmembers(pkg) if is_builtin(member)]

    @cache
    def with_semantic(name: str, member: Any) -> Any:
        return tapes.taped(member) if tapes is not None and name in TAPED else _with_semantic(member, semantic)

    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        ours = semantic is not None and semantic.builder is builder and hasattr(scope, "set_attr")
        if ours and members(pkg):  # with the one object that keeps what became of operands; triton 3.6 makes others
            owner, values = replaced(pkg)
            scope.set_attr(owner, "values", values)
            return
        for name, member in members(pkg):
            one(pkg, name, member, builder, scope)

    @cache
    def replaced(pkg: Any) -> tuple[Members, tuple[Any, ...]]:
        found = members(pkg)
        return Members(pkg, [name for name, _ in found]), tuple(with_semantic(name, member) for name, member in found)

    patch_builtin.tapes = tapes  # type: ignore[attr-defined]
    interpreter._patch_builtin = patch_builtin  # type: ignore[attr-defined]


def _with_semantic(member: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return member(*arguments, **named)

    return call


def _numpy_types(original: Callable[[Any], Any], language: ModuleType) -> Callable[[Any], Any]:
    known = cache(original)

    def get_np_dtype(tt_dtype: Any) -> Any:
        element = tt_dtype.element_ty if isinstance(tt_dtype, language.block_type) else tt_dtype
        # Numbers only: types of pointers cannot be looked up.
        return known(element) if type(element) is language.dtype else original(tt_dtype)

    return get_np_dtype


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _once(original: Callable[[Any], Any], language: ModuleType) -> Callable[[Any], Any]:
    patched: frozenset[str] = frozenset()  # the languages that the kernel that runs now has patched
    kept: frozenset[str] = frozenset()  # those that a device function has patched: nobody ever undoes that

    @cache
    def seen_by(function: Any) -> frozenset[str]:
        """Which of the modules that get patched a function can name."""
        modules = [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
        return frozenset(module.__name__ for module in modules if module in (language, language.core))

    def patch_lang(fn: Any) -> Any:
        nonlocal patched, kept
        if patched and seen_by(fn) <= patched | kept:
            return _Nothing()
        scope = original(fn)
        if patched:
            kept |= seen_by(fn) - patched
            return scope
        restore = getattr(scope, "restore", None)
        if restore is None:
            return scope
        patched = seen_by(fn)

        def restore_and_forget() -> None:
            nonlocal patched
            patched = frozenset()
            restore()

        scope.restore = restore_and_forget
        return scope

    patch_lang.patches = original  # type: ignore[attr-defined]
    return patch_lang
