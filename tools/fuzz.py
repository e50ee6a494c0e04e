"""Give damaged files to every reader: each reads them, or refuses them by an error that names them.

Every mutant is read in a forked process with limits on time and memory, so that a crash, a hang and
a flood of memory are seen as well. The seed fixes all mutants: `--only N` repeats one. Run by
`make fuzz`. A part of it is a test; files that were once mishandled are in tests/test_hostile.py.
"""

import argparse
import gzip
import importlib.util
import io
import json
import os
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}  # threads do not survive a fork
os.environ |= {"NUMBA_THREADING_LAYER": "workqueue", "COTERIE_OFFLINE": "1"}

import numpy as np
import pyarrow as pa
import torch
from pyarrow import csv, parquet
from scipy import io as matlab
from scipy import sparse

from coterie.cli.main import _is_user_error
from coterie.core.config import naming
from coterie.data.config import DataConfig, Source
from coterie.data.federated import Spec
from coterie.data.load import load, load_unlabelled
from coterie.planning.plan import Plan
from coterie.planning.rules import resolve
from coterie.report.page import write_report
from coterie.runs.run import execute
from coterie.serve.export import load_client, read_clients, save_client
from coterie.serve.onboard import onboard
from coterie.serve.predict import predict_model, predict_run
from coterie.verification import verify

ROOT = Path(__file__).resolve().parent.parent
SECONDS, BYTES = 30, 3 << 30
HDF5 = importlib.util.find_spec("h5py") is not None
SOURCE = Source(task="regression")
DUMP = Source(features=("pixels",), target="label", classes=2, shape=(2, 2))
PLAN = {
    "data": {"name": "rows.npz", "source": {"task": "regression"}},
    "method": {"kind": "pmtl", "model": {"kind": "mlp", "hidden": [3]}},
    "privacy": {"epsilon": 4.0, "delta": 1e-5},
    "sampler": {"kind": "poisson", "cohort": 4.0},
    "speed": {"store": "disk"},
    "rounds": 3,
    "compare_with_local": False,
    "history": False,
}
ODD = (
    *(b"-1", b"0", b"1000000000", b"1e308", b"1e-300", b"nan", b"inf", b"99999999999999999999"),
    *(b'""', b"[]", b"{}", b"null", b"true", b"'x'", b"\xff", b"\x00", b"\n", b'"', b"," * 50),
    *(b"[" * 5000, b'{"a":' * 5000, b"a." * 3000, b"9" * 5000, b"os:system", b"regression"),
)
WORDS = struct.pack("<q", -1), struct.pack("<q", 1 << 62), struct.pack("<i", 1 << 30), b"\x00" * 8


# --- whole files ----------------------------------------------------------------------------------


