"""What the code of an implementation asks Python about the process: the call stack, other objects, the environment.

Python reports some of it as audit events. The environment variables of pytest and kvtwin, and the command line, are
read through objects of this module. Only what the implementation's own files ask counts, not what a library asks that
it uses: `asks` says whose file a frame is of.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, SupportsIndex

#: Audit event -> what it says of the caller.
EVENTS = {
    "sys._getframe": "looks at the call stack (sys._getframe)",
    "sys._current_frames": "looks at the call stack (sys._current_frames)",
    "gc.get_objects": "looks for other objects (gc.get_objects)",
    "gc.get_referrers": "looks for other objects (gc.get_referrers)",
    "gc.get_referents": "looks for other objects (gc.get_referents)",
    "sys.setprofile": "sets a profile function (sys.setprofile)",
    "sys.settrace": "sets a trace function (sys.settrace)",
    "os.kill": "sends a signal to a process (os.kill)",
}
#: What stands between the code of an implementation and the events of looking at the stack.
HELPERS = ("inspect.py", "traceback.py")
STDLIB = sysconfig.get_paths()["stdlib"]
PACKAGES = ("site-packages", "dist-packages")
#: The folders of kvtwin, as pyproject.toml maps them.
OURS = tuple(str(Path(__file__).parents[2] / part) + os.sep for part in ("conformance", "optimized", "reference"))
VARIABLES = ("PYTEST_", "KVTWIN_", "HYPOTHESIS_")

#: Called with what was asked. Empty outside of the calls of an implementation.
_tell: list[tuple[str, tuple[str, ...], Callable[[str], None]]] = []
_hooked: list[bool] = []
_busy: list[bool] = []


class Watch:
    """Inside the ``with`` block, what the files below `root` ask is told to `tell`.

    files: folders and files that they must not write to. Nothing is told if root is "".
    """

    def __init__(self, root: str, files: tuple[str, ...], tell: Callable[[str], None]) -> None:
        self.entry = (root, files, tell)

    def __enter__(self) -> None:
        if self.entry[0]:
            _install()
        self.arguments = sys.argv
        sys.argv = Arguments(self.arguments)
        _tell.append(self.entry)

    def __exit__(self, *error: object) -> None:
        _tell.remove(self.entry)
        if isinstance(sys.argv, Arguments):
            sys.argv = self.arguments


def _install() -> None:
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_heard)
    if type(os.environ) is not Environment:
        os.environ.__class__ = Environment


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if not _tell or _busy or not (event in EVENTS or event == "open"):
        return
    _busy.append(True)
    try:
        frame = sys._getframe(1)
        if event == "open":
            _opened(frame, *arguments[:3])
        else:
            _told(frame, EVENTS[event], inside=HELPERS if "frame" in event else ())
    finally:
        _busy.clear()


def _told(frame: FrameType | None, what: str, *, inside: tuple[str, ...] | None) -> None:
    root, _, tell = _tell[-1]
    if asks(frame, root, inside):
        tell(what)


def _opened(frame: FrameType, path: Any, mode: Any, flags: Any) -> None:
    writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(
        isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
    )
    files = _tell[-1][1]
    if not writes or not files or not isinstance(path, str | bytes):
        return
    place = os.path.abspath(os.fsdecode(path))
    if any(place == file or place.startswith(file + os.sep) for file in files):
        _told(frame, f"writes to {place}", inside=None)


def asks(frame: FrameType | None, root: str, inside: tuple[str, ...] | None) -> bool:
    """True if a file below `root` has called, itself, or through these files of Python's library (None: any)."""
    while frame is not None:
        file = frame.f_code.co_filename
        library = file.startswith((STDLIB, "<frozen")) and not any(part in file for part in PACKAGES)
        through = library and (inside is None or Path(file).name in inside)
        if file != "<string>" and not through:
            return is_below(file, root)
        frame = frame.f_back
    return False


def is_below(file: str, root: str) -> bool:
    """True for the files of an implementation, not for what is installed, or developed, in the same folder."""
    if not root or not file.startswith(root) or (file.startswith(OURS) and not root.startswith(OURS)):
        return False
    inner = file[len(root):]
    return not any(part in inner for part in PACKAGES) and (not file.startswith(STDLIB) or any(
        part in root for part in PACKAGES
    ))


def root_of(module: Any) -> str:
    """What the paths of the files of an implementation begin with: the folder of a package, or that in which a module
    lies, if nothing else is installed there. "": it has none."""
    file, folders = getattr(module, "__file__", None), list(getattr(module, "__path__", ()))
    if folders:
        return os.path.abspath(folders[0]) + os.sep
    if file is None:
        return ""
    folder = os.path.dirname(os.path.abspath(file))
    return os.path.abspath(file) if os.path.basename(folder) in PACKAGES else folder + os.sep


class Environment(os._Environ[str]):
    """`os.environ`, which tells of variables that say of tests."""

    def __getitem__(self, key: Any) -> Any:
        if _tell and not _busy and isinstance(key, str) and key.startswith(VARIABLES):
            _told(sys._getframe(1), f"reads the environment variable {key}", inside=None)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        names = super().__iter__()
        if _tell and not _busy and asks(sys._getframe(1), _tell[-1][0], None):
            return (name for name in names if not str(name).startswith(VARIABLES))
        return names


class Arguments(list[str]):
    """`sys.argv` during a call: the program alone. A call that reads it is noted."""

    def __init__(self, arguments: list[str]) -> None:
        super().__init__(arguments[:1])

    def _read(self) -> None:
        if _tell and not _busy:
            _told(sys._getframe(2), "reads the command line (sys.argv)", inside=None)

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        self._read()
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[str]:
        self._read()
        return super().__iter__()

    def __contains__(self, value: object) -> bool:
        self._read()
        return super().__contains__(value)

    def __len__(self) -> int:
        self._read()
        return super().__len__()

    def __repr__(self) -> str:
        self._read()
        return super().__repr__()
