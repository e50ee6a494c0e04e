"""Text and tags as numbers, over words that were public before a row was read.

A vocabulary counted from the clients' rows would be a release that nobody pays for, so there is no
way to make one here: it is a file or a list. Text is cut in one of three ways:

- "words": lower case, then the pattern of LEAF (arXiv:1812.01097): runs of letters, digits and
  apostrophes, and each of . , ! ? ; alone;
- "spaces": at white space, as it stands, as TFF does with text that is cut already;
- "characters": one by one.

A bag holds for each word of the vocabulary the mean of one-hots over all words of the text, known
or not (as in PMTL), or a count, or 0/1. Indices are 0 for padding, 1 for an unknown word, and the
place in the vocabulary plus 2 otherwise.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from coterie.data.columns import Values
from coterie.data.federated import DataError
from coterie.data.source import Source, reading

PADDING, UNKNOWN, FIRST = 0, 1, 2
_CUTS = {
    "words": 'into lower-case words (tokens = "words")',
    "spaces": 'at white space (tokens = "spaces")',
    "characters": 'into single characters (tokens = "characters")',
}
_PATTERN = re.compile(r"[\w']+|[.,!?;]")


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
    """How text becomes a row.

    Attributes:
        index: The place of each public word.
        tokens: How text is cut.
        bag: What a bag holds.
        length: Words of a row of indices; None makes bags.
    """

    index: Mapping[str, int]
    tokens: str
    bag: str = "mean"
    length: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return (len(self.index) if self.length is None else self.length,)

    def encode(self, texts: Sequence[str | None]) -> Values:
        """Turn texts into rows; None is a gap and becomes NaN."""
        words = [[] if text is None else tokenise(text, self.tokens) for text in texts]
        x = self._bags(words) if self.length is None else self._indices(words, self.length)
        gaps = [row for row, text in enumerate(texts) if text is None]
        if gaps:
            # a gap's bag has no words, so its one entry is new
            holes = sparse.csr_matrix(
                (np.full(len(gaps), np.nan), (gaps, np.zeros(len(gaps), int))), shape=x.shape
            )
            x = x + holes if self.length is None else np.where(np.isnan(holes.toarray()), np.nan, x)
        return x

    def _bags(self, words: Sequence[Sequence[str]]) -> sparse.csr_matrix:
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
        """Return the targets and which rows have any; several labels may all be absent.

        Args:
            values: For each row "a|b", or a list of tags, or None.
        """
        known = [self._known(value) for value in values]
        if not self.several:
            first = np.array([min(row, default=-1) for row in known], dtype=np.int64)
            return first, first >= 0
        y = np.zeros((len(known), len(self.index)), dtype=np.int64)
        for row, found in enumerate(known):
            y[row, found] = 1
        return y, np.ones(len(known), dtype=bool)

    def _known(self, value: Any) -> list[int]:
        value = _text(value)
        tags = () if value is None else value.split("|") if isinstance(value, str) else value
        return [self.index[tag] for tag in map(_text, tags) if tag in self.index]


def _text(value: Any) -> Any:
    """Read bytes as text, as the columns of text are."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def plan_text(source: Source, tokens: str = "words") -> Text:
    """Read the vocabulary.

    Args:
        source: The options; `text` is set.
        tokens: How text is cut where the options do not say.
    """
    tokens = source.tokens or tokens
    words = read_words(source.vocabulary, source.vocabulary_size, "vocabulary", tokens)
    odd = next((word for word in words if tokenise(word, tokens) != [word]), None)
    if odd is not None:
        raise DataError(
            f"vocabulary: {odd!r} is never met, since text is cut {_CUTS[tokens]}; write it as it "
            "would be cut, leave it out, or set tokens to another way"
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

    A file has one word a line, perhaps followed by white space and a count, which is ignored; a
    character may be white space itself. A `.json` file is a list of words or an object whose keys
    they are.

    Args:
        given: The file, or the words.
        most: Take the first so many; None takes all.
        what: What they are, for messages.
        tokens: How text is cut.
    """
    words = _from_file(Path(given), what, tokens) if isinstance(given, str) else list(given)
    where = f"{what} {given}" if isinstance(given, str) else what
    if most is not None and len(words) < most:
        raise DataError(f"{where}: {len(words)} words, but {most} are declared; declare fewer")
    words = words[:most]
    if not words:
        raise DataError(f"{where}: no words; give at least one, one a line")
    if len(set(words)) < len(words):
        twice = next(word for at, word in enumerate(words) if word in words[:at])
        raise DataError(f"{where}: {twice!r} is given twice; name each word once")
    return tuple(words)


def _from_file(path: Path, what: str, tokens: str) -> list[str]:
    if not path.is_file():
        raise DataError(f"{what} = {str(path)!r}: no such file; give one with a word a line")
    with reading(path):
        # some editors begin a file with a mark that is no part of its first word
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() != ".json":
            return [word for line in text.split("\n") if (word := _first(line, tokens))]
        # the keys alone, so that one that is given twice is found
        found = json.loads(text, object_pairs_hook=lambda pairs: [key for key, _ in pairs])
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise DataError(f"{path}: expected a list of words, or an object whose keys they are")
    return found


def _first(line: str, tokens: str) -> str:
    """Return the word at the beginning of a line, without the count behind it."""
    if tokens == "characters" and line and (not line[1:] or line[1].isspace()):
        return line[0]
    return next(iter(line.split()), "")