def make_samples(place: Path) -> None:
    """Write a small whole file for every reader into the current folder, `place`."""
    draw = np.random.default_rng(0)
    x, client = draw.normal(size=(48, 3)), np.arange(48) % 6
    y = x @ [1.0, -1.0, 0.5]
    columns = {"client": client, "y": y, **{f"x{k}": x[:, k] for k in range(3)}}
    table = pa.table(columns)
    csv.write_csv(table, "rows.csv")
    Path("rows.csv.gz").write_bytes(gzip.compress(Path("rows.csv").read_bytes()))
    parquet.write_table(table, "rows.parquet")
    with pa.OSFile("rows.arrow", "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    np.savez("rows.npz", X=x, y=y, client=client)
    flat = sparse.csr_matrix(np.where(x > 0, x, 0))
    parts = {f"X_{name}": getattr(flat, name) for name in ("data", "indices", "indptr")}
    np.savez("sparse.npz", X_shape=np.array(flat.shape), y=y, client=client, **parts)
    cells = np.empty((2, 6), dtype=object)
    for one in range(6):
        cells[:, one] = x[client == one], y[client == one][:, None]
    matlab.savemat("rows.mat", {"X": cells[:1], "Y": cells[1:]})
    users = {
        f"u{k}": {"x": x[client == k].tolist(), "y": y[client == k].tolist()} for k in range(6)
    }
    leaf = {"users": list(users), "num_samples": [8] * 6, "user_data": users}
    Path("leaf.json").write_text(json.dumps(leaf))
    _make_dumps(draw.random((6, 2, 2), dtype=np.float32))
    execute(Plan.from_table(PLAN), folder=Path("finished_run"))
    shutil.copy("finished_run/plan.toml", "plan.toml")
    save_client(Path("model.safetensors"), read_clients(Path("finished_run"), ["3"])[0])
    begun = Path("begun_run")
    try:
        execute(Plan.from_table(PLAN), folder=begun, observer=lambda plan, train: _stop)
    except InterruptedError:
        assert (begun / "personal").exists(), place


def _make_dumps(pixels: Any) -> None:
    """Write TFF's layouts: SQLite, and HDF5 if h5py is installed."""
    sys.path.insert(0, str(ROOT))
    from tests.data.test_tff import example, sqlite_file

    rows = [example(pixels=one.reshape(-1).tolist(), label=[k % 2]) for k, one in enumerate(pixels)]
    sqlite_file(Path("rows.sqlite"), train={"f1": rows[:3], "f2": rows[3:]})
    if HDF5:
        import h5py

        with h5py.File("rows.h5", "w") as file:
            for client, chosen in (("f1", slice(3)), ("f2", slice(3, 6))):
                file[f"examples/{client}/pixels"] = pixels[chosen]
                file[f"examples/{client}/label"] = [0, 1, 0]


def _stop(*_: Any) -> None:
    raise InterruptedError


# --- readers --------------------------------------------------------------------------------------


def _plan(path: Path) -> None:
    plan = Plan.load(path, trust=False)
    with naming(path):
        found = resolve(plan, Spec((3,), 1, "regression", 20))
        found.guarantee(20)
        found.method.check(Spec((3,), 1, "regression", 20))


def _resume(folder: Path) -> None:
    execute(Plan.load(folder / "plan.toml", trust=False), folder=folder)


def _load(path: Path) -> None:
    load(path, SOURCE)


def _dump(path: Path) -> None:
    load(path, DUMP)


def _unlabelled(path: Path) -> None:
    load_unlabelled(path, SOURCE)


DATA = ("rows.csv", "rows.csv.gz", "rows.parquet", "rows.arrow", "rows.npz", "sparse.npz")
READERS: tuple[tuple[str, Callable[[Path], Any]], ...] = (
    *((name, _load) for name in (*DATA, "rows.mat", "leaf.json")),
    *((name, _unlabelled) for name in DATA),
    *((name, _dump) for name in ("rows.sqlite", "rows.h5")[: 1 + HDF5]),
    ("plan.toml", _plan),
    ("model.safetensors", lambda path: predict_model(load_client(path), "rows.csv", all_rows=True)),
    ("finished_run", lambda folder: predict_run(folder, "rows.csv").table()),
    ("finished_run", lambda folder: read_clients(folder, ["3"])),
    ("finished_run", lambda folder: onboard(folder, DataConfig(name="rows.npz", source=SOURCE))),
    ("finished_run", lambda folder: write_report([folder], folder / "report.html")),
    ("finished_run", verify),
    ("finished_run", _resume),
    ("begun_run", _resume),
)
"""The file or folder that is damaged, and what reads it."""


# --- mutants --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """A damaged file."""

    sample: str  # a file or folder of the samples
    read: Callable[[Path], Any]
    file: str  # the file in it that is damaged
    content: bytes


def mutant(number: int, seed: int, samples: Path) -> Mutant:
    """Return the damaged file of a number."""
    draw = np.random.default_rng([seed, number])
    sample, read = READERS[number % len(READERS)]
    path = samples / sample
    if path.is_dir():
        path = draw.choice(sorted(one for one in path.rglob("*") if one.is_file()))  # type: ignore[arg-type]
    content = path.read_bytes()
    inside = draw.random() < 0.6  # of an archive: what is packed is damaged, and its sums are right
    content = _inside(path.name, content, draw) if inside else _damaged(content, draw)
    return Mutant(sample, read, str(path.relative_to(samples)), content)


def _inside(name: str, content: bytes, draw: np.random.Generator) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(_damaged(gzip.decompress(content), draw))
    if name.endswith(".npz"):
        buffer = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w") as new:
            chosen = draw.choice(old.namelist())
            for each in old.namelist():
                new.writestr(
                    each, _damaged(old.read(each), draw) if each == chosen else old.read(each)
                )
        return buffer.getvalue()
    if name.endswith(".safetensors"):
        size = struct.unpack("<Q", content[:8])[0]
        head = _damaged(content[8 : 8 + size], draw)
        return struct.pack("<Q", len(head)) + head + content[8 + size :]
    return _damaged(content, draw)


def _damaged(content: bytes, draw: np.random.Generator) -> bytes:
    """Return content with one to three changes."""
    for _ in range(draw.integers(1, 4)):
        content = _KINDS[draw.integers(len(_KINDS))](content, draw)
    return content


def _cut(content: bytes, draw: np.random.Generator) -> tuple[bytes, bytes, bytes]:
    at, to = sorted(draw.integers(0, len(content) + 1, 2))
    to = min(to, at + int(draw.integers(1, 200)))
    return content[:at], content[at:to], content[to:]


def _flip(content: bytes, draw: np.random.Generator) -> bytes:
    found = bytearray(content)
    for at in draw.integers(0, max(1, len(found)), draw.integers(1, 6)):
        found[at : at + 1] = bytes(one ^ (1 << int(draw.integers(8))) for one in found[at : at + 1])
    return bytes(found)


def _drop(content: bytes, draw: np.random.Generator) -> bytes:
    before, _, after = _cut(content, draw)
    return before + after


def _shorten(content: bytes, draw: np.random.Generator) -> bytes:
    return content[: draw.integers(0, len(content) + 1) if draw.random() < 0.9 else 0]


def _repeat(content: bytes, draw: np.random.Generator) -> bytes:
    before, part, after = _cut(content, draw)
    return before + part * int(draw.integers(2, 50)) + after


def _overwrite(content: bytes, draw: np.random.Generator) -> bytes:
    at, word = int(draw.integers(0, len(content) + 1)), WORDS[draw.integers(len(WORDS))]
    return content[:at] + word + content[at + len(word) :]


def _swap_value(content: bytes, draw: np.random.Generator) -> bytes:
    values = list(re.finditer(rb'-?\d[\d.e+-]*|"[^"\n]{0,40}"|\[[^][]{0,60}\]|[a-z_]{3,}', content))
    if not values:
        return _flip(content, draw)
    found = values[draw.integers(len(values))]
    return content[: found.start()] + ODD[draw.integers(len(ODD))] + content[found.end() :]


_KINDS = (_flip, _drop, _shorten, _repeat, _overwrite, _swap_value, _swap_value, _swap_value)


# --- the trial ------------------------------------------------------------------------------------


def trial(one: Mutant, samples: Path, place: Path) -> str:
    """Return how a reader ends: "read", "refused", or what is wrong, in a process of its own."""
    given = place / one.sample
    if given.is_dir():
        shutil.rmtree(given)
    if (samples / one.sample).is_dir():
        shutil.copytree(samples / one.sample, given)
    (place / one.file).write_bytes(one.content)
    said = place / "said"
    said.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _child(one, given, said)
    end, status = time.monotonic() + SECONDS, None
    while status is None and time.monotonic() < end:
        pid, found = os.waitpid(child, os.WNOHANG)
        status = found if pid else None
        time.sleep(0.002)
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return f"HANGS for more than {SECONDS} s"
    if os.WIFSIGNALED(status):
        return f"DIES of signal {os.WTERMSIG(status)}"
    return said.read_text() if said.exists() else f"DIES with status {status}"


def _child(one: Mutant, given: Path, said: Path) -> None:
    found = "DIES"
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + BYTES,) * 2)
        found = _ending(one, given)
    except BaseException as error:
        found = f"FAILS: {error!r}"
    finally:
        said.write_text(found)
        os._exit(0)


