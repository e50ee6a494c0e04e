"""Posts as they lie in zip files: what each says, and that nothing else lies between them.

A zip file is read from its end, so bytes before, between and behind its members, comments and extra
fields are skipped by whoever reads it. Nothing that is published may hide there: every byte has to
belong to a member or to the directory.
"""

import hashlib
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

_PIECE = 1 << 20
_DAMAGED = (OSError, ValueError, EOFError, RuntimeError, struct.error, zipfile.BadZipFile)
_LOCAL, _ENTRY, _END, _END64 = 30, 46, 22, 22 + 20 + 56
_PREFIX = "leaf."
Place = Callable[[str], tuple[int, str] | None]
"""From a member's name to the index of its post and the name of its leaf; None for no post's."""


@dataclass
class PostsFound:
    """The digests of the posts that lie in a folder, and what else lies among them."""

    digests: dict[int, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def read_posts(folder: Path) -> PostsFound:
    """Hash what each post of posts.npz says, a piece at a time."""
    found = PostsFound()
    if (folder / "posts").exists():
        found.faults.append("a folder posts/ lies beside posts.npz")
    _read(folder / "posts.npz", _packed, found)
    return found


def read_loose(folder: Path) -> PostsFound:
    """Hash what the posts of a folder say, one file each."""
    found = PostsFound()
    if not folder.is_dir():
        found.faults.append(f"{folder.name}/ is missing")
        return found
    for path in sorted(folder.iterdir()):
        if not (path.suffix == ".npz" and path.stem.isdecimal()):
            found.faults.append(f"{path.name} belongs to no post")
            continue
        _read(path, _lying(int(path.stem)), found)
    return found


def read_number(path: Path, leaf: str) -> float:
    """Read a post's leaf that is a single number; not a number if it is none."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return float(arrays[f"{_PREFIX}{leaf}"])
    except (*_DAMAGED, KeyError, TypeError):
        return float("nan")


def stray_bytes(path: Path) -> list[str]:
    """List what a zip file holds beside its members."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            return list(_strays(file, archive))
    except (*_DAMAGED, NotImplementedError, zlib.error) as error:
        return [f"{path.name} cannot be read ({error})"]


def _packed(name: str) -> tuple[int, str] | None:
    index, _, leaf = name.removesuffix(".npy").partition(".")
    if index.isdecimal() and len(index) < 19 and leaf and name.endswith(".npy"):
        return int(index), leaf
    return None


def _lying(index: int) -> Place:
    def place(name: str) -> tuple[int, str] | None:
        leaf = name.removeprefix(_PREFIX).removesuffix(".npy")
        return (index, leaf) if name == f"{_PREFIX}{leaf}.npy" and leaf else None

    return place


def _read(path: Path, place: Place, found: PostsFound) -> None:
    faults = stray_bytes(path)
    found.faults += faults
    if faults:
        return  # a member may be of a kind that cannot be read at all
    with zipfile.ZipFile(path) as archive:
        _hash_posts(archive, path.name, place, found)


def _hash_posts(archive: zipfile.ZipFile, file: str, place: Place, found: PostsFound) -> None:
    hashes: dict[int, Any] = {}
    seen: set[str] = set()
    for name in archive.namelist():
        told = place(name)
        if told is None or name in seen:
            found.faults.append(f"{file} holds {name!r}, which belongs to no post")
            continue
        seen.add(name)
        digest = hashes.setdefault(told[0], hashlib.sha256())
        try:
            with archive.open(name) as leaf:
                _hash_leaf(leaf, told[1], digest)
        except (*_DAMAGED, zlib.error) as error:
            digest.update(b"unreadable")
            found.faults.append(f"{name} of {file} is damaged ({error})")
    found.digests |= {index: digest.hexdigest() for index, digest in hashes.items()}


def _hash_leaf(file: IO[bytes], leaf: str, digest: Any) -> None:
    """Hash one leaf: a line with its name, type and shape, and its numbers."""
    start = file.read(10)
    if start[:8] != b"\x93NUMPY\x01\x00" or len(start) < 10:
        raise ValueError("it does not begin as version 1.0 of the format does")
    (length,) = struct.unpack("<H", start[8:])
    head = file.read(length)
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(io.BytesIO(start[8:] + head))
    if fortran and len(shape) > 1:
        raise ValueError("numbers in the order of Fortran")
    plain = f"{{'descr': {dtype.str!r}, 'fortran_order': {fortran}, 'shape': {shape}, }}"
    if head.decode("latin-1").rstrip(" \n") != plain:
        raise ValueError("its header says more than type, order and shape")
    told = {"leaf": leaf, "dtype": dtype.str, "shape": list(shape)}
    digest.update(json.dumps(told).encode() + b"\n")
    while piece := file.read(_PIECE):
        digest.update(piece)


def _strays(file: IO[bytes], archive: zipfile.ZipFile) -> Iterator[str]:
    """Follow members from the first byte to the directory, and that to the last."""
    name, place, directory = Path(file.name).name, 0, 0
    if archive.comment:
        yield f"{name} has a comment"
    for member in sorted(archive.infolist(), key=lambda one: one.header_offset):
        size = _head_of(file, member)
        if size is None:
            yield f"{name}: {member.filename!r} is not simply stored, or says more than it holds"
            return
        if member.header_offset != place:
            yield f"{name} has bytes before {member.filename!r} that belong to nothing"
            return
        place += size + member.compress_size
        directory += _ENTRY + size - _LOCAL - _extra_of(file, member) + len(member.extra)
    file.seek(0, io.SEEK_END)
    if place != archive.start_dir:
        yield f"{name} has bytes before its directory that belong to nothing"
    elif file.tell() - place - directory not in (_END, _END64):
        yield f"{name} has bytes behind its directory that belong to nothing"


def _extra_of(file: IO[bytes], member: zipfile.ZipInfo) -> int:
    file.seek(member.header_offset + 28)
    return int(struct.unpack("<H", file.read(2))[0])


def _head_of(file: IO[bytes], member: zipfile.ZipInfo) -> int | None:
    """Return the size of a member's header; None for one that numpy would not have written."""
    file.seek(member.header_offset)
    head = file.read(_LOCAL)
    flags, method = struct.unpack("<HH", head[6:10])
    named, extra = struct.unpack("<HH", head[26:30])
    label, more = file.read(named), file.read(extra)
    sizes = struct.pack("<HHQQ", 1, 16, member.file_size, member.compress_size)
    plain = (
        flags == member.flag_bits
        and flags & ~0x800 == 0
        and method == member.compress_type == zipfile.ZIP_STORED
        and member.file_size == member.compress_size
        and label == member.orig_filename.encode("utf-8" if flags else "cp437")
        and more in (b"", sizes)
        and not member.comment
        and (not member.extra or member.extra[:2] == b"\x01\x00")
    )
    return _LOCAL + named + extra if plain else None
