"""Rows of text, tags, images and arrays as features.

A reader passes the values of some columns to a `Coder`, a few rows at a time, and gets features.

Words and tags are public: they come from a file or a list, since a vocabulary counted from the
clients' rows would be a release without noise. Text is cut in one of three ways:

- "words": lower case, then the pattern of LEAF (arXiv:1812.01097): runs of letters, digits and
  apostrophes, and each of . , ! ? ; by itself;
- "spaces": at white space only, as TFF does with text that is already tokenised;
- "characters": one by one.

A bag holds, for each word of the vocabulary, the mean of one-hots over all words of the text, known
or not (as in PMTL), or a count, or 0/1. Indices are 0 for padding, 1 for an unknown word, and the
position in the vocabulary plus 2 otherwise.

Images become RGB, channels first, from 0 to 1, all of one size. LEAF's CelebA names its images;
tables hold a name, the bytes of a file, or both. Pillow reads them and resizes them (bicubic).
"""

import importlib
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.core.suggest import hint
from coterie.data.config import Source, find_twice, reading
from coterie.data.federated import DataError

PADDING, UNKNOWN, FIRST = 0, 1, 2
PIXELS = "uint8 images divided by 255"
Fail = Callable[[int, str], DataError]
"""Returns the error for (row, what was found and what to do)."""
Values = Any
"""Rows of features: an array, or a CSR matrix."""
_TEXT_COLUMNS = (("tokens", "title"), ("text",))
_IMAGE_COLUMNS = (("image",), ("img",))
_CUTS = {
    "words": 'into lower-case words (tokens = "words")',
    "spaces": 'at white space (tokens = "spaces")',
    "characters": 'into single characters (tokens = "characters")',
}
_PATTERN = re.compile(r"[\w']+|[.,!?;]")
_IMAGES = 256  # images held together


@dataclass(frozen=True)
class Coder:
    """How columns of values become rows of features."""

    shape: tuple[int, ...]  # of one row
    encode: Callable[[Sequence[Sequence[Any]], Fail], Values]
    kind: str  # what the values are, for messages
    columns: tuple[str, ...] = ()  # that are read, where the file has columns
    sparse: bool = False
    step: int = 1 << 15  # the most rows to take at a time
    notes: tuple[str, ...] = ()


def plan_coder(source: Source, where: str, tokens: str = "words") -> Coder | None:
    """Return the coder that the options select, or None; `tokens` is the default of `source`."""
    if source.text is not None:
        return _text_coder(source, tokens)
    if source.images is None:
        return None
    folder = Path(source.images) if source.images else None
    if folder is not None and not folder.is_dir():
        raise DataError(f"{where}: images = {source.images!r}: no such folder; check the path")
    images = Images(folder, *source.size)
    note = f"images as RGB from 0 to 1, resized to {source.size[0]} x {source.size[1]}"
    return Coder(
        images.shape,
        lambda columns, fail: images.encode(columns[0], fail),
        "images",
        step=_IMAGES,
        notes=(note,),
    )


def _text_coder(source: Source, tokens: str) -> Coder:
    text = plan_text(source, tokens)
    what = "characters" if text.tokens == "characters" else "words"
    kind = f"{source.bag} bags of {what}" if text.length is None else f"indices of {what}"
    note = f"text read as {kind} over {len(text.index)} public {what}"

    def encode(columns: Sequence[Sequence[Any]], fail: Fail) -> Values:
        rows = enumerate(zip(*columns, strict=True))
        return text.encode([_joined(parts, row, fail) for row, parts in rows])

    return Coder(text.shape, encode, "text", sparse=text.length is None, notes=(note,))


def _joined(parts: Sequence[Any], row: int, fail: Fail) -> str | None:
    """Join the texts of one row; a gap in one makes a gap of all."""
    if any(part is None for part in parts):
        return None
    texts = [as_text(part) for part in parts]
    odd = next((part for part in texts if not isinstance(part, str)), None)
    if odd is not None:
        raise fail(row, f"found {str(odd)[:60]} where text belongs; name the columns of text")
    return " ".join(texts)


