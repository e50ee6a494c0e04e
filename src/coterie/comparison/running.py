"""Carrying out a comparison: cells dealt to worker processes, resumable at every moment.

Every cell is a run folder of its own (`coterie.run.run`), so what is finished stays finished: a cell
with a result is skipped, one without goes on where it stands. A worker that dies has its cell dealt
once more to another. Of the cells that are left, the one that is expected to take longest is dealt
first; a method that has not been timed yet counts as longer than any that has.
"""

import json
import math
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.comparison.cells import Cell
from coterie.comparison.plan import Comparison
from coterie.comparison.worker import PLAN, Ended, is_done, read_comparison, run_cell, run_of
from coterie.core.config import ConfigError, to_toml
from coterie.core.files import write_atomically
from coterie.privacy.ledger import locked

_ONE_THREAD = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_ATTEMPTS = 2
_PATIENCE = 10.0
"""Seconds that a worker has to leave its cell in order, once told to stop."""

__all__ = ["PLAN", "Ended", "State", "carry_out", "claim_folder", "finished", "read_comparison"]


@dataclass(frozen=True)
class State:
    """How far a comparison is.

    Attributes:
        ended: How cells ended, by their number.
        cells: All of them.
        seconds_left: An estimate; not a number before anything was timed.
        best: The best score so far under a budget, in words; "" before there is one.
    """

    ended: Mapping[int, Ended]
    cells: Sequence[Cell]
    seconds_left: float
    best: str


Observe = Callable[[State], None]


def claim_folder(folder: Path, comparison: Comparison) -> None:
    """Make the folder this comparison's own.

    Raises:
        FileExistsError: If it holds something else already.
    """
    path = folder / PLAN
    if path.exists() or (folder / "plan.toml").exists() or (folder / "runs").exists():
        raise FileExistsError(
            f"{folder} already holds runs; go on with `coterie compare --resume {folder}`, or "
            "choose another --out"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"{folder}: cannot be made a folder ({error.strerror}); choose another --out"
        ) from error
    write_atomically(path, to_toml(comparison.to_table()).encode())


def finished(folder: Path) -> dict[Path, str]:
    """Return the run folders of a comparison that are done, in its order, with their labels."""
    cells = read_comparison(folder).cells()
    done = [cell for cell in cells if is_done(folder / cell.place)]
    return {run_of(folder / cell.place): cell.label for cell in done}


def carry_out(
    folder: Path, *, workers: int | None = None, observe: Observe | None = None
) -> dict[int, Ended]:
    """Run the cells of a claimed folder that are not done; say how all of them ended.

    Args:
        folder: Of the comparison.
        workers: Processes; None for one a core, 0 to run all in this one.
        observe: Called at the start and after every cell.

    Raises:
        LedgerError: If another process is at it.
    """
    comparison = read_comparison(folder)
    cells = comparison.cells()
    with locked(folder):
        board = _Board(cells, folder, observe)
        if workers is None:
            workers = _cores()
        board.workers = max(1, min(workers, len(board.left)))
        board.tell()
        if workers == 0:
            while (number := board.take()) is not None:
                board.end(number, run_cell(cells[number], folder, comparison.selection))
        elif board.left:
            _deal(board, folder)
        return board.ended


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Board:
    """Which cells are left, which are done, and how long they took."""

    def __init__(self, cells: Sequence[Cell], folder: Path, observe: Observe | None) -> None:
        self.cells, self.workers = cells, 1
        self.ended: dict[int, Ended] = {}
        self.left: set[int] = set()
        self.busy: set[int] = set()
        self._folder, self._observe = folder, observe
        self._took: dict[str, list[float]] = {}
        self._scores: dict[tuple[str, float], list[float]] = {}
        self._smaller = False
        for number, cell in enumerate(cells):
            if cell.refused is not None:
                self.ended[number] = Ended("refused", cell.refused)
            elif is_done(folder / cell.place):
                self._note(number, Ended("done"))
            else:
                self.left.add(number)

    def take(self) -> int | None:
        """Return the cell that is expected to take longest."""
        if not self.left:
            return None
        number = max(self.left, key=lambda n: (self._expected(n), -n))
        self.left.remove(number)
        self.busy.add(number)
        return number

    def give_back(self, number: int) -> None:
        """Put a cell back whose worker is gone."""
        self.busy.discard(number)
        self.left.add(number)

    def end(self, number: int, ended: Ended) -> None:
        """Take note of how a cell ended."""
        self.busy.discard(number)
        self._note(number, ended)
        self.tell()

    def tell(self) -> None:
        """Tell whoever watches how far it is."""
        if self._observe is not None:
            state = State(dict(self.ended), self.cells, self._seconds_left(), self._best())
            self._observe(state)

    def _note(self, number: int, ended: Ended) -> None:
        cell = self.cells[number]
        self.ended[number] = ended
        if ended.status == "done":
            result = read_result(run_of(self._folder / cell.place))
            # Of a cell that was cut short only the last part is known: better than nothing.
            self._took.setdefault(cell.label, []).append(ended.seconds or result["seconds"])
            self._smaller = result["metric"] == "nmse"
            if cell.epsilon is not None and cell.epsilon < math.inf:
                value = math.nan if result["value"] is None else float(result["value"])
                self._scores.setdefault((cell.label, cell.epsilon), []).append(value)

    def _expected(self, number: int) -> float:
        took = self._took.get(self.cells[number].label)
        return sum(took) / len(took) if took else math.inf

    def _seconds_left(self) -> float:
        known = [seconds for took in self._took.values() for seconds in took]
        if not known:
            return math.nan
        usual = sum(known) / len(known)
        expected = [self._expected(number) for number in self.left]
        ahead = sum(usual if math.isinf(e) else e for e in expected)
        ahead += sum(min(usual, self._expected(number)) / 2 for number in self.busy)
        return ahead / self.workers

    def _best(self) -> str:
        means = {key: sum(v) / len(v) for key, v in self._scores.items() if not math.isnan(sum(v))}
        if not means:
            return ""
        choose = min if self._smaller else max
        (label, epsilon), value = choose(means.items(), key=lambda item: item[1])
        return f"{label} at epsilon {epsilon:g}: {value:.4g}"


