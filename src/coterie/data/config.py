"""Which data a run uses: how it is read (`Source`), split and reduced (`DataConfig`).

Every option is declared by the user and public; none is learnt from the rows of clients. This
module also holds what all readers share: damaged files as errors with a remedy (`reading`), and
which files of a folder are read (`find_files`).
"""

import json
import re
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coterie.core.config import ConfigError, convert_fields
from coterie.core.files import refuse_special
from coterie.core.rng import derive_key
from coterie.data.effects import Effects
from coterie.data.federated import ClientArrays, DataError, FederatedDataset, Task

DEFAULT_TEST_SHARE = 0.25
MOST_ROWS = 100_000
PARQUET = (".parquet",)
HDF5 = (".h5", ".hdf5")
JSON = (".json",)

_PACKINGS = (".gz", ".xz", ".bz2", ".lzma", ".zlib", ".zip", ".zst")
_DATA = (
    *(*PARQUET, *HDF5, *JSON, ".jsonl", ".csv", ".tsv", ".npz", ".mat"),
    *(".sqlite", ".sqlite3", ".db", ".arrow"),
)
_PARTS = ("train", "test", "validation", "valid", "val", "dev", "eval", "heldout", "held_out")
# TokenError and SyntaxError come from the header of an array.
DAMAGED = (
    *(OSError, EOFError, ValueError, OverflowError, RecursionError, NotImplementedError),
    *(SyntaxError, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)
_LISTED = 8  # files listed in a message


@dataclass(frozen=True, kw_only=True)
class Source:
    """How to read a file.

    Columns of arrays are called "0", "1", ... (or "x0", "x1", ...), beside the names that the
    file gives; "x" in `center` and `scale` stands for every feature.

    Attributes:
        task: None takes it from the targets: real numbers are regression, whole numbers classes.
        client: The column, or the array, with the client of each row. "file" is the name of the
            file that holds the row, without suffix, where no column is called so.
        target: The target; several are labels, or clients with `targets_are_clients`.
        split: A column of 0 (train) and 1 (test), used where the file has it.
        features: The columns to take; () is every other numeric column, in file order.
        levels: Declared levels of categorical columns; each level becomes a 0/1 column. A level
            called "other" takes every value that is not declared. For LEAF text, `levels["x"]` are
            the characters, each read as its index.
        dates: The declared origin of columns of dates, such as "2020-01-01", and after a space the
            format if it is not ISO ("2020-01-01 %d/%m/%Y"). Several, with " | " between them, are
            tried in turn. A column becomes four: NAME.year (years since that of the origin),
            NAME.month (1 to 12), NAME.weekday (0 is Monday) and NAME.days (since the origin).
        accepted: Facts that were read off the rows and accepted as public (`coterie init`); stated
            with every guarantee on this data.
        classes: How many classes there are, or their names.
        positive: One class or several against the rest: rows of these are 1, all others 0, and the
            task is binary. `classes`, if declared, are then those of the file.
        targets_are_clients: Make each target a client, without the rows that lack it.
        missing: What is done with gaps in features. "error" refuses them, "drop" drops such rows,
            "constant" fills in `fill`, "client-median" the median of the client's own
            training rows. A gap in a categorical column is the level "other", or none of the
            levels. Rows without a target or a client are dropped, except by "error". All of it is
            counted in the notes.
        fill: Constants for gaps, in the column's own unit; without one it is the declared center.
        gaps: Values of a column that stand for a gap, such as "-999" or "unknown", beside those of
            every column: an empty cell, NA, N/A, null, NaN, None, ? and others
            (`coterie.data.cells`).
        decimal_commas: Columns of numbers written as 1.234,5: "1,234" is then 1.234.
        units: The unit that is written after the numbers of a column, such as "kg"; it is dropped.
        indicators: Columns that get another column, NAME.missing: 1 for a gap, else 0.
        ranges: The declared range of columns, (low, high). It is scaled to -3 to 3; `clip = 3` cuts
            values outside. For a target of regression likewise, uncut.
        center: Constants subtracted from columns, instead of `ranges`.
        scale: Constants that columns are divided by, after `center`.
        clip: Features are clipped to [-clip, clip], after `scale`.
        unit_rows: Divide each row by its l2 norm, last: a map of one row at a time, so that it
            needs no constants. Rows of zeros stay.
        sparse: Keep features as CSR. Sparse input stays CSR in any case.
        shape: The shape of a row, e.g. (28, 28) for flat images; () keeps the file's.
        memory_map: A folder to hold the arrays instead of memory; its parent must exist.
        splits: Names of the source's parts: the training part, then the test part if there is one.
        text: Read text as a "bag" of words (CSR), or as "indices" of words for an embedding. In
            tables, `features` name the columns, which are joined; for LEAF lists, the place.
        vocabulary: The public words (or characters): a file with one per line, or a list.
        vocabulary_size: The number of words to take from the start; None takes all.
        tokens: How text is cut: "words" (lower case, LEAF's pattern), "spaces" or "characters".
            None is "spaces" for TFF dumps, whose text is cut already, else "words".
        bag: What a bag holds: the "mean" of one-hots, where unknown words count and are then
            dropped, "counts", or "binary".
        length: Words of a row of indices: more are cut off, fewer are padded.
        tags: Public tags, a file or a list: targets are then lists of tags ("a|b"), read as the
            first of these that a row has, or as one label each with task="multilabel".
        images: The folder of images that rows name; "" for images inside a table.
        size: Height and width that images are resized to.
    """

    task: Task | None = None
    client: str = "client"
    target: str | tuple[str, ...] = "y"
    split: str = "split"
    features: tuple[str, ...] = ()
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    accepted: tuple[str, ...] = ()
    classes: int | tuple[str, ...] | None = None
    positive: int | str | tuple[int | str, ...] | None = None
    targets_are_clients: bool = False
    dates: Mapping[str, str] = field(default_factory=dict)
    missing: Literal["error", "drop", "constant", "client-median"] = "error"
    fill: Mapping[str, float] = field(default_factory=dict)
    gaps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    decimal_commas: tuple[str, ...] = ()
    units: Mapping[str, str] = field(default_factory=dict)
    indicators: tuple[str, ...] = ()
    ranges: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    center: Mapping[str, float] = field(default_factory=dict)
    scale: Mapping[str, float] = field(default_factory=dict)
    clip: float | None = None
    unit_rows: bool = False
    sparse: bool = False
    shape: tuple[int, ...] = ()
    memory_map: str | None = None
    splits: tuple[str, ...] = ("train", "test")
    text: Literal["bag", "indices"] | None = None
    vocabulary: str | tuple[str, ...] = ()
    vocabulary_size: int | None = None
    tokens: Literal["words", "spaces", "characters"] | None = None
    bag: Literal["mean", "counts", "binary"] = "mean"
    length: int | None = None
    tags: str | tuple[str, ...] = ()
    images: str | None = None
    size: tuple[int, ...] = (84, 84)

    def __post_init__(self) -> None:
        try:
            convert_fields(self)
        except ConfigError as error:
            raise DataError(str(error)) from error
        if self.clip is not None and not 0 < self.clip < np.inf:
            raise DataError(f"clip = {self.clip!r}: expected a finite number above 0")
        constants = (*self.center.values(), *self.scale.values())
        if not np.isfinite(constants).all() or 0 in self.scale.values():
            raise DataError(
                f"center = {dict(self.center)}, scale = {dict(self.scale)}: expected finite "
                "numbers, and no scale of 0"
            )
        if self.sparse and self.memory_map is not None:
            raise DataError("sparse rows are kept in memory: set sparse or memory_map, not both")
        self._check_gaps()
        self._check_ranges()
        self._check_names()
        self._check_positive()
        self._check_parts()
        self._check_text()
        self._check_tags()

    def _check_gaps(self) -> None:
        if self.fill and (
            self.missing != "constant" or not np.isfinite([*self.fill.values()]).all()
        ):
            raise DataError(
                f"fill = {dict(self.fill)} with missing = {self.missing!r}: constants for gaps are "
                'finite numbers, and belong to missing = "constant"'
            )
        if self.fills and self.sparse:
            raise DataError(f"missing = {self.missing!r}: sparse rows are not filled; use drop")
        if self.unit_rows and self.missing == "client-median":
            raise DataError(
                'unit_rows with missing = "client-median": medians are filled in after rows are '
                'scaled; fill gaps with missing = "constant"'
            )
        if self.indicators and not self.fills:
            raise DataError(
                f"indicators = {self.indicators!r} with missing = {self.missing!r}: no row has a "
                'gap then; leave indicators out, or set missing to "constant" or "client-median"'
            )
        for name, text in self.dates.items():
            try:
                date.fromisoformat(text.split(" ", 1)[0])
            except ValueError as error:
                raise DataError(
                    f"dates.{name} = {text!r}: expected an origin such as 2020-01-01, and after a "
                    "space the format of the column if it is not ISO, such as %d/%m/%Y"
                ) from error
            if name in self.levels:
                raise DataError(f"column {name!r} has levels and is a date: declare one of them")

    def _check_ranges(self) -> None:
        for name, given in self.ranges.items():
            if len(given) != 2 or not -np.inf < given[0] < given[1] < np.inf:
                raise DataError(f"ranges.{name} = {list(given)}: expected [low, high], low < high")
            if name in self.center or name in self.scale:
                raise DataError(
                    f"column {name!r} has a range, and center or scale: declare one of them"
                )

    def _check_names(self) -> None:
        groups = {"features": self.features, "target": self.targets}
        groups |= {f"levels of {name!r}": values for name, values in self.levels.items()}
        if not self.targets:
            raise DataError("target = (): name the target column")
        if isinstance(self.classes, tuple):
            groups["classes"] = self.classes
        for kind, names in groups.items():
            if len(set(names)) < len(names):
                raise DataError(f"{kind} = {names!r}: expected a list of names, none given twice")
        taken = (*self.targets, *self.features)
        if not self.targets_are_clients and self.client in taken:
            raise DataError(f"column {self.client!r} is both the client and a target or feature")
        if set(self.targets) & set(self.features):
            raise DataError(f"target = {self.target!r} is also a feature: remove it from features")
        size = self.class_count
        if size is not None and size < (1 if self.task == "multilabel" else 2):
            raise DataError(f"classes = {self.classes!r}: at least two classes are needed")

    def _check_positive(self) -> None:
        if self.positive is None:
            return
        names = self.positives
        if "" in names or not 0 < len(names) == len(set(names)):
            raise DataError(
                f"positive = {self.positive!r}: expected at least one class, none given twice"
            )
        if self.task not in (None, "binary"):
            raise DataError(
                f"positive = {self.positive!r} makes the task binary, but task = {self.task!r}; "
                "leave one of them out"
            )

    def _check_parts(self) -> None:
        if not 1 <= len(self.splits) <= 2 or len(set(self.splits)) < len(self.splits):
            raise DataError(
                f"splits = {self.splits!r}: expected the name of the training part, or of the "
                "training and the test part"
            )
        if self.images is not None and (self.text is not None or self.sparse):
            raise DataError("images are dense: leave text and sparse out, or images")
        if len(self.size) != 2 or min(self.size) < 1:
            raise DataError(
                f"size = {self.size!r}: expected height and width, two whole numbers, each at "
                "least 1"
            )

    def _check_text(self) -> None:
        for name, value in (("length", self.length), ("vocabulary_size", self.vocabulary_size)):
            if value is not None and value < 1:
                raise DataError(f"{name} = {value!r}: expected a whole number >= 1")
        if self.text is None and (self.vocabulary or self.length is not None):
            raise DataError(
                'vocabulary and length are for text; set text = "bag" or text = "indices" too'
            )
        if self.text is not None and not self.vocabulary:
            raise DataError(
                f"text = {self.text!r} without a vocabulary: no guarantee covers one made from the "
                "clients' rows; give a public one, vocabulary = a file with one word per line, or "
                "a list of words"
            )
        if (self.text == "indices") != (self.length is not None):
            raise DataError(
                f"text = {self.text!r} with length = {self.length}: length is the number of words "
                'per row of text = "indices"; set it there, and only there'
            )
        if self.text == "bag" and self.memory_map is not None:
            raise DataError("bags of words are sparse and kept in memory: leave memory_map out")

    def _check_tags(self) -> None:
        if not self.tags:
            return
        if self.task not in (None, "multiclass", "multilabel") or isinstance(self.classes, tuple):
            raise DataError(
                f"tags make a task of classes or labels, but task = {self.task!r} and classes = "
                f"{self.classes!r}; leave them out, or set classes to the number of tags to take"
            )
        if len(self.targets) > 1 or self.targets_are_clients:
            raise DataError(f"target = {self.target!r}: with tags, name the one column of tags")

    @property
    def fills(self) -> bool:
        """Whether gaps in features are filled."""
        return self.missing in ("constant", "client-median")

    @property
    def centers(self) -> dict[str, float]:
        """The declared constants that are subtracted, those of ranges included."""
        return {name: (low + high) / 2 for name, (low, high) in self.ranges.items()} | {
            **self.center
        }

    @property
    def scales(self) -> dict[str, float]:
        """The declared constants that columns are divided by, those of ranges included."""
        return {name: (high - low) / 6 for name, (low, high) in self.ranges.items()} | {
            **self.scale
        }

    @property
    def targets(self) -> tuple[str, ...]:
        """The target columns."""
        return (self.target,) if isinstance(self.target, str) else self.target

    @property
    def positives(self) -> tuple[str, ...]:
        """The classes that count as 1, as they are spelled; none without `positive`."""
        if self.positive is None:
            return ()
        given = self.positive if isinstance(self.positive, tuple) else (self.positive,)
        return tuple(str(one) for one in given)

    @property
    def class_count(self) -> int | None:
        """How many classes are declared, if any."""
        return len(self.classes) if isinstance(self.classes, tuple) else self.classes


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which data, how to read it, and which rows are held out.

    Attributes:
        name: The name of a built-in dataset (`coterie.data.datasets`), or a path to a file.
        options: Options of a built-in dataset, e.g. `clients = 50` for digits.
        source: How to read a file.
        test: Test rows of each client: a share, or a number of rows. None takes the source's own
            split, else the default of the built-in dataset, else a quarter.
        split_seed: Seed of a random split.
        standardise: "client" scales every client's features by its own training rows.
        effects: Fixed and random effects: public columns that are made of each row, after all
            scaling, and which coefficients are personal.
        clients: The number of clients to take from the start; None takes all.
        most_rows: The most training rows of a client; of more, so many are drawn at random by
            split_seed. A public number, which limits the time and memory that one client's rows
            take from the others of its site. Test rows are not reduced.
        rows_per_client: How many rows a client usually has: a number that the owner declares as
            public, for the verdict on joining. Never taken from the rows.
        validation: Validation rows of each client (a share, or a number), taken from its training
            rows to choose settings by; None for none.
        population: Whose clients these are, in the owner's words: for `coterie budget`, clients of
            one population and name are the same. None: one population of all files, and one of
            each built-in dataset.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    source: Source = field(default_factory=Source)
    test: int | float | None = None
    split_seed: int = 0
    standardise: Literal["none", "client"] = "none"
    effects: Effects | None = None
    clients: int | None = None
    most_rows: int = MOST_ROWS
    rows_per_client: int | None = None
    validation: int | float | None = None
    population: str | None = None

    def __post_init__(self) -> None:
        if self.effects is not None and self.name and not self._is_builtin:
            object.__setattr__(self, "source", self.effects.read_by(self.source))
        if self.split_seed < 0:
            raise ValueError(f"split_seed = {self.split_seed}: expected a whole number >= 0")
        for name in ("clients", "most_rows", "rows_per_client"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}: expected a whole number >= 1; or leave it out")
        if self._is_builtin and self.source != Source():
            raise ValueError(
                f"{self.name} is a built-in dataset: options of files (--target, --levels, ...) do "
                "not apply to it; leave them out"
            )
        if not self._is_builtin and self.options:
            raise ValueError(
                f"{self.name} is a file: --option {', '.join(self.options)} belongs to built-in "
                "datasets; leave it out"
            )

    @property
    def _is_builtin(self) -> bool:
        from coterie.data.datasets import DATASETS

        return self.name in DATASETS

    def check(self) -> None:
        """Raise DataError for a bad file; a large one is not read as a whole."""
        path = Path(self.name)
        if not self._is_builtin and path.exists():
            from coterie.data.load import check

            check(path, self.source, self.clients)

    def read(self) -> ClientArrays:
        """Read all rows of the clients; files become NumPy arrays, without torch."""
        from coterie.data.datasets import open_named
        from coterie.data.load import read

        path = Path(self.name)
        if self._is_builtin or not (path.suffix or path.exists()):
            data = open_named(self.name, **dict(self.options))
            return data if self.clients is None else data.first(self.clients)
        return read(self.name, self.source, clients=self.clients)

    def open(self) -> FederatedDataset:
        """Read all rows of the clients, as tensors."""
        data = self.read()
        return data if isinstance(data, FederatedDataset) else data.tensors()

    def split(
        self, data: FederatedDataset | None = None
    ) -> tuple[FederatedDataset, FederatedDataset]:
        """Return training and test rows: split inside clients, reduced and standardised.

        `data` are rows that are already loaded, such as those of one site; None opens them.
        """
        train, test = self._split(self.open() if data is None else data)
        train = train if self.validation is None else self._take_validation(train)[0]
        return self.prepare(train, test)

    def split_validation(self) -> tuple[FederatedDataset, FederatedDataset]:
        """Return the training rows of `split` and the validation rows."""
        return self.prepare(*self._take_validation(self._split(self.open())[0]))

    def _take_validation(
        self, train: FederatedDataset
    ) -> tuple[FederatedDataset, FederatedDataset]:
        if self.validation is None:
            raise ValueError(
                "data.validation is not set; set it to a share of the rows, such as 0.25"
            )
        # A stream of its own, so that the draw is independent of the draw of test rows.
        return train.split(self.validation, derive_key("validation", self.split_seed))

    def _split(self, data: FederatedDataset) -> tuple[FederatedDataset, FederatedDataset]:
        if self.test is None and data.source_split is not None:
            train, test = data.split_by_source()
        else:
            test_size = self._default_test if self.test is None else self.test
            train, test = data.split(test_size, self.split_seed)
        return train.at_most(self.most_rows, self.split_seed), test

    @property
    def _default_test(self) -> int | float:
        from coterie.data.datasets import DATASETS

        return DATASETS[self.name].test if self._is_builtin else DEFAULT_TEST_SHARE

    def prepare(
        self, train: FederatedDataset, test: FederatedDataset
    ) -> tuple[FederatedDataset, FederatedDataset]:
        """Return rows that are standardised by each client's training rows, then their effects."""
        from coterie.data.scaling import standardise_clients

        if self.standardise == "client":
            train, scaled = standardise_clients(train, test)
            assert scaled is not None
            test = scaled
        return self.expand(train), self.expand(test)

    def expand(self, data: FederatedDataset) -> FederatedDataset:
        """Return scaled rows with the columns of their effects, if any are declared."""
        return data if self.effects is None else self.effects.expand(data)


def find_twice(names: Sequence[str]) -> str | None:
    """Return the first name that is given twice, or None."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def check_file(path: Path) -> None:
    """Raise DataError for a FIFO, socket or device."""
    try:
        refuse_special(path)
    except ValueError as error:
        raise DataError(str(error)) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the errors of a damaged or absent file into a `DataError` that names the file."""
    try:
        check_file(path)
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; check the path") from error
    except PermissionError as error:
        raise DataError(f"{path}: permission denied; let this user read it") from error
    except MemoryError as error:
        raise DataError(
            f"{path}: larger than memory; give it as CSV, Parquet or npz, which are streamed"
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}: not whole JSON (line {error.lineno}, character {error.colno}: {error.msg}); "
            "it is truncated or damaged: fetch it again"
        ) from error
    except DAMAGED as error:
        why = " ".join(str(error).split())  # in one line
        raise DataError(
            f"{path}: could not be read ({why}); it is truncated, damaged or of another format: "
            "fetch it again or check its suffix"
        ) from error


