"""Triton's language, patched once per kernel instead of once per call of a device function.

To interpret a kernel, Triton replaces every function of ``triton.language`` by one that computes with numpy, and
restores the functions afterwards. It repeats this at every call of a device function from the kernel, although all
functions are already replaced. This takes about a third of the time of a kernel that is made of small functions.
`accelerate` removes the repetition. It also caches several lookups: the functions of a module, the numpy type of a
Triton type, the conversion of two operands by their types, and the requests of a language function to the builder
(recordings.py). It skips the second computation of integer sums, which detects an overflow that is not reported. None
of this changes what is computed.

Every function here requires an interpreter for which `internals.problems` finds nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any

import numpy as np

from .arrays import Compiler
from .frames import reserve_frames
from .functions import record_functions
from .internals import CONVERSIONS, has_sources
from .launch import Members, copy_nothing, remember_arguments, remember_parameters, remember_patches
from .recordings import RECORDED, Recordings

MOST_NUMBERS = 10_000  # cached as tensors of a few hundred bytes each


class _Nothing:
    """The patch scope of a device function whose kernel has already patched the language: there is nothing to undo."""

    def restore(self) -> None:
        """Undo nothing."""


def accelerate(interpreter: ModuleType) -> None:
    """Apply the accelerator to Triton's interpreter. Call this once per interpreter module."""
    remember_patches(interpreter, seen_by(interpreter.tl))
    interpreter._patch_lang = _once(interpreter._patch_lang, interpreter.tl)  # type: ignore[attr-defined]
    _remember(interpreter)
    _remember_shapes(interpreter.tl.core)
    _remember_operands(interpreter)
    remember_parameters(interpreter)
    remember_arguments(interpreter)
    copy_nothing(interpreter)
    reserve_frames(interpreter)
    _convert_quickly(interpreter)


def read_numbers(interpreter: ModuleType) -> None:
    """Allow a tensor of one element as an index. Triton 3.6 converts it to a number in a way that numpy 2.4 rejects.

    This is a repair, not an acceleration: without it, kernels fail if they use a loaded number as a loop bound.
    """
    original = interpreter._patch_lang_tensor

    @wraps(original)
    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor  # type: ignore[attr-defined]


def read_masks(interpreter: ModuleType) -> None:
    """Allow integers as the mask of an access to memory. Triton makes a block of integers of a comparison of two
    numbers, and Triton 3.9 refuses it as a mask. So this is a repair too.
    """
    builder, handle, truth = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter.tl.int1

    def repaired(original: Callable[..., Any], place: int) -> Callable[..., Any]:
        @wraps(original)
        def access(self: Any, *arguments: Any, **named: Any) -> Any:
            mask = arguments[place].data
            if mask.dtype != bool:
                arguments = (*arguments[:place], handle(mask.astype(bool), truth), *arguments[place + 1 :])
            return original(self, *arguments, **named)

        return access

    for name, place in (("create_masked_load", 1), ("create_masked_store", 2), ("create_atomic_rmw", 3)):
        setattr(builder, name, repaired(getattr(builder, name), place))


