"""Which files of a folder are read, and of which part each one is.

A folder holds its files directly, in a folder for each part (`train/`, `test/`), or in `data/`, as
on the Hugging Face Hub. Files that lie side by side are told apart by a part's name in theirs
(`train-00000-of-00001.parquet`, `so_test.h5`), if any has one. Nothing is skipped in silence: what
would be read but for its packing or place is refused, and other data is named in a note.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coterie.data.federated import DataError

PARQUET = (".parquet",)
HDF5 = (".h5", ".hdf5")
JSON = (".json",)
_PACKINGS = (".gz", ".xz", ".bz2", ".lzma", ".zlib", ".zip", ".zst")
_DATA = (
    *(*PARQUET, *HDF5, *JSON, ".jsonl", ".csv", ".tsv", ".npz", ".mat"),
    *(".sqlite", ".sqlite3", ".db", ".arrow"),
)
_PARTS = ("train", "test", "validation", "valid", "val", "dev", "eval", "heldout", "held_out")
_MOST = 8  # names in a message


@dataclass(frozen=True)
class Found:
    """Files to read, each with the number of its part (None: no parts), and what was left out."""

    files: tuple[tuple[Path, int | None], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return len({split for _, split in self.files})


def find_files(folder: Path, ends: tuple[str, ...], splits: Sequence[str]) -> Found:
    """Find the files of one format; none if the folder holds none where they are looked for.

    Args:
        folder: The folder.
        ends: The suffixes of the format, in lower case.
        splits: Names of the parts.

    Raises:
        DataError: Some files would be left out that look as if they belonged to the rest.
    """
    inside = [(folder / name, split) for split, name in enumerate(splits)]
    inside = [(part, split) for part, split in inside if part.is_dir() and _direct(part, ends)]
    direct = _direct(folder, ends)
    if inside and (len(inside) == len(splits) or not direct):
        return _by_folder(folder, inside, ends, splits)
    if direct:
        return _by_name(folder, direct, ends, splits)
    data = folder / "data"
    found = find_files(data, ends, splits) if data.is_dir() else Found()
    beside = [path.name for path in _visible(folder) if path != data and _is_data(path)]
    return Found(found.files, (*_left_out(beside), *found.notes)) if found.files else found


def _by_folder(
    folder: Path, inside: list[tuple[Path, int]], ends: tuple[str, ...], splits: Sequence[str]
) -> Found:
    for part, _ in inside:
        _refuse_strays(part, ends)
    files = [(file, split) for part, split in inside for file in _direct(part, ends)]
    read = {part.name for part, _ in inside}
    left = [path.name for path in _visible(folder) if path.name not in read and _is_data(path)]
    return Found(_single(files), (*_left_out(left), *_absent(splits, [s for _, s in inside])))


def _by_name(
    folder: Path, direct: list[Path], ends: tuple[str, ...], splits: Sequence[str]
) -> Found:
    _refuse_strays(folder, ends)
    others = [path.name for path in _visible(folder) if path not in direct and _is_data(path)]
    files: list[tuple[Path, int | None]] = [(file, _part(file, splits)) for file in direct]
    named = sorted({split for _, split in files if split is not None})
    if not named:
        return Found(tuple(files), _left_out(others))
    odd = [file for file, split in files if split is None]
    known = [file for file in odd if any(_is_part(file, name) for name in _PARTS)]
    if len(known) < len(odd):
        lost = next(file for file in odd if file not in known)
        sure = next(file for file, split in files if split is not None)
        raise DataError(
            f"{folder}: {sure.name} is named after a part ({', '.join(splits)}), {lost.name} is "
            "not; rename one of them, set splits to the names used, or name one file"
        )
    taken = [(file, split) for file, split in files if split is not None]
    taken.sort(key=lambda pair: (pair[1], pair[0].name))
    left = [*(file.name for file in known), *others]
    return Found(_single(taken), (*_left_out(left), *_absent(splits, named)))


def _single(files: Sequence[tuple[Path, int]]) -> tuple[tuple[Path, int | None], ...]:
    """Take one part alone for no parts at all."""
    several = len({split for _, split in files}) > 1
    return tuple((file, split if several else None) for file, split in files)


def _part(file: Path, splits: Sequence[str]) -> int | None:
    found = [split for split, name in enumerate(splits) if _is_part(file, name)]
    if len(found) > 1:
        raise DataError(
            f"{file}: its name holds those of several parts, {', '.join(splits)}; rename it, or "
            "set splits"
        )
    return found[0] if found else None


def _is_part(file: Path, name: str) -> bool:
    """Whether a part's name is a whole word of a file's name."""
    pattern = rf"(.*[-_.])?{re.escape(name.lower())}([-_.].*)?"
    return re.fullmatch(pattern, file.name.lower()) is not None


def _refuse_strays(folder: Path, ends: tuple[str, ...]) -> None:
    """Refuse files of this format that are packed, or lie deeper than is looked."""
    packed = tuple(end + packing for end in ends for packing in _PACKINGS)
    for path in _visible(folder):
        if path.name.lower().endswith(packed):
            raise DataError(f"{path}: packed, and would not be read; unpack it, or take it out")
        deep = next(_below(path, ends + packed), None) if path.is_dir() else None
        if deep is not None:
            raise DataError(
                f"{deep}: lies deeper than {folder}, whose own files are read, and would be left "
                "out; move it up, take it out, or name one file"
            )


def _direct(folder: Path, ends: tuple[str, ...]) -> list[Path]:
    """List the files of a folder by suffix, in the order of their names."""
    return [path for path in _visible(folder) if path.is_file() and _ends(path, ends)]


def _visible(folder: Path) -> list[Path]:
    """List what is not hidden; archives made on a Mac carry a folder of such files."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith((".", "__MACOSX")))


def _ends(path: Path, ends: tuple[str, ...]) -> bool:
    return path.name.lower().endswith(ends)


def _below(folder: Path, ends: tuple[str, ...]) -> Iterator[Path]:
    named = (path for path in folder.rglob("*") if _ends(path, ends))
    return (path for path in named if path.is_file() and not path.name.startswith("."))


def _is_data(path: Path) -> bool:
    """Whether a file, or one in a folder, looks like data."""
    ends = (*_DATA, *(end + packing for end in _DATA for packing in _PACKINGS))
    return next(_below(path, ends), None) is not None if path.is_dir() else _ends(path, ends)


def _left_out(names: Sequence[str]) -> tuple[str, ...]:
    more = f", ... ({len(names)} in all)" if len(names) > _MOST else ""
    return (f"files left out: {', '.join(names[:_MOST])}{more}",) if names else ()


def _absent(splits: Sequence[str], found: Sequence[int]) -> tuple[str, ...]:
    lost = [name for split, name in enumerate(splits) if split not in found]
    return (f"no files of the part {', '.join(lost)}",) if lost else ()
