"""Files that coterie makes once per user and machine: compiled solvers, and scripts of reports.

They lie in $COTERIE_CACHE, or in the folder for caches of this user, so that all installations,
working directories and read-only installations share them. What runs as code must not come from
others: a folder of another user, or one that others may write to, is not used. Without a folder
every process makes its own. Everything in it may be deleted at any time.
"""

import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from coterie.core.files import write_atomically

SETTING = "COTERIE_CACHE"


def usual_folder() -> Path:
    """Return where caches of coterie belong, whether the folder exists or not."""
    given = os.environ.get(SETTING)
    if given:
        return Path(given).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "coterie"
    under = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(under) if Path(under).is_absolute() else Path.home() / ".cache") / "coterie"


@cache
def folder() -> Path | None:
    """Return the cache of this user, made if missing; None if there is none that is safe to use."""
    try:
        found = usual_folder()
        found.mkdir(parents=True, exist_ok=True)
        facts = found.stat()
        if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return None
        tempfile.TemporaryFile(dir=found).close()
    except (OSError, RuntimeError):  # no home
        return None
    return found


def kept(name: str, make: Callable[[], bytes]) -> bytes:
    """Return the content of a file of the cache, which `make` makes if it is absent or damaged."""
    place = folder()
    if place is None:
        return make()
    path = place / name
    with suppress(OSError):
        mark, _, content = path.read_bytes().partition(b"\n")
        if mark == _mark(content):
            return content
    content = make()
    with suppress(OSError):  # a full disk, or another process is just writing it
        write_atomically(path, _mark(content) + b"\n" + content)
    return content


def _mark(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
