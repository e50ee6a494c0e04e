"""The score of every round on test rows, for plots against rounds and virtual seconds.

Beside it stand the losses: the mean over clients of their mean loss on their training rows, and on
their test rows. Not private: for simulations, and for the data's owner. Kept line by line beside
the run while it goes on (`history.jsonl`), so that nothing is lost when it is cut short, and as a
table (`history.parquet`) when it is done.
"""

import json
import math
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from coterie.data.federated import FederatedDataset
from coterie.engine.simulate import Observer, Progress
from coterie.methods.base import Method, Shape
from coterie.predictions import Models
from coterie.privacy.files import write_atomically
from coterie.rng import Rng
from coterie.scores import evaluate, mean_loss
from coterie.summary import json_number
from coterie.tree import size, take

COLUMNS = (
    "round",
    "seconds",
    "answered",
    "value",
    "balanced_accuracy",
    "r2",
    "train_loss",
    "test_loss",
)
_CHEAP = 3e8
"""Multiplications, about, that a history may take unasked: about a second of one core."""
_AT_ONCE = 1 << 24
"""Numbers of all clients' models together that are made once for both scores of a round."""


def is_cheap(method: Method, train: FederatedDataset, test: FederatedDataset, posts: int) -> bool:
    """Return whether scoring every round takes so little that nobody needs to ask for it.

    Every round makes each client's model as it stands, which may take a pass over its rows for
    each of the model's numbers (solvers), and scores it on all rows. A rule of sizes alone, so that
    a run that goes on after a crash decides as it did before.
    """
    if method.shape is Shape.POOLED or posts == 0:
        return False
    numbers = size(method.model.init(train.spec, Rng.seeded(0)))
    rows = int(train.counts.sum()) + int(test.counts.sum())
    return posts * (rows * max(numbers, 8) + 2000.0 * len(train)) <= _CHEAP


class History:
    """An observer that scores every client's model as it stands, and passes the round on.

    Args:
        method: Whose models are scored.
        train: The rows that the run learns from.
        test: The rows to score on.
        folder: Where to keep the lines; None keeps them here alone.
        then: Another observer.
        unasked: Nobody asked for it: keep it only from the first round on, and nothing of a run
            that was begun without.
    """

    def __init__(
        self,
        method: Method,
        train: FederatedDataset,
        test: FederatedDataset,
        folder: Path | None = None,
        then: Observer | None = None,
        *,
        unasked: bool = False,
    ) -> None:
        self._method, self._train, self._test = method, train, test
        self._path = None if folder is None else folder / "history.jsonl"
        self._then, self.unasked = then, unasked
        self.lines: list[dict[str, Any]] = [] if self._path is None else _read(self._path)

    def __call__(self, progress: Progress) -> None:
        """Score a round."""
        self._note(progress)
        if self._then is not None:
            self._then(progress)

    def catch_up(self, progress: Progress) -> None:
        """Score the last round of a run that goes on, if it was cut off before its line was out."""
        if not any(line["round"] == progress.round for line in self.lines):
            self._note(progress)

    def _note(self, progress: Progress) -> None:
        # A round that was cut short before its post was out is made again.
        before = [old for old in self.lines if old["round"] < progress.round]
        if self.unasked and len(before) < progress.round - 1:
            return
        line = self._line(progress)
        self.lines = [*before, line]
        if self._path is not None:
            with self._path.open("a+b") as file:
                # A crash may have cut the last line off.
                torn = file.seek(0, 2) > 0 and not _ends_line(file)
                text = json.dumps(line, allow_nan=False)
                file.write(f"{chr(10) if torn else ''}{text}{chr(10)}".encode())

    def _line(self, progress: Progress) -> dict[str, Any]:
        models = self._models(progress)
        score = evaluate(self._method.model, models, self._test)
        everyone = np.arange(len(self._train), dtype=np.int64)
        loss = mean_loss(self._method.model, models, self._train, everyone)
        return {
            "round": progress.round,
            "seconds": progress.seconds,
            "answered": progress.answered,
            "value": _plain(score.value),
            "balanced_accuracy": None if score.balanced is None else _plain(score.balanced.value),
            "r2": None if score.r2 is None else _plain(score.r2.value),
            "train_loss": _plain(loss),
            "test_loss": _plain(score.loss),
        }

    def _models(self, progress: Progress) -> Models:
        """Return models by clients; where they fit into memory they are made once for both scores."""
        found = progress.models(self._method, self._train)
        numbers = size(self._method.model.init(self._train.spec, Rng.seeded(0)))
        if numbers * len(self._train) > _AT_ONCE:
            return found
        made = found(np.arange(len(self._train), dtype=np.int64))
        return lambda ids: take(made, torch.from_numpy(ids))

    def keep(self, folder: Path) -> None:
        """Write the table, if there are rounds to tell of."""
        if not self.lines and self.unasked:
            return
        columns = {name: [line.get(name) for line in self.lines] for name in COLUMNS}
        buffer = pa.BufferOutputStream()
        pq.write_table(pa.table(columns), buffer)
        write_atomically(folder / "history.parquet", buffer.getvalue().to_pybytes())


def _ends_line(file: BinaryIO) -> bool:
    file.seek(-1, 2)
    return file.read(1) == b"\n"


def _plain(value: float) -> float | None:
    found = json_number(value)
    return found if isinstance(found, float) and math.isfinite(found) else None


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a run that goes on; a last line that was cut short is dropped."""
    if not path.exists():
        return []
    by_round: dict[int, dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            by_round[int(line["round"])] = line
        except (ValueError, KeyError, TypeError):
            continue
    return [by_round[number] for number in sorted(by_round)]
