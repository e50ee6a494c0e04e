"""The score of every round on test rows, for plots against rounds and virtual seconds.

Beside it stand the losses: the mean over clients of their mean loss on their training rows, and on
their test rows. Not private: for simulations, and for the data's owner. Kept line by line beside
the run while it goes on (`history.jsonl`), so that nothing is lost when it is cut short, and as a
table (`history.parquet`) when it is done.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coterie.data.federated import FederatedDataset
from coterie.engines.outcome import Observer, Progress
from coterie.methods.base import Method
from coterie.privacy.files import write_atomically
from coterie.scores import evaluate, mean_loss
from coterie.summary import json_number

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


class History:
    """An observer that scores every client's model as it stands, and passes the round on.

    Args:
        method: Whose models are scored.
        train: The rows that the run learns from.
        test: The rows to score on.
        folder: Where to keep the lines; None keeps them here alone.
        then: Another observer.
    """

    def __init__(
        self,
        method: Method,
        train: FederatedDataset,
        test: FederatedDataset,
        folder: Path | None = None,
        then: Observer | None = None,
    ) -> None:
        self._method, self._train, self._test = method, train, test
        self._path = None if folder is None else folder / "history.jsonl"
        self._then = then
        self.lines: list[dict[str, Any]] = [] if self._path is None else _read(self._path)

    def __call__(self, progress: Progress) -> None:
        """Score a round."""
        models = progress.models(self._method, self._train)
        score = evaluate(self._method.model, models, self._test)
        everyone = np.arange(len(self._train), dtype=np.int64)
        loss = mean_loss(self._method.model, models, self._train, everyone)
        line = {
            "round": progress.round,
            "seconds": progress.seconds,
            "answered": progress.answered,
            "value": _plain(score.value),
            "balanced_accuracy": None if score.balanced is None else _plain(score.balanced.value),
            "r2": None if score.r2 is None else _plain(score.r2.value),
            "train_loss": _plain(loss),
            "test_loss": _plain(score.loss),
        }
        # A round that was cut short before its post was out is made again.
        self.lines = [old for old in self.lines if old["round"] < progress.round] + [line]
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
        if self._then is not None:
            self._then(progress)

    def keep(self, folder: Path) -> None:
        """Write the table."""
        columns = {name: [line.get(name) for line in self.lines] for name in COLUMNS}
        buffer = pa.BufferOutputStream()
        pq.write_table(pa.table(columns), buffer)
        write_atomically(folder / "history.parquet", buffer.getvalue().to_pybytes())


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
