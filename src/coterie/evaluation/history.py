"""The scores of rounds on test rows, for plots against rounds and virtual seconds. Not private.

Each line also has the mean over clients of their mean loss on training rows and on test rows. Lines
are appended to `history.jsonl` during the run, so that an interruption loses nothing; the finished
run has them as a table (`history.parquet`).
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from coterie.core.files import write_atomically
from coterie.core.rng import Rng
from coterie.core.tree import size, take
from coterie.data.federated import FederatedDataset
from coterie.engine.simulate import Observer, Progress
from coterie.evaluation.metrics import PER_CLIENT
from coterie.evaluation.predict import Models
from coterie.evaluation.score import evaluate, mean_loss
from coterie.methods.base import Method, Shape

COLUMNS = (
    "round",
    "seconds",
    "answered",
    "value",
    *(metric.name for metric in PER_CLIENT),
    "train_loss",
    "test_loss",
)
_CHEAP = 3e8
"""Multiplications that a history may take by default: about a second of one core."""
_SHOWN = 16
"""Rounds that a history scores by default: enough for a curve."""
_AT_ONCE = 1 << 24
"""Parameters of all clients' models together that are computed once for both scores of a round."""


def is_cheap(method: Method, train: FederatedDataset, test: FederatedDataset, posts: int) -> bool:
    """Return whether scoring every round is cheap enough to do by default.

    Every round computes each client's current model, which may take a pass over its rows for each
    parameter (solvers), and scores it on all rows. The rule depends on sizes alone, so that a
    resumed run decides as before.
    """
    if method.shape is Shape.POOLED or posts == 0:
        return False
    parameters = size(method.model.init(train.spec, Rng.seeded(0)))
    rows = int(train.counts.sum()) + int(test.counts.sum())
    return posts * (rows * max(parameters, 8) + 2000.0 * len(train)) <= _CHEAP


class History:
    """An observer that scores every client's current model after each round, then calls `then`.

    Without a folder the lines stay in memory. An `unasked` history is kept by default, not on
    request: of at most 16 rounds, evenly spaced, and not of a run that was started without.
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
        """Score a round, then call the next observer."""
        self._note(progress)
        if self._then is not None:
            self._then(progress)

    def catch_up(self, progress: Progress) -> None:
        """Score the last round of a resumed run, if it has no line yet."""
        if not any(line["round"] == progress.round for line in self.lines):
            self._note(progress)

    def _note(self, progress: Progress) -> None:
        # A round that was interrupted before its release is repeated.
        before = [old for old in self.lines if old["round"] < progress.round]
        if self.unasked:
            due = spaced(progress.rounds, _SHOWN)
            if progress.round not in due or len(before) < due.index(progress.round):
                return
        line = self._line(progress)
        self.lines = [*before, line]
        if self._path is not None:
            with self._path.open("a+b") as file:
                # A crash may have cut the last line off.
                torn = file.seek(0, 2) > 0 and file.seek(-1, 2) >= 0 and file.read(1) != b"\n"
                text = json.dumps(line, allow_nan=False).encode()
                file.write((b"\n" if torn else b"") + text + b"\n")

    def _line(self, progress: Progress) -> dict[str, Any]:
        models = self._models(progress)
        score = evaluate(self._method.model, models, self._test)
        everyone = np.arange(len(self._train), dtype=np.int64)
        loss = mean_loss(self._method.model, models, self._train, everyone)
        own = {name: _plain(found.value) for name, found in score.own.items()}
        return {
            "round": progress.round,
            "seconds": progress.seconds,
            "answered": progress.answered,
            "value": _plain(score.value),
            **{metric.name: own.get(metric.name) for metric in PER_CLIENT},
            "train_loss": _plain(loss),
            "test_loss": _plain(score.loss),
        }

    def _models(self, progress: Progress) -> Models:
        """Return models by clients, computed once for both scores where they fit into memory."""
        found = progress.models(self._method, self._train)
        parameters = size(self._method.model.init(self._train.spec, Rng.seeded(0)))
        if parameters * len(self._train) > _AT_ONCE:
            return found
        made = found(np.arange(len(self._train), dtype=np.int64))
        return lambda ids: take(made, torch.from_numpy(ids))

    def keep(self, folder: Path) -> None:
        """Write the table, if there are rounds."""
        if not self.lines and self.unasked:
            return
        columns = {name: [line.get(name) for line in self.lines] for name in COLUMNS}
        buffer = pa.BufferOutputStream()
        pq.write_table(pa.table(columns), buffer)
        write_atomically(folder / "history.parquet", buffer.getvalue().to_pybytes())


def spaced(rounds: int, most: int) -> list[int]:
    """Return at most this many rounds, evenly spaced, with the first and the last.

    >>> spaced(5, 16), spaced(37, 4)
    ([1, 2, 3, 4, 5], [1, 13, 25, 37])
    """
    return [round(one) for one in np.linspace(1, rounds, min(rounds, most)).tolist()]


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a resumed run, without an incomplete last line."""
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