def _ending(one: Mutant, given: Path) -> str:
    try:
        one.read(Path(one.sample))
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno} {type(error).__name__}: {error}"
        if not isinstance(error, Exception) or not _is_user_error(error):
            return f"FAILS at {where}"[:400]
        if given.name not in str(error) and "rows." not in str(error):  # the other file given
            return f"DOES NOT NAME {given.name} at {where}"[:400]
        return f"SAYS MORE THAN A LINE at {where}"[:400] if "\n" in str(error) else "refused"
    return "read"


def results(numbers: range, seed: int) -> Iterator[tuple[int, Mutant, str]]:
    """Yield how every mutant ends."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        samples, place = Path(root, "samples"), Path(root, "place")
        samples.mkdir()
        os.chdir(samples)
        make_samples(samples)
        shutil.copytree(samples, place)
        os.chdir(place)
        for number in numbers:
            one = mutant(number, seed, samples)
            yield number, one, trial(one, samples, place)
            if not (place / one.sample).is_dir():  # whole again: other readers need it
                shutil.copy(samples / one.sample, place / one.sample)
        os.chdir("/")


def main() -> int:
    """Read all mutants; return 1 if one is mishandled."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mutants", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one mutant, by its number")
    parser.add_argument("--keep", type=Path, help="a folder for the mishandled files")
    given = parser.parse_args()
    numbers = range(given.mutants) if given.only is None else range(given.only, given.only + 1)
    keep = None if given.keep is None else given.keep.resolve()
    ended: Counter[str] = Counter()
    for number, one, how in results(numbers, given.seed):
        wrong = how not in ("read", "refused")
        ended["mishandled" if wrong else how] += 1
        if wrong:
            print(f"{number} {one.file}: {how}", flush=True)
        if wrong and keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"{number}-{Path(one.file).name}").write_bytes(one.content)
    print(", ".join(f"{count} {how}" for how, count in sorted(ended.items())))
    return int(ended["mishandled"] > 0)


if __name__ == "__main__":
    sys.exit(main())