def choose_columns(coder: Coder, source: Source, names: Sequence[str], where: str) -> Coder:
    """Return the coder with the columns that it reads: those declared, else the usual ones."""
    usual = _TEXT_COLUMNS if coder.kind == "text" else _IMAGE_COLUMNS
    columns = source.features or next((group for group in usual if set(group) <= set(names)), ())
    listed = ", ".join(names)
    lost = next((name for name in columns if name not in names), None)
    if lost is not None or not columns:
        found = f"no column of {coder.kind} is declared"
        if lost is not None:
            found = f"no column {lost!r}{hint(lost, names)}"
        raise DataError(f"{where}: {found}, the columns are {listed}; name it with features=")
    if coder.kind == "images" and len(columns) > 1:
        raise DataError(f"{where}: features = {columns!r}: expected one column of images")
    return replace(coder, columns=tuple(columns))


def array_coder(column: str, shape: tuple[int, ...], pixels: bool) -> Coder:
    """Return the coder of a column of arrays; `pixels` are bytes of images, divided by 255."""

    def encode(columns: Sequence[Sequence[Any]], fail: Fail) -> Values:
        x = np.empty((len(columns[0]), *shape))
        for row, value in enumerate(columns[0]):
            x[row] = to_array(value, shape, row, fail)
        return x / 255 if pixels else x

    notes = (PIXELS,) if pixels else ()
    return Coder(shape, encode, "arrays", (column,), step=1 << 10, notes=notes)


