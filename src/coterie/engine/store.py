"""Personal state of clients, by row: in memory, or memory-mapped on disk with a redo journal.

Rows of clients that never took part are not written: a client gets its state when it first takes
part. With a folder, the new rows of a round are staged in a journal *before* the round's release is
published, and applied after it. After a crash, the journal is applied if the release is published,
and discarded otherwise. Several ranks keep the rows of their own clients, each in a folder of its
own; `arrange` lays them out again for another number of ranks.

A leaf may have an entry for each of a client's rows of data (dual variables): it is stored ragged,
returned padded with zeros to the longest client, and starts at zero.

With a `Cipher`, rows are in memory, and on disk only encrypted: the journal, and one file with all
rows, which is written anew when a round is applied.
"""

import io
import json
import os
import re
import shutil
import tokenize
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.files import is_disk_error, sync_folder, write_atomically
from coterie.core.tree import Tree, send

Ids = NDArray[np.int64]
SEALED = "rows.sealed"


class Cipher(Protocol):
    """Encrypts what a store writes; a name is bound to the content."""

    def encrypt(self, name: str, content: bytes) -> bytes:
        """Return the content encrypted."""

    def decrypt(self, name: str, content: bytes) -> bytes:
        """Return the plain content; raise ValueError if it was changed, or has another key."""


