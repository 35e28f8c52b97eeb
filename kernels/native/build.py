"""Compiles the C++ kernels at first use with the system's compiler, keeps the library and loads it.

Run as a program it fails where that cannot be done, and keeps nothing: so an image is tried when it is made.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

COMPILERS = ("c++", "g++", "clang++")
_SOURCES = tuple(sorted((Path(__file__).parents[1] / "cpp").glob("*.[ch]*")))
# Symbols are hidden because a library for another CPU may be loaded too: thread-local data has another layout in it.
_HIDDEN = ("-fvisibility=hidden", "-shared", "-fPIC", "-pthread")
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-strict-aliasing", "-w", *_HIDDEN)
_DEADLINE_S = 120.0


class NativeUnavailable(Exception):  # noqa: N818
    """The library cannot be compiled or loaded; the message says why, in one line."""


def load_library(
    cache: Path | None = None,
    compilers: Sequence[str] = COMPILERS,
    flags: Sequence[str] | None = None,
    on_compile: Callable[[int, int], None] = lambda done, total: None,
) -> ctypes.CDLL:
    """The compiled kernels. Raises NativeUnavailable without a compiler that can build them.

    `cache`: the folder that keeps libraries, by their sources, compiler, flags and CPU; None: `.cache/motet` in the
    user's home. `flags`: the compiler's, of the CPU to compile for; None: this one, with all that it can do.
    `on_compile`: called with (0, 1) before a compilation, of this or another process, is waited for, (1, 1) after it.
    """
    compiler = next((path for name in compilers if (path := shutil.which(name))), None)
    if compiler is None:
        raise NativeUnavailable(f"no C++ compiler was found ({', '.join(compilers)})")
    all_flags = (*_FLAGS, *(cpu_flags() if flags is None else flags))
    folder = cache if cache is not None else Path.home() / ".cache" / "motet"
    library = folder / f"kernels-{_key(compiler, all_flags)}.so"
    try:
        if not library.is_file():
            on_compile(0, 1)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(folder):
                if not library.is_file():
                    _compile(compiler, all_flags, library)
            on_compile(1, 1)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeUnavailable(f"{library} cannot be made or loaded: {error}") from error


def cpu_flags() -> tuple[str, ...]:
    """The compiler's flags for the CPU that runs this, with all its instructions."""
    return ("-march=native",) if platform.machine() in ("x86_64", "AMD64") else ("-mcpu=native",)


def _key(compiler: str, flags: Sequence[str]) -> str:
    program = Path(compiler).resolve()
    version = program.stat()  # size and time of change differ after an upgrade
    digest = hashlib.sha256(repr((str(program), version.st_size, version.st_mtime_ns, flags, _cpu())).encode())
    for source in _SOURCES:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:32]


_TYPES: dict[str, Any] = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}


def kernel(library: ctypes.CDLL, name: str, arguments: str, dtype: object = None) -> ctypes._NamedFuncPointer:
    """The library's function of this name and torch's dtype, without a result. AttributeError: C++ lacks it.

    `arguments`: a letter for the type of each: p is a pointer, n an int64, i an int, f a float.
    """
    function = library[name if dtype is None else f"{name}_{str(dtype).removeprefix('torch.')}"]
    function.argtypes, function.restype = [_TYPES[letter] for letter in arguments], None
    return function


def _cpu() -> str:
    """A text that differs between CPUs with different instructions."""
    fields = ("model name", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    return "\n".join([platform.machine(), platform.processor(), *(line for line in lines if line.startswith(fields))])


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds a lock on the folder. The workers of a machine start together, and only the first of them must compile."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # where folders cannot be locked all workers compile, and the last result stays
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # this unlocks, too


def _compile(compiler: str, flags: Sequence[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as folder:
        built = Path(folder) / library.name
        source = next(path for path in _SOURCES if path.suffix == ".cpp")
        try:
            done = subprocess.run(
                [compiler, *flags, str(source), "-o", str(built)], capture_output=True, text=True, timeout=_DEADLINE_S
            )
        except subprocess.TimeoutExpired:
            raise NativeUnavailable(f"{compiler} took longer than {_DEADLINE_S:g} s") from None
        if done.returncode != 0:
            problem = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            raise NativeUnavailable(f"{compiler} failed: {problem}")
        built.replace(library)  # at once, so that no process ever loads half a library


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        load_library(cache=Path(folder))


if __name__ == "__main__":
    main()
