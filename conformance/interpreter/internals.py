"""The Triton internals that this package depends on: names, parameters, and hashes of sources.

The accelerator replaces private functions of ``triton.runtime.interpreter`` and reimplements some of them. It is right
only for the versions of these functions in triton 3.6 to 3.9. `problems` compares the installed interpreter with them.
If there is any difference, the accelerator is not applied. `parts_off` does the same for the parts that can be left
out.
"""

from __future__ import annotations

import hashlib
import inspect
from types import ModuleType
from typing import Any

#: The module of Triton's interpreter. Triton imports it only if kernels are interpreted.
MODULE = "triton.runtime.interpreter"
#: The versions of Triton whose sources are listed below.
VERSIONS = "3.6 to 3.9"

#: The names that the accelerator looks up, relative to the interpreter's module.
NAMES = [
    "inspect", "_interpreter.load", "_interpreter.store", "interpreter_builder",
    "interpreter_semantic.builder.options.debug", "tl.math", "tl.core.constexpr", "tl.core.dtype",
    "tl.core.pointer_type", "tl.block_type", "tl.tensor",
]  # fmt: skip

#: Functions that the accelerator calls or wraps, and the parameters that it expects.
PARAMETERS = {
    "_patch_lang_tensor": ["tensor", "scope"],
    "tl.core.is_builtin": ["fn"],
}

#: Functions and classes that the accelerator replaces, reimplements or skips, with the first digits of the SHA-256 of
#: their sources: one for each different source in the versions above.
SOURCES: dict[str, tuple[str, ...]] = {
    "TensorHandle": ("3202e4a6ff09", "0efd336dc08e"),
    "_validate_np_data_size": ("5d719f1e7c0d",),
    "_get_np_dtype": ("8f20d41e3207",),
    "_LangPatchScope": ("1b26f629cd73",),
    "_patch_attr": ("935587c8b82c", "e0c1b7d65a24"),
    "_patch_builtin": ("3c21c270fa61",),
    "_patch_lang": ("e5beeba74ada",),
    "GridExecutor._init_args_hst": ("e9ee939d3d8b", "00bbe9762d0c"),
    "GridExecutor._restore_args_dev": ("53bb81587d69",),
    "GridExecutor.__call__": ("a8a9450a0a04", "e52d3746b0f3"),
    "InterpretedFunction.__call__": ("f2446df46264",),
    "InterpreterBuilder.binary_op": ("df11eb49f20b", "ca085f65855c"),
    "InterpreterBuilder.unary_op": ("fae9670ade6d",),
    "InterpreterBuilder.ternary_op": ("83d9c33d1a21",),
    "InterpreterBuilder.cast_impl": ("b221bbb79664",),
    "InterpreterBuilder.create_bitcast": ("854190c7cddb",),
    "InterpreterBuilder.create_expand_dims": ("c0530007993d",),
    "InterpreterBuilder.create_broadcast": ("33c8c86871f4",),
    "InterpreterBuilder.create_splat": ("f94c3086cfc9",),
    "InterpreterBuilder.create_addptr": ("7ad12466a2d0",),
    "InterpreterBuilder.create_idiv": ("bdb197d934db",),
    "InterpreterBuilder.create_masked_load": ("3d7f09b9abc7", "b80d0b6693a5"),
    "InterpreterBuilder.create_masked_store": ("c749a5dad7ac", "1d5e501bd65a"),
    "tl.core.block_type.__init__": ("403f4b016ec5",),
    "tl.core.block_type.with_element_ty": ("bfc3811c453d",),
    "tl.core.tensor.__init__": ("d9b043b5c989",),
    "interpreter_semantic.cast": ("193ece285f97", "b69dba3389e6"),
    "interpreter_semantic.broadcast_impl_value": ("9b7949138c0d", "4217098736a2", "90c3a175f679"),
    "interpreter_semantic.binary_op_type_checking_impl": ("503ea09edfd5", "1d2ffc4e5a2e"),
    "interpreter_semantic.binary_op_sanitize_overflow_impl": ("1ad65a10738d", "bdd7f3e24aa6"),
}

# The same for some parts of the accelerator. With other sources, the accelerator does without the part.
#: Of the conversion of a kernel's arguments (launch.py).
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "_implicit_cvt": ("d1b53b293c6d", "e58261856433", "b2bbf80db753", "a1cebff767fb")
}
#: Of loads and stores without a mask (arrays.py).
ACCESSES: dict[str, tuple[str, ...]] = {
    "InterpreterBuilder.create_load": ("a628dfaacddb", "4881c2c136dd"),
    "InterpreterBuilder.create_store": ("6d7b40e4a4b3", "8ab47bc84a2b"),
}
#: Of conversions from and to bfloat16 (language.py).
CONVERSIONS: dict[str, tuple[str, ...]] = {"_convert_float": ("b466f779f6e2", "65dc886a93b2")}
#: Of the standard library's functions (functions.py).
REDUCTIONS: dict[str, tuple[str, ...]] = {
    "_patch_reduce_scan": ("ff294418b913",),
    "ReduceScanOpInterface": ("06d8d210ee9a", "76e674f4f1ba", "2b5e07135ed9"),
    "ReduceOps": ("0025368fbc9a", "7794770a3301"),
    "ScanOps": ("d2573a0e289b", "edee99fad965"),
}
#: These parts, by the names that the header of a run gives them.
PARTS = {
    "the conversion of arguments": ARGUMENTS, "loads and stores without a mask": ACCESSES,
    "conversions of bfloat16": CONVERSIONS, "the standard library": REDUCTIONS,
}  # fmt: skip


def has_sources(interpreter: ModuleType, sources: dict[str, tuple[str, ...]]) -> bool:
    """Whether all of these functions and classes are in the interpreter, with known sources."""
    return all(digest(lookup(interpreter, name)) in known for name, known in sources.items())


def parts_off(interpreter: ModuleType) -> list[str]:
    """The names of the parts that the accelerator does without for this interpreter."""
    return [name for name, sources in PARTS.items() if not has_sources(interpreter, sources)]


def problems(interpreter: ModuleType) -> list[str]:
    """The differences between `interpreter` and the interpreters that the accelerator supports, one line each.

    For a function that this package has already replaced, ``__wrapped__`` leads to the original, which is compared.
    """
    found = [f"there is no {name}" for name in NAMES if lookup(interpreter, name) is None]
    for name, parameters in PARAMETERS.items():
        if (taken := _parameters(lookup(interpreter, name))) != parameters:
            found.append(f"{name} takes {taken}, not {parameters}")
    for name, known in SOURCES.items():
        part = lookup(interpreter, name)
        if part is None:
            found.append(f"there is no {name}")
        elif digest(part) not in known:
            found.append(f"{name} has another source")
    return found


def lookup(interpreter: ModuleType, name: str) -> Any:
    """The object with this dotted name in the interpreter's module, or None."""
    part: Any = interpreter
    for step in name.split("."):
        part = getattr(part, step, None)
    return part


def digest(part: Any) -> str | None:
    """The first digits of the SHA-256 of the source of a function or class. None if it has no source."""
    try:
        return hashlib.sha256(inspect.getsource(part).encode()).hexdigest()[:12]
    except (TypeError, OSError):
        return None


def _parameters(function: Any) -> list[str] | None:
    return list(inspect.signature(function).parameters) if callable(function) else None