def read_result(place: Path) -> dict[str, Any]:
    """Read the summary of a finished run."""
    try:
        found: dict[str, Any] = json.loads((place / "result.json").read_text(encoding="utf-8"))
        return found | {"metric": found["metric"], "value": found["value"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{place}: result.json is damaged ({error!r}); remove it, and --resume makes it again"
        ) from error


class _Worker:
    """A worker process, and the cell it was dealt."""

    def __init__(self, folder: Path) -> None:
        self.cell: int | None = None
        with (folder / "workers.log").open("ab") as log:
            # A group of its own: Ctrl-C is for the process that deals, which tells its workers.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "coterie.comparison.worker", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1")},
                process_group=0,
            )

    def deal(self, number: int) -> None:
        """Have a cell run."""
        self.cell = number
        self._write(f"{number}\n")

    def stop(self) -> None:
        """Have it end: at once if it has nothing to do, else by leaving its cell in order."""
        if self.cell is None:
            self._write("stop\n")
        else:
            self.process.terminate()

    def bury(self) -> int:
        """Wait for its end; give its exit status."""
        try:
            status = self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            try:
                stream.close()
            except OSError:  # what was to be told to it is told to nobody
                continue
        return status

    def _write(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
        except OSError:
            return  # it is gone: its output ends, which is seen there


def _deal(board: _Board, folder: Path) -> None:
    """Deal cells until all have ended."""
    attempts: dict[int, int] = {}
    with _workers(board.workers, folder) as workers, selectors.DefaultSelector() as heard:
        for worker in workers:
            assert worker.process.stdout is not None
            heard.register(worker.process.stdout, selectors.EVENT_READ, worker)
        while board.left or board.busy:
            for key, _ in heard.select():
                worker, line = key.data, key.fileobj.readline()  # type: ignore[union-attr]
                if line:
                    _hear(board, worker, json.loads(line))
                    continue
                heard.unregister(key.fileobj)
                workers.remove(worker)
                status = worker.bury()
                _lose(board, worker.cell, status, attempts, folder)
                if board.left:
                    fresh = _Worker(folder)
                    workers.append(fresh)
                    assert fresh.process.stdout is not None
                    heard.register(fresh.process.stdout, selectors.EVENT_READ, fresh)


def _hear(board: _Board, worker: _Worker, told: Mapping[str, Any]) -> None:
    """Take a worker's answer, and deal it the next cell."""
    if "cell" in told:
        worker.cell = None
        board.end(told["cell"], Ended(told["status"], told["why"], told["seconds"]))
    number = board.take()
    if number is not None:
        worker.deal(number)


def _lose(
    board: _Board, cell: int | None, status: int, attempts: dict[int, int], folder: Path
) -> None:
    """Have the cell of a dead worker run once more, or give it up."""
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    if cell is None:
        attempts[-1] = attempts.get(-1, 0) + 1
        if attempts[-1] > 2 * _ATTEMPTS:
            raise OSError(f"workers end before their first cell ({how}): see {folder}/workers.log")
        return
    attempts[cell] = attempts.get(cell, 0) + 1
    if attempts[cell] < _ATTEMPTS:
        board.give_back(cell)
    else:
        why = f"its process ended {_ATTEMPTS} times ({how}); see {folder}/workers.log"
        board.end(cell, Ended("failed", why))


@contextmanager
def _workers(count: int, folder: Path) -> Iterator[list[_Worker]]:
    """Start workers, and leave none behind, whatever happens."""
    workers: list[_Worker] = []
    try:
        for _ in range(count):
            workers.append(_Worker(folder))
        yield workers
    finally:
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.bury()