@dataclass(frozen=True)
class Found:
    """Files to read, each with the number of its part (None: no parts), and notes on the others."""

    files: tuple[tuple[Path, int | None], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return len({split for _, split in self.files})


def find_files(folder: Path, ends: tuple[str, ...], splits: Sequence[str]) -> Found:
    """Find the files of one format in a folder.

    They lie in the folder itself, in a folder for each part (`train/`, `test/`), or in `data/`, as
    on the Hugging Face Hub. Files side by side belong to the part that their names contain
    (`train-00000-of-00001.parquet`, `so_test.h5`), if any does. No file is skipped silently: a file
    that is packed or lies too deep is refused, and other data is listed in a note. `ends` are the
    suffixes of the format, in lower case.

    Raises:
        DataError: Some files look as if they belonged to the data and would be left out.
    """
    inside = [(folder / name, split) for split, name in enumerate(splits)]
    inside = [(part, split) for part, split in inside if part.is_dir() and _direct(part, ends)]
    direct = _direct(folder, ends)
    files: list[tuple[Path, int | None]]
    if inside and (len(inside) == len(splits) or not direct):
        read = [part for part, _ in inside]
        files = [(file, split) for part, split in inside for file in _direct(part, ends)]
    elif direct:
        read = [folder]
        files = _named_parts(folder, direct, splits)
    else:
        data = folder / "data"
        found = find_files(data, ends, splits) if data.is_dir() else Found()
        beside = _left_out(folder, {data}) if found.files else ()
        return Found(found.files, (*beside, *found.notes))
    for place in read:
        _refuse_strays(place, ends)
    parts = {split for _, split in files}
    absent = [name for split, name in enumerate(splits) if split not in parts]
    notes = _left_out(folder, {*read, *(file for file, _ in files)})
    if absent and parts != {None}:
        notes += (f"no files of the part {', '.join(absent)}",)
    # one part alone stands for no parts at all
    return Found(tuple((file, split if len(parts) > 1 else None) for file, split in files), notes)


def _named_parts(
    folder: Path, direct: list[Path], splits: Sequence[str]
) -> list[tuple[Path, int | None]]:
    """Return the part of each file by its name; all files, without part, if none is named so."""
    files = [(file, _part(file, splits)) for file in direct]
    taken = [(file, split) for file, split in files if split is not None]
    if not taken:
        return files
    for file, split in files:
        if split is None and not any(_is_part(file, name) for name in _PARTS):
            raise DataError(
                f"{folder}: {taken[0][0].name} is named after a part ({', '.join(splits)}), "
                f"{file.name} is not; rename one of them, set splits to the names used, or name "
                "one file"
            )
    return sorted(taken, key=lambda pair: (pair[1], pair[0].name))


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


def _left_out(folder: Path, read: set[Path]) -> tuple[str, ...]:
    """Return a note on the data in a folder that is not read."""
    names = [path.name for path in _visible(folder) if path not in read and _is_data(path)]
    more = f", ... ({len(names)} in all)" if len(names) > _LISTED else ""
    return (f"files left out: {', '.join(names[:_LISTED])}{more}",) if names else ()
