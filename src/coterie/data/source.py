"""What every reader shares: the options, and damaged files as errors that say what to do."""

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from coterie.data.federated import TASKS, DataError, Task

_LISTS = (
    *("target", "features", "classes", "positive", "shape"),
    *("splits", "vocabulary", "tags", "size"),
)
_CHOICES = {
    "text": ("bag", "indices"),
    "tokens": ("words", "spaces", "characters"),
    "bag": ("mean", "counts", "binary"),
}


@dataclass(frozen=True, kw_only=True)
class Source:
    """How to read a file: declared and public, never learnt from the rows of clients.

    Columns of arrays are called "0", "1", ... (or "x0", "x1", ...), beside the names that the
    file gives; "x" in `center` and `scale` stands for every feature.

    Attributes:
        task: None takes it from the targets: real numbers are regression, whole numbers classes.
        client: The column, or the array, that names each row's client.
        target: The target; several are labels, or clients with `targets_are_clients`.
        split: A column of 0 (train) and 1 (test), used where the file has it.
        features: The columns to take; () is every other numeric column, in file order.
        levels: Declared levels of categorical columns; each level becomes a 0/1 column. For
            LEAF text, `levels["x"]` are the characters, each read as its index.
        classes: How many classes there are, or their names.
        positive: One class or several against the rest: rows of these are 1, all others 0, and the
            task is binary. `classes`, if declared, are then those of the file.
        targets_are_clients: Make each target a client, without the rows that lack it.
        missing: Refuse rows with gaps, or drop them (counted in the data's notes).
        center: Constants subtracted from columns.
        scale: Constants that columns are divided by, after `center`.
        clip: Features are clipped to [-clip, clip], last.
        sparse: Keep features as CSR. Sparse input stays CSR in any case.
        shape: The shape of a row, e.g. (28, 28) for flat images; () keeps the file's.
        memory_map: A folder to hold the arrays instead of memory; its parent must exist.
        splits: Names of the source's parts: the training part, then the test part if it is wanted.
        text: Read text as a "bag" of words (CSR), or as "indices" of words for an embedding. In
            tables, `features` name the columns, which are joined; for LEAF lists, the place.
        vocabulary: The public words (or characters): a file with one a line, or a list.
        vocabulary_size: Take the first so many words; None takes all.
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
    classes: int | tuple[str, ...] | None = None
    positive: int | str | tuple[int | str, ...] | None = None
    targets_are_clients: bool = False
    missing: Literal["error", "drop"] = "error"
    center: Mapping[str, float] = field(default_factory=dict)
    scale: Mapping[str, float] = field(default_factory=dict)
    clip: float | None = None
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
        for name in _LISTS:
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        self._check_types()
        if self.task is not None and self.task not in TASKS:
            raise DataError(f"task = {self.task!r}: choose one of {', '.join(TASKS)}")
        if self.missing not in ("error", "drop"):
            raise DataError(f"missing = {self.missing!r}: choose 'error' or 'drop'")
        sound = isinstance(self.clip, int | float | np.number) and np.isfinite(self.clip)
        if self.clip is not None and not (sound and self.clip > 0):
            raise DataError(f"clip = {self.clip!r}: expected a finite number above 0")
        constants = (*self.center.values(), *self.scale.values())
        if not np.isfinite(constants).all() or 0 in self.scale.values():
            raise DataError(
                f"center = {dict(self.center)}, scale = {dict(self.scale)}: expected finite "
                "numbers, and no scale of 0"
            )
        if self.sparse and self.memory_map is not None:
            raise DataError("sparse rows are kept in memory: set sparse or memory_map, not both")
        self._check_names()
        self._check_positive()
        self._check_choices()
        self._check_text()
        self._check_images()

    def _check_types(self) -> None:
        for name in ("levels", "center", "scale"):
            if not isinstance(getattr(self, name), Mapping):
                raise DataError(f"{name} = {getattr(self, name)!r}: expected values by column")
        if not isinstance(self.classes, int | tuple | None):
            raise DataError(f"classes = {self.classes!r}: expected how many, or a list of names")
        odd = [name for name, levels in self.levels.items() if not isinstance(levels, tuple | list)]
        if odd:
            raise DataError(f"levels of {odd[0]!r} = {self.levels[odd[0]]!r}: expected a list")
        for name in ("vocabulary", "tags", "features", "splits", "target"):
            value = getattr(self, name)
            listed = value if isinstance(value, tuple) else (value,)
            wrong = [one for one in listed if not isinstance(one, str)]
            if wrong:
                raise DataError(f"{name} holds {wrong[0]!r}: expected text; write it in quotes")

    def _check_names(self) -> None:
        groups = {"features": self.features, "target": self.targets}
        groups |= {f"levels of {name!r}": values for name, values in self.levels.items()}
        if not self.targets:
            raise DataError("target = (): name the target column")
        if isinstance(self.classes, tuple):
            groups["classes"] = self.classes
        for kind, names in groups.items():
            if isinstance(names, str) or len(set(names)) < len(names):
                raise DataError(f"{kind} = {names!r}: expected a list of names, none given twice")
        taken = (*self.targets, *self.features)
        if not self.targets_are_clients and self.client in taken:
            raise DataError(f"column {self.client!r} is both the client and a target or feature")
        if set(self.targets) & set(self.features):
            raise DataError(
                f"target = {self.target!r} is among the features too: leave it out there"
            )
        size = self.class_count
        if size is not None and size < (1 if self.task == "multilabel" else 2):
            raise DataError(f"classes = {self.classes!r}: at least two classes are needed")

    def _check_positive(self) -> None:
        if self.positive is None:
            return
        given = self.positive if isinstance(self.positive, tuple) else (self.positive,)
        sound = all(isinstance(one, int | str | np.integer) for one in given)
        if not sound or any(one is True or one is False or one == "" for one in given):
            raise DataError(
                f"positive = {self.positive!r}: expected a class, or several, each a whole number "
                "or a name"
            )
        if not given or len(set(self.positives)) < len(given):
            raise DataError(
                f"positive = {self.positive!r}: expected at least one class, none given twice"
            )
        if self.task not in (None, "binary"):
            raise DataError(
                f"positive = {self.positive!r} makes the task binary, but task = {self.task!r} is "
                "asked for; leave one of them out"
            )

    def _check_choices(self) -> None:
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise DataError(f"{name} = {value!r}: choose one of {', '.join(known)}")
        for name in ("length", "vocabulary_size"):
            value = getattr(self, name)
            if value is not None and (not _is_whole(value) or value < 1):
                raise DataError(f"{name} = {value!r}: expected a whole number >= 1")
        if not 1 <= len(self.splits) <= 2 or len(set(self.splits)) < len(self.splits):
            raise DataError(
                f"splits = {self.splits!r}: expected the name of the training part, or of the "
                "training and the test part"
            )

    def _check_text(self) -> None:
        if self.text is None and (self.vocabulary or self.length is not None):
            raise DataError(
                'vocabulary and length are for text; set text = "bag" or text = "indices" too'
            )
        if self.text is not None and not self.vocabulary:
            raise DataError(
                f"text = {self.text!r} without a vocabulary: one made of the clients' own rows "
                "would be data of theirs that no guarantee covers; give a public one, "
                "vocabulary = a file with one word a line, or a list of words"
            )
        if (self.text == "indices") != (self.length is not None):
            raise DataError(
                f"text = {self.text!r} with length = {self.length}: length is the number of words "
                'in a row of text = "indices", and is needed there alone'
            )
        if self.text == "bag" and self.memory_map is not None:
            raise DataError("bags of words are sparse and kept in memory: leave memory_map out")
        self._check_tags()

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

    def _check_images(self) -> None:
        if self.images is not None and (self.text is not None or self.sparse):
            raise DataError("images are dense: leave text and sparse out, or images")
        pair = isinstance(self.size, tuple) and len(self.size) == 2
        if not pair or not all(_is_whole(side) and side >= 1 for side in self.size):
            raise DataError(
                f"size = {self.size!r}: expected height and width, two whole numbers, each at "
                "least 1"
            )

    @property
    def targets(self) -> tuple[str, ...]:
        """The target columns."""
        return (self.target,) if isinstance(self.target, str) else tuple(self.target)

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
        if self.classes is None or isinstance(self.classes, int):
            return self.classes
        return len(self.classes)


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a damaged or absent file raises into a `DataError` that names it."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; check the path") from error
    except MemoryError as error:
        raise DataError(
            f"{path}: larger than memory; give it as CSV, Parquet or npz, which are streamed"
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}: not whole JSON (line {error.lineno}, character {error.colno}: {error.msg}); "
            "it is truncated or damaged: fetch it again"
        ) from error
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{path}: could not be read ({error}); it is truncated, damaged or of another format: "
            "fetch it again or check its suffix"
        ) from error