class Store:
    """Stacked personal state of all clients.

    Args:
        template: One client's state, stacked (leading axis 1); fixes names, shapes and types.
        clients: How many clients there are.
        folder: Where to keep the rows on disk; None keeps them in memory.
        device: Where rows are handed out (and live, when in memory; on disk they stay there).
        per_row: Leaves with an entry for each row of a client; `template` has their shape behind
            the axes of clients and rows.
        offsets: Row ranges of the clients, (clients + 1,), where there are such leaves.
        first: Id of the first client: a rank of several keeps the clients that it owns.
        cipher: Encrypts the rows in the folder; None writes them as they are.
    """

    def __init__(
        self,
        template: Tree,
        clients: int,
        folder: Path | None = None,
        device: torch.device | str = "cpu",
        *,
        per_row: Sequence[str] = (),
        offsets: Ids | None = None,
        first: int = 0,
        cipher: Cipher | None = None,
    ) -> None:
        if "started" in template:
            raise ValueError("a leaf may not be called 'started': the store keeps flags there")
        self._folder = folder
        self._cipher = cipher
        self._device = torch.device(device)
        self.is_new = False
        self._maps: list[np.memmap[tuple[int, ...], np.dtype[np.float32]]] = []
        self.leaves: dict[str, Tensor] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._check_encrypted(folder)
        none = np.zeros(clients + 1, dtype=np.int64)
        self._offsets = none if offsets is None else offsets - offsets[0]
        self._first = first
        self._ragged = frozenset(per_row)
        for name, leaf in template.items():
            if name in self._ragged:
                # A memory map cannot be empty.
                entry, rows = leaf.new_zeros(1, *leaf.shape[2:]), max(1, int(self._offsets[-1]))
                self.leaves[name] = self._allocate(name, entry, rows)
            else:
                self.leaves[name] = self._allocate(name, leaf, clients)
        self.started = self._allocate("started", torch.zeros(1, dtype=torch.bool), clients)
        self._staged = 0
        if cipher is not None:
            self._read_sealed()

    def take(self, ids: Ids, first: Callable[[int], Tree]) -> Tree:
        """Return a copy of rows; clients without a row get the state that `first(count)` makes."""
        ids = ids - self._first
        index = _index(ids)
        fresh = ~self.started[index]
        if self.leaves and len(ids) and bool(fresh.all()) and not self._ragged:
            new = first(len(ids))
            return {
                name: new[name].to(self._device, leaf.dtype, copy=True)
                for name, leaf in self.leaves.items()
            }
        there = self._sent(index)
        rows = {
            name: self._padded(leaf, ids, fresh)
            if name in self._ragged
            else _picked(leaf, there if leaf.is_cuda else index, self._device)
            for name, leaf in self.leaves.items()
        }
        if rows and bool(fresh.any()):
            new, places = first(int(fresh.sum())), send(torch.nonzero(fresh)[:, 0], self._device)
            for name, row in rows.items():
                if name not in self._ragged:
                    row[places] = new[name].to(row.device, row.dtype)
        return rows

    def put(self, ids: Ids, rows: Tree) -> None:
        """Write rows."""
        ids = ids - self._first
        index = _index(ids)
        there = self._sent(index)
        for name, leaf in self.leaves.items():
            if name in self._ragged:
                inside, places = self._places(ids, rows[name].shape[1])
                found = torch.from_numpy(rows[name].cpu().numpy()[inside])
                _write(leaf, places, found)
            else:
                _put(leaf, there if leaf.is_cuda else index, rows[name])
        self.started[index] = True

    @property
    def in_memory(self) -> bool:
        """Whether rows are kept in memory only."""
        return self._folder is None

    def knows(self, ids: Ids) -> bool:
        """Return whether all these clients have taken part, and rows are kept in memory."""
        return self.in_memory and bool(self.started[_index(ids - self._first)].all())

    def kept(self, ids: Ids) -> Ids:
        """Return those of the clients that are kept here."""
        return ids[(ids >= self._first) & (ids < self._first + len(self.started))]

    def copy(self, other: "Store") -> None:
        """Copy the rows of the clients that another store keeps, too."""
        start = max(self._first, other._first)
        stop = min(self._first + len(self.started), other._first + len(other.started))
        for name, leaf in (*self.leaves.items(), ("started", self.started)):
            source = other.started if name == "started" else other.leaves[name]
            ours, theirs = (each._slice(name, start, stop) for each in (self, other))
            leaf[ours] = source[theirs]

    def stage(self, ids: Ids, rows: Tree) -> None:
        """Stage a block's new rows until the release is published (in memory: write them)."""
        if self._folder is None:
            self.put(ids, rows)
            return
        if self._staged == 0:
            self.discard()  # a seal left over must never cover new blocks
        journal = self._journal()
        journal.mkdir(exist_ok=True)
        arrays = {f"row.{name}": rows[name].cpu().numpy() for name in self.leaves}
        path = journal / f"{self._staged:06d}.npz"
        with path.open("wb") as file:
            if self._cipher is None:
                np.savez(file, allow_pickle=False, ids=ids, **arrays)
            else:
                file.write(self._cipher.encrypt(path.name, _packed({"ids": ids, **arrays})))
            file.flush()
            os.fsync(file.fileno())
        self._staged += 1

    def seal(self, round: int) -> None:
        """Close a round's journal: from here on it may be applied."""
        if self._folder is not None:
            self._journal().mkdir(exist_ok=True)
            sync_folder(self._journal().parent)
            note = json.dumps({"round": round, "blocks": self._staged}).encode()
            write_atomically(self._journal() / "sealed.json", note)

    def commit(self) -> None:
        """Apply the journal of a published round, and drop it."""
        if self._folder is None:
            return
        blocks = json.loads((self._journal() / "sealed.json").read_text())["blocks"]
        for number in range(blocks):
            path = self._journal() / f"{number:06d}.npz"
            block: Any = path
            if self._cipher is not None:
                block = io.BytesIO(self._cipher.decrypt(path.name, path.read_bytes()))
            with np.load(block, allow_pickle=False) as arrays:
                rows = {name: torch.from_numpy(arrays[f"row.{name}"]) for name in self.leaves}
                self.put(arrays["ids"], rows)
        self.flush()
        self.discard()

    def discard(self) -> None:
        """Drop the journal."""
        if self._folder is not None:
            # The seal goes first: half a journal must never look whole.
            (self._journal() / "sealed.json").unlink(missing_ok=True)
            shutil.rmtree(self._journal(), ignore_errors=True)
        self._staged = 0

    def sealed(self) -> int | None:
        """Return the round whose journal is closed and not applied yet, if there is one."""
        if self._folder is None or not (self._journal() / "sealed.json").exists():
            return None
        return int(json.loads((self._journal() / "sealed.json").read_text())["round"])

    def recover(self, released: int) -> None:
        """After a crash: apply the journal if its release is published, else drop it."""
        if self.sealed() == released - 1:
            self.commit()
        else:
            self.discard()

    def flush(self) -> None:
        """Write rows through to disk."""
        for mapped in self._maps:
            mapped.flush()
        if self._cipher is not None and self._folder is not None:
            content = _packed({name: leaf.cpu().numpy() for name, leaf in self._everything()})
            write_atomically(self._folder / SEALED, self._cipher.encrypt(SEALED, content))

    def drop(self) -> None:
        """Remove the rows from disk once they are kept elsewhere; those that are open stay so."""
        if self._folder is not None:
            for name in (*self.leaves, "started"):
                (self._folder / f"{name}.npy").unlink(missing_ok=True)
            (self._folder / SEALED).unlink(missing_ok=True)

    def _everything(self) -> list[tuple[str, Tensor]]:
        return [*self.leaves.items(), ("started", self.started)]

    def _check_encrypted(self, folder: Path) -> None:
        """Raise ValueError for rows that were written with another setting."""
        plain, sealed = (folder / "started.npy").exists(), (folder / SEALED).exists()
        if sealed if self._cipher is None else plain:
            was = "encrypted" if sealed else "not encrypted"
            raise ValueError(
                f"{folder}: personal state was {was} so far; keep the setting during a run"
            )

    def _read_sealed(self) -> None:
        """Read the encrypted rows, if there are any."""
        assert self._cipher is not None and self._folder is not None
        path = self._folder / SEALED
        self.is_new = not path.exists()
        for _, leaf in self._everything():
            leaf.zero_()  # of fresh memory: what was there before must not be written
        if self.is_new:
            return
        content = io.BytesIO(self._cipher.decrypt(SEALED, path.read_bytes()))
        with np.load(content, allow_pickle=False) as arrays:
            for name, leaf in self._everything():
                found = torch.from_numpy(arrays[name])
                if found.shape != leaf.shape or found.dtype != leaf.dtype:
                    raise ValueError(f"{path} belongs to another plan: choose another folder")
                leaf.copy_(found)

    def _slice(self, name: str, start: int, stop: int) -> slice:
        """Return where a leaf has the entries of neighbouring clients."""
        start, stop = start - self._first, max(start, stop) - self._first
        if name in self._ragged:
            return slice(int(self._offsets[start]), int(self._offsets[stop]))
        return slice(start, stop)

    def _places(self, ids: Ids, longest: int) -> tuple[NDArray[np.bool_], Ids]:
        """Return which padded entries are real, and where they are in the flat leaf."""
        starts, counts = self._offsets[ids], self._offsets[ids + 1] - self._offsets[ids]
        steps = np.arange(longest)
        inside = steps < counts[:, None]
        return inside, (starts[:, None] + steps)[inside]

    def _padded(self, leaf: Tensor, ids: Ids, fresh: Tensor) -> Tensor:
        longest = int((self._offsets[ids + 1] - self._offsets[ids]).max(initial=0))
        inside, places = self._places(ids, longest)
        # NumPy, on one thread: waking torch's threads takes longer than these small copies.
        held = leaf.numpy()[places] if leaf.device.type == "cpu" else leaf.cpu().numpy()[places]
        padded = np.zeros((len(ids), longest, *leaf.shape[1:]), dtype=held.dtype)
        padded[inside] = held
        padded[fresh.numpy()] = 0
        return torch.from_numpy(padded).to(self._device)

    def _sent(self, index: Tensor | slice) -> Tensor | slice:
        """Return an index on the device of rows in memory: once for all leaves."""
        return index if isinstance(index, slice) else send(index, self._device)

    def _journal(self) -> Path:
        assert self._folder is not None
        return self._folder / "journal"

    def _allocate(self, name: str, leaf: Tensor, clients: int) -> Tensor:
        shape = (clients, *leaf.shape[1:])
        if self._folder is None or self._cipher is not None:
            device = "cpu" if leaf.dtype is torch.bool else self._device
            make = torch.zeros if leaf.dtype is torch.bool else torch.empty
            return make(shape, dtype=leaf.dtype, device=device)
        path = self._folder / f"{name}.npy"
        kind = np.dtype(str(leaf.dtype).removeprefix("torch."))
        if not path.exists():
            self.is_new = True
            partial = path.with_suffix(".partial")
            _reserve(
                partial, np.lib.format.open_memmap(partial, mode="w+", dtype=kind, shape=shape)
            )
            partial.replace(path)
        mapped = _open_map(path)
        if mapped.shape != shape or mapped.dtype != kind:
            raise ValueError(
                f"{path} holds {mapped.shape} {mapped.dtype}, expected {shape} {kind}; "
                "it belongs to another plan: choose another folder"
            )
        self._maps.append(mapped)
        return torch.from_numpy(mapped)


