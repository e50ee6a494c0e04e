"""Compiled functions, kept on disk between processes.

Numba keeps what it compiles beside the source file: once per installation, and not at all where
site-packages and the home folder are read-only (it then refuses to import). Here a compiled
function belongs to the text of its source file, so that all installations of one version share it
(`coterie.core.cache`); NUMBA_CACHE_DIR still decides if it is set. Numba does not see changes in
other files: one file holds everything that a kernel calls.
"""

import atexit
import fcntl
import hashlib
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from shutil import rmtree
from typing import Any, TypeVar, cast

import numba
from numba.core import config
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

from coterie.core.cache import folder

Fun = TypeVar("Fun", bound=Callable[..., Any])
_LINKING = "0.68."  # the numba whose inner parts `linked` relies on


def compiled(**options: Any) -> Callable[[Fun], Fun]:
    """Return a decorator: numba's `njit` with these options, kept on disk."""
    options |= {"no_cfunc_wrapper": True}

    def compile(function: Fun) -> Fun:
        made = numba.njit(**options)(function)
        made._cache = _Kept(function)  # type: ignore[no-untyped-call]
        return cast(Fun, made)

    return compile


def linked(**options: Any) -> Callable[[Fun], Fun]:
    """Return a decorator: `njit` for a function that only compiled functions of its file call.

    Numba optimises each function and turns it into machine code, then again in each caller that
    contains it. Here only callers that Python can call are: half of the time of a file with many
    functions. Python cannot call the function. With another numba than this was written for, it is
    compiled as usual.
    """
    options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    if not numba.__version__.startswith(_LINKING):
        return compiled(**options)
    made = numba.njit(pipeline_class=_linking(), **options)
    return cast(Callable[[Fun], Fun], made)


def kernel_folder() -> Path:
    """Return the folder of compiled functions."""
    place = folder()
    return Path(_given()) if _given() else (_own() if place is None else place) / "kernels"


def is_shared() -> bool:
    """Return whether other processes find what this one compiles."""
    return bool(_given()) or folder() is not None


def _given() -> str:
    return str(getattr(config, "CACHE_DIR", "") or "")


@cache
def _own() -> Path:
    """Return a folder of this process, removed at its end."""
    made = Path(tempfile.mkdtemp(prefix="coterie-"))
    atexit.register(rmtree, made, ignore_errors=True)
    return made


@cache
def _hash(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


class _Located(_CacheLocator):
    """The folder of one source file and version of numba."""

    def __init__(self, function: Any, path: str) -> None:
        self._line, self._hash, self._py_file = function.__code__.co_firstlineno, _hash(path), path
        name = f"{Path(path).stem}-{self._hash[:16]}"
        self._place = kernel_folder() / f"numba-{numba.__version__}" / name

    def get_cache_path(self) -> str:
        return str(self._place)

    def get_source_stamp(self) -> str:
        return self._hash

    def get_disambiguator(self) -> str:
        return str(self._line)

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> "_Located":
        found = cls(py_func, py_file)
        found.ensure_cache_path()  # type: ignore[no-untyped-call]
        return found


class _Results(CompileResultCacheImpl):
    _locator_classes = [_Located]  # noqa: RUF012 - as numba declares it


class _Kept(FunctionCache):
    _impl_class = _Results

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save a compiled function, one process at a time.

        Numba numbers the files of a function by its index: two processes that save different types
        at once would each take the same number, and a later one would load the wrong code.
        """
        # On a full disk the next process compiles again.
        with suppress(OSError), (Path(self.cache_path) / ".lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


@cache
def _linking() -> Any:
    """Return a numba compiler of functions into code that only their callers contain."""
    from numba import _dynfunc  # type: ignore[attr-defined]
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler import Compiler

    class Linked(JITCodeLibrary):
        """Code that is neither optimised nor turned into machine code."""

        def _optimize_final_module(self) -> None:
            pass

        def _finalize_final_module(self) -> None:
            self._finalized = True

    class LinkedCompiler(Compiler):
        def _compile_core(self) -> Any:
            state = self.state
            state.flags.no_compile = True  # as for numba's own subroutines
            name = state.func_id.func_qualname
            state.library = Linked(state.targetctx.codegen(), name)  # type: ignore[no-untyped-call]
            found = super()._compile_core()  # type: ignore[no-untyped-call]
            about, uses = found.fndesc, (found.library,)
            # Callers find the code by an object that stands for its address; it has none.
            entry = _dynfunc.make_function(
                about.lookup_module(), name, "", 0, found.environment, uses
            )
            state.targetctx.insert_user_function(entry, about, uses)
            return found._replace(entry_point=entry)

    return LinkedCompiler