def _convert_quickly(interpreter: ModuleType) -> None:
    """Convert between float32 and bfloat16 by shifts, without subnormal numbers, which the interpreter gets wrong."""
    if not has_sources(interpreter, CONVERSIONS):
        return
    original = interpreter._convert_float

    @wraps(original)
    def convert_float(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
        kinds = (input_dtype.name, output_dtype.name)
        if rounding_mode is None and kinds in (("bf16", "fp32"), ("fp32", "bf16")):
            bits = input.view(np.uint16 if kinds[0] == "bf16" else np.uint32)
            magnitude, least = (bits & 0x7FFF, 0x80) if kinds[0] == "bf16" else (bits & 0x7FFFFFFF, 0x800000)
            if not np.count_nonzero(magnitude - 1 < least - 1):  # 0 - 1 is the largest integer
                return bits.astype(np.uint32) << 16 if kinds[0] == "bf16" else (bits >> 16).astype(np.uint16)
        return original(input, input_dtype, output_dtype, rounding_mode)

    interpreter._convert_float = convert_float  # type: ignore[attr-defined]


def _remember_shapes(core: ModuleType) -> None:
    """Cache the attributes that block types and tensors compute from their shape."""
    kinds, tensors = core.block_type, core.tensor
    constant, sequence = core.constexpr, (list, tuple, getattr(core, "tuple", tuple))

    def kind(element_ty: Any, shape: Any) -> Any:
        if not isinstance(shape, sequence):
            return None
        sizes = tuple(size.value if isinstance(size, constant) else size for size in shape)
        return (element_ty.name, sizes) if all(type(size) is int for size in sizes) else None

    kinds.__init__ = _kept(
        kinds.__init__, kind, {"shape", "numel", "name"}, lambda element_ty, shape: {"element_ty": element_ty}
    )
    kinds.with_element_ty = _of_one_name(kinds.with_element_ty)
    tensors.__init__ = _kept(
        tensors.__init__, lambda handle, type: type.name, {"shape", "numel"},
        lambda handle, type: {"handle": handle, "type": type, "dtype": type.scalar},
    )


def _of_one_name(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Cache a function of two types by their names. Types are immutable."""
    known: dict[tuple[str, str], Any] = {}

    @wraps(original)
    def made_of(self: Any, scalar_ty: Any) -> Any:
        key = (self.name, scalar_ty.name)
        if key not in known:
            known[key] = original(self, scalar_ty)
        return known[key]

    return made_of


#: Functions of the semantic that `_remember_operands` replaces.
OPERANDS = ("cast", "broadcast_impl_value", "binary_op_type_checking_impl", "binary_op_sanitize_overflow_impl")


def _remember_operands(interpreter: ModuleType) -> None:
    """Skip an operator's preparation of its operands if it left tensors of the same types unchanged before.

    The interpreter has its own semantic object. The compiler's semantic, of the same class, is not changed.
    """
    semantic, tensor = interpreter.interpreter_semantic, interpreter.tl.core.tensor
    semantic.cast = _unchanged_cast(semantic.cast)
    semantic.broadcast_impl_value = _unchanged_pair(semantic.broadcast_impl_value, tensor)
    semantic.binary_op_type_checking_impl = _unchanged_pair(
        semantic.binary_op_type_checking_impl, tensor, semantic.broadcast_impl_value
    )
    looks_for_overflow, options = semantic.binary_op_sanitize_overflow_impl, semantic.builder.options

    @wraps(looks_for_overflow)
    def look_for_overflow(lhs: Any, rhs: Any, binary_op: Any) -> None:
        if options.debug:  # otherwise the result of the check is discarded
            looks_for_overflow(lhs, rhs, binary_op)

    semantic.binary_op_sanitize_overflow_impl = look_for_overflow


def _unchanged_cast(original: Callable[..., Any]) -> Callable[..., Any]:
    known: set[tuple[str, str]] = set()

    @wraps(original)
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
    """Cache `original(lhs, rhs, ...)`, which returns both operands with the same type and shape.

    Numbers that are combined with a tensor are cached as tensors. broadcast: the last step of `original`, and its only
    step for tensors whose element types it does not change.
    """
    unchanged: set[Any] = set()
    of_another_shape: set[Any] = set()
    numbers: dict[Any, Any] = {}

    @wraps(original)
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
        # -0.0 == 0.0 and NaN != NaN, so they cannot be keys.
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
    """An `__init__` that runs `original` once for each key of its arguments. Objects with the same key share the
    attributes `kept`; each has its `own`. These must be all attributes of the object. Otherwise, and for arguments
    without a key, `original` runs every time."""
    known: dict[Any, dict[str, Any]] = {}

    @wraps(original)
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
    """Cache two functions of the interpreter: the numpy type of a Triton type, and the replacements of a module's
    functions.

    All replacements use the interpreter's single semantic, which caches operands. Triton 3.6 makes a new semantic for
    each function.
    """
    interpreter._get_np_dtype = _numpy_types(interpreter._get_np_dtype, interpreter.tl)  # type: ignore[attr-defined]
    builtins, one = interpreter._patch_builtin, interpreter._patch_attr
    semantic = interpreter.interpreter_semantic
    own = semantic.builder  # while a call is recorded, the semantic has another one
    recordings = Recordings(semantic, interpreter.tl, Compiler(interpreter))

    @cache
    def members(pkg: Any) -> list[tuple[str, Any]]:
        is_builtin = interpreter.tl.core.is_builtin
        return [(name, member) for name, member in inspect.getmembers(pkg) if is_builtin(member)]

    @cache
    def replaced(pkg: Any) -> tuple[Members, tuple[Any, ...]]:
        found = members(pkg)
        return Members(pkg, [name for name, _ in found]), tuple(with_semantic(name, member) for name, member in found)

    @cache
    def with_semantic(name: str, member: Any) -> Any:
        return recordings.with_recordings(member) if name in RECORDED else _with_semantic(member, semantic)

    @wraps(builtins)
    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        if builder is own and members(pkg):
            owner, values = replaced(pkg)
            scope.set_attr(owner, "values", values)
            return
        for name, member in members(pkg):
            one(pkg, name, member, builder, scope)

    record_functions(interpreter, recordings)
    patch_builtin.recordings = recordings  # type: ignore[attr-defined]
    interpreter._patch_builtin = patch_builtin  # type: ignore[attr-defined]


def _with_semantic(member: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return member(*arguments, **named)

    return call


def _numpy_types(original: Callable[[Any], Any], language: ModuleType) -> Callable[[Any], Any]:
    known = cache(original)

    @wraps(original)
    def get_np_dtype(tt_dtype: Any) -> Any:
        element = tt_dtype.element_ty if isinstance(tt_dtype, language.block_type) else tt_dtype
        # Only for numbers: pointer types cannot be looked up.
        return known(element) if type(element) is language.dtype else original(tt_dtype)

    return get_np_dtype


def seen_by(language: ModuleType) -> Callable[[Any], frozenset[str]]:
    """A function that returns the names of the modules of `language` that are among a function's globals."""

    @cache
    def seen(function: Any) -> frozenset[str]:
        modules = [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
        return frozenset(module.__name__ for module in modules if module in (language, language.core))

    return seen


def _once(original: Callable[[Any], Any], language: ModuleType) -> Callable[[Any], Any]:
    seen = seen_by(language)
    patched: frozenset[str] = frozenset()  # the language modules that the running kernel has patched
    kept: frozenset[str] = frozenset()  # those that a device function has patched: Triton never restores them

    @wraps(original)
    def patch_lang(fn: Any) -> Any:
        nonlocal patched, kept
        if patched and seen(fn) <= patched | kept:
            return _Nothing()
        scope = original(fn)
        if patched:
            kept |= seen(fn) - patched
            return scope
        restore = scope.restore
        patched = seen(fn)

        def restore_and_forget() -> None:
            nonlocal patched
            patched = frozenset()
            restore()

        scope.restore = restore_and_forget
        return scope

    return patch_lang