def _packed(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def folder_of(personal: Path, owned: range) -> Path:
    """Return where one of several ranks keeps the personal state of its clients."""
    return personal / f"{owned.start}-{owned.stop}"


def arrange(
    personal: Path,
    ranges: Sequence[range],
    open_at: Callable[[Path, range], Store],
    released: int,
) -> None:
    """Lay out the personal state of a resumed run for other ranges of clients, one per rank.

    One range is kept in the folder itself, several in a folder each. The old folder has its name
    until the new one is complete; a crash in between repeats the work.
    """
    before, partial = _undo_crash(personal)
    held = _ranges_in(personal)
    if held == list(ranges):
        return
    ends = [0, *(owned.stop for owned in held)]
    if ends != [*(owned.start for owned in held), ranges[-1].stop]:
        if released == 0:
            shutil.rmtree(personal, ignore_errors=True)  # a start that was cut off
        return  # with releases: the missing rows are noticed when they are opened
    old = _each(personal, held, open_at)
    for store in old:
        store.recover(released)
    for store in _each(partial, ranges, open_at):
        _fill(store, old)
    for note in personal.glob("*.json"):
        write_atomically(partial / note.name, note.read_bytes())
    sync_folder(partial)
    personal.replace(before)
    partial.replace(personal)
    sync_folder(personal.parent)
    shutil.rmtree(before, ignore_errors=True)


def _undo_crash(personal: Path) -> tuple[Path, Path]:
    """Put the old folder back if a crash left none, and return the names of old and new folder."""
    before, partial = (personal.with_name(f"personal.{name}") for name in ("before", "partial"))
    if before.exists() and not personal.exists():
        before.replace(personal)
    for left in (before, partial):
        shutil.rmtree(left, ignore_errors=True)
    return before, partial


def _fill(store: Store, sources: Sequence[Store]) -> None:
    for source in sources:
        store.copy(source)
    store.flush()


def _each(
    personal: Path, ranges: Sequence[range], open_at: Callable[[Path, range], Store]
) -> list[Store]:
    if len(ranges) == 1:
        return [open_at(personal, ranges[0])]
    return [open_at(folder_of(personal, owned), owned) for owned in ranges]


def _ranges_in(personal: Path) -> list[range]:
    """Return the ranges of clients whose personal state a folder holds, in order."""
    if (personal / "started.npy").exists():
        return [range(len(_open_map(personal / "started.npy")))]
    found = [re.fullmatch(r"(\d+)-(\d+)", path.name) for path in personal.glob("*-*")]
    ranges = [range(int(match[1]), int(match[2])) for match in found if match]
    return sorted(ranges, key=lambda owned: owned.start)


def _reserve(path: Path, mapped: Any) -> None:
    """Reserve the space of all rows, so that a full disk is an error now, not a crash later."""
    try:
        mapped.flush()
        if hasattr(os, "posix_fallocate"):  # not on every system
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _open_map(path: Path) -> Any:
    """Open rows on disk; a file cut short must not be filled up with zeros."""
    try:
        # Read-only first: opened for writing, a short file would be extended.
        whole = np.load(path, mmap_mode="r", allow_pickle=False)
        del whole
        return np.lib.format.open_memmap(path, mode="r+")
    except (ValueError, OSError, SyntaxError, tokenize.TokenError) as error:
        if is_disk_error(error):
            raise
        raise ValueError(
            f"{path}: damaged ({error}); restore it, or start a new run in a new folder"
        ) from error


def _write(leaf: Tensor, places: Ids, found: Tensor) -> None:
    if leaf.device.type == "cpu":
        leaf.numpy()[places] = found.to(leaf.dtype).numpy()
    else:
        leaf[torch.from_numpy(places).to(leaf.device)] = found.to(leaf.device, leaf.dtype)


def _index(ids: Ids) -> Tensor | slice:
    """Neighbouring rows as a slice, which is faster to read and write than an index."""
    if len(ids) and int(ids[-1]) - int(ids[0]) == len(ids) - 1 and bool((np.diff(ids) == 1).all()):
        return slice(int(ids[0]), int(ids[-1]) + 1)
    return torch.from_numpy(ids)


def _picked(leaf: Tensor, index: Tensor | slice, device: torch.device) -> Tensor:
    """Return a copy of rows on a device."""
    if isinstance(index, slice):
        return leaf[index].to(device, copy=True)
    return leaf.index_select(0, index).to(device)


def _put(leaf: Tensor, index: Tensor | slice, rows: Tensor) -> None:
    rows = rows.to(leaf.device, leaf.dtype)
    if isinstance(index, slice):
        leaf[index] = rows
    else:
        leaf.index_copy_(0, index, rows)