def to_array(
    value: Any, shape: tuple[int, ...] | None, row: int, fail: Fail
) -> NDArray[np.float64]:
    """Return the numbers of one row, of the given shape; None is a gap and becomes NaN."""
    if value is None and shape is not None:
        return np.full(shape, np.nan)
    try:
        found = np.array(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        found_text = f"found {str(value)[:60]} where numbers belong; correct the row, or set text= "
        raise fail(row, found_text + "and a public vocabulary= for text") from None
    if found.shape != (found.shape if shape is None else shape):
        raise fail(
            row,
            f"values of shape {found.shape}, where the first row has {shape}; give every row the "
            "same shape",
        )
    return found


def tokenise(text: str, tokens: str) -> list[str]:
    """Cut text into words.

    >>> tokenise("Don't stop, C#!", "words"), tokenise("c# is fun", "spaces")
    (["don't", 'stop', ',', 'c', '!'], ['c#', 'is', 'fun'])
    """
    if tokens == "words":
        return _PATTERN.findall(text.lower())
    return text.split() if tokens == "spaces" else list(text)


@dataclass(frozen=True)
class Text:
    """How text becomes a row; see the options of `Source`."""

    index: Mapping[str, int]  # the position of each public word
    tokens: str
    bag: str = "mean"
    length: int | None = None  # of a row of indices; None makes bags

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return (len(self.index) if self.length is None else self.length,)

    def encode(self, texts: Sequence[str | None]) -> Values:
        """Turn texts into rows; None is a gap and becomes NaN."""
        from scipy import sparse

        words = [[] if text is None else tokenise(text, self.tokens) for text in texts]
        gaps = [row for row, text in enumerate(texts) if text is None]
        if self.length is not None:
            indices = self._indices(words, self.length)
            indices[gaps, 0] = np.nan
            return indices
        x = self._bags(words)
        if gaps:
            # the bag of a gap has no words, so its entry is new
            places = (gaps, np.zeros(len(gaps), int))
            x = x + sparse.csr_matrix((np.full(len(gaps), np.nan), places), shape=x.shape)
        return x

    def _bags(self, words: Sequence[Sequence[str]]) -> Values:
        from scipy import sparse

        sizes = np.array([len(row) for row in words], dtype=np.int64)
        found = (self.index.get(word, -1) for row in words for word in row)
        codes = np.fromiter(found, dtype=np.int64, count=int(sizes.sum()))
        rows = np.repeat(np.arange(len(words)), sizes)
        values = 1.0 / sizes[rows] if self.bag == "mean" else np.ones(len(rows))
        known = codes >= 0
        x = sparse.csr_matrix(
            (values[known], (rows[known], codes[known])), shape=(len(words), len(self.index))
        )
        x.sum_duplicates()
        if self.bag == "binary":
            x.data[:] = 1.0
        return x

    def _indices(self, words: Sequence[Sequence[str]], length: int) -> NDArray[np.float64]:
        x = np.full((len(words), length), float(PADDING))
        for at, row in enumerate(words):
            taken = row[:length]
            x[at, : len(taken)] = [self.index.get(word, UNKNOWN - FIRST) + FIRST for word in taken]
        return x


@dataclass(frozen=True)
class Tags:
    """How the tags of a row become its target."""

    index: Mapping[str, int]
    several: bool

    def encode(self, values: Sequence[Any]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the targets and which rows have any, from "a|b", a list of tags or None each."""
        known = [self._known(value) for value in values]
        if not self.several:
            first = np.array([min(row, default=-1) for row in known], dtype=np.int64)
            return first, first >= 0
        y = np.zeros((len(known), len(self.index)), dtype=np.int64)
        for row, found in enumerate(known):
            y[row, found] = 1
        return y, np.ones(len(known), dtype=bool)

    def _known(self, value: Any) -> list[int]:
        value = as_text(value)
        tags = () if value is None else value.split("|") if isinstance(value, str) else value
        return [self.index[tag] for tag in map(as_text, tags) if tag in self.index]


def as_text(value: Any) -> Any:
    """Return bytes as text, and other values unchanged."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def plan_text(source: Source, tokens: str = "words") -> Text:
    """Read the vocabulary; `tokens` is the default way to cut text."""
    tokens = source.tokens or tokens
    words = read_words(source.vocabulary, source.vocabulary_size, "vocabulary", tokens)
    odd = next((word for word in words if tokenise(word, tokens) != [word]), None)
    if odd is not None:
        raise DataError(
            f"vocabulary: {odd!r} never occurs, since text is cut {_CUTS[tokens]}; write it as it "
            "would be cut, leave it out, or change tokens"
        )
    index = {word: at for at, word in enumerate(words)}
    return Text(index, tokens, source.bag, source.length)


def plan_tags(source: Source) -> Tags:
    """Read the tags; `classes` of them, if that is declared."""
    words = read_words(source.tags, source.class_count, "tags")
    if len(words) < 2:
        raise DataError(f"tags: {len(words)} given; at least two are needed")
    index = {word: at for at, word in enumerate(words)}
    return Tags(index, several=source.task == "multilabel")


def read_words(
    given: str | Sequence[str], most: int | None, what: str, tokens: str = "words"
) -> tuple[str, ...]:
    """Take words from a list or a file, in order.

    A file has one word per line, optionally followed by white space and a count, which is
    ignored; a character may be white space itself. A `.json` file is a list of words, or an object
    whose keys are the words. `most` is the number of words to take from the start; None takes all.
    """
    words = _from_file(Path(given), what, tokens) if isinstance(given, str) else list(given)
    where = f"{what} {given}" if isinstance(given, str) else what
    if most is not None and len(words) < most:
        raise DataError(f"{where}: {len(words)} words, but {most} are declared; declare fewer")
    words = words[:most]
    if not words:
        raise DataError(f"{where}: no words; give at least one, one per line")
    if (twice := find_twice(words)) is not None:
        raise DataError(f"{where}: {twice!r} is given twice; name each word once")
    return tuple(words)


def _from_file(path: Path, what: str, tokens: str) -> list[str]:
    if not path.is_file():
        raise DataError(f"{what} = {str(path)!r}: no such file; give one with a word per line")
    with reading(path):
        # some editors begin a file with a byte order mark
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() != ".json":
            return [word for line in text.split("\n") if (word := _first(line, tokens))]
        # only the keys, so that one that is given twice is found
        found = json.loads(text, object_pairs_hook=lambda pairs: [key for key, _ in pairs])
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise DataError(f"{path}: expected a list of words, or an object whose keys they are")
    return found


def _first(line: str, tokens: str) -> str:
    """Return the word at the beginning of a line, without the count behind it."""
    if tokens == "characters" and line and (not line[1:] or line[1].isspace()):
        return line[0]
    return next(iter(line.split()), "")


@dataclass(frozen=True)
class Images:
    """How images become rows; names are relative to the folder, None where rows hold images."""

    folder: Path | None
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return (3, self.height, self.width)

    def encode(self, values: Sequence[Any], fail: Fail) -> NDArray[np.float32]:
        """Read images: a name, bytes, {"bytes": ..., "path": ...} or an opened image each.

        None is a gap and becomes NaN.
        """
        x = np.empty((len(values), *self.shape), dtype=np.float32)
        for row, value in enumerate(values):
            if value is None:
                x[row] = np.nan
                continue
            try:
                x[row] = self._pixels(self._open(value))
            except DataError as error:
                raise fail(row, str(error)) from error
            except Exception as error:  # a damaged file can trip a decoder anywhere
                raise fail(
                    row,
                    f"image {_name(value)} could not be read ({error}); it is truncated, damaged "
                    "or no image: fetch it again, or take the row out",
                ) from error
        return x

    def _open(self, value: Any) -> Any:
        if hasattr(value, "convert") and hasattr(value, "resize"):
            return value
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return _pillow().open(io.BytesIO(value))
        if not isinstance(value, str):
            raise DataError(
                f"found {str(value)[:60]!r} where an image or its name belongs; correct the row"
            )
        return _pillow().open(self._path(value))

    def _path(self, name: str) -> Path:
        parts = PurePosixPath(name)
        if self.folder is None:
            raise DataError(
                f"image {name!r} is named, not stored; give the folder it is in with images="
            )
        if parts.is_absolute() or ".." in parts.parts:
            raise DataError(f"image {name!r} lies outside of {self.folder}; name it from there")
        path = self.folder / parts
        if not path.is_file():
            raise DataError(
                f"image {path} is missing; fetch it, correct images= (the folder), or take the "
                "row out"
            )
        return path

    def _pixels(self, image: Any) -> NDArray[np.float32]:
        with image:
            if image.mode in ("I", "F") or image.mode.startswith("I;16"):
                return self._deep(image)
            sized = image.convert("RGB").resize((self.width, self.height))
        pixels = np.asarray(sized, dtype=np.float32) / np.float32(255)
        return pixels.transpose(2, 0, 1)

    def _deep(self, image: Any) -> NDArray[np.float32]:
        """Read grey images of 16 bits, which Pillow's conversion would cut off at 255."""
        if not image.mode.startswith("I;16") and not (image.mode == "I" and image.format == "PNG"):
            raise DataError(
                f"found an image of mode {image.mode!r}, whose brightest value is unknown; save "
                "it with 8 or 16 bits per channel"
            )
        grey = np.asarray(image, dtype=np.float32) / np.float32(65535)
        sized = _pillow().fromarray(grey).resize((self.width, self.height))
        # bicubic resizing overshoots at edges; with 8 bits Pillow cuts this off itself
        pixels = np.clip(np.asarray(sized, dtype=np.float32), 0, 1)
        return np.broadcast_to(pixels, self.shape)


def _name(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("path") or "given as bytes"
    return repr(value) if isinstance(value, str) else "given as bytes"


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise DataError(
            "reading images needs Pillow, which is not installed; pip install pillow"
        ) from error
