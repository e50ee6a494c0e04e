"""A LEAF file larger than memory should hold: seconds and resident memory of `load`.

Writes a file like FEMNIST's (784 pixels as LEAF prints them, about 200 rows a client), then loads
it in a process of its own, with the features in a folder and in memory, and beside it by
`json.load`. Peak resident memory is the kernel's high-water mark, mapped pages included. With
`--one-user`, all rows belong to one client.

    python benchmarks/loading.py [--gigabytes 2] [--folder /tmp] [--skip-json] [--one-user]
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROWS, PIXELS, INK = 200, 784, 0.3

MEASURE = """
import json, resource, sys, time

def resident(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(key)) / 2**20

how, path = sys.argv[1:3]
rows = 0
if how == "json":
    before, begin = resident("VmRSS"), time.perf_counter()
    with open(path, encoding="utf-8") as file:
        rows = sum(json.load(file)["num_samples"])
else:
    from coterie.data.load import Source, load

    before, begin = resident("VmRSS"), time.perf_counter()
    folder = path + ".arrays" if how == "mapped" else None
    data = load(path, Source(classes=62, memory_map=folder))
    rows = int(data.offsets[-1])
print(rows, time.perf_counter() - begin, before, resident("VmHWM"))
"""


def make_sheets(rng):
    """Make the rows of a few clients, as the inside of a JSON list."""
    shades = np.array([repr(value / 255) for value in range(255)])
    sheets = []
    for _ in range(8):
        paper = np.full((ROWS, PIXELS), "1.0", dtype="U20")
        ink = rng.random(paper.shape) < INK
        paper[ink] = shades[rng.integers(0, 255, int(ink.sum()))]
        sheets.append(", ".join(f"[{', '.join(row)}]" for row in paper.tolist()))
    return sheets


def write_leaf(path, size, seed=0):
    """Write clients until the file has so many bytes; give the number of rows."""
    rng = np.random.default_rng(seed)
    sheets = make_sheets(rng)
    users = 0
    with path.open("w", encoding="utf-8") as file:
        file.write('{"user_data": {')
        while file.tell() < size:
            labels = rng.integers(0, 62, ROWS).tolist()
            file.write(", " if users else "")
            file.write(f'"f{users:05d}": {{"x": [{sheets[users % 8]}], "y": {json.dumps(labels)}}}')
            users += 1
        names = json.dumps([f"f{user:05d}" for user in range(users)])
        file.write(f'}}, "users": {names}, "num_samples": {json.dumps([ROWS] * users)}}}')
    return users * ROWS


def write_one_user(path, size, seed=0):
    """Write one client until the file has so many bytes; give the number of rows."""
    rng = np.random.default_rng(seed)
    sheets = make_sheets(rng)
    parts = 0
    with path.open("w", encoding="utf-8") as file:
        file.write('{"users": ["f"], "user_data": {"f": {"x": [')
        while file.tell() < size:
            file.write((", " if parts else "") + sheets[parts % 8])
            parts += 1
        labels = rng.integers(0, 62, parts * ROWS).tolist()
        file.write(f'], "y": {json.dumps(labels)}}}}}, "num_samples": [{len(labels)}]}}')
    return parts * ROWS


def measure(how, path):
    """Load in a process of its own: rows, seconds, resident GiB before and at the highest."""
    command = [sys.executable, "-c", MEASURE, how, str(path)]
    found = subprocess.check_output(command, text=True).split()
    shutil.rmtree(f"{path}.arrays", ignore_errors=True)
    return int(found[0]), *map(float, found[1:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", default=None, help="where to write; default: temporary")
    parser.add_argument("--skip-json", action="store_true", help="do not run json.load beside it")
    parser.add_argument("--one-user", action="store_true", help="give one client all rows")
    given = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=given.folder))
    try:
        path = work / "large.json"
        begin = time.perf_counter()
        write = write_one_user if given.one_user else write_leaf
        rows = write(path, given.gigabytes * 1e9)
        size = path.stat().st_size / 1e9
        features = rows * PIXELS * 4 / 2**30
        print(f"{size:.2f} GB, {rows:,} rows, features {features:.2f} GiB as float32", end="")
        print(f" (written in {time.perf_counter() - begin:.0f} s)")
        print(f"  {'':16} {'seconds':>8} {'MB/s':>6} {'before':>8} {'peak':>8}  GiB resident")
        for how in ("mapped", "memory", *(() if given.skip_json else ("json",))):
            found, seconds, before, peak = measure(how, path)
            assert found == rows, f"{found} rows instead of {rows}"
            name = {"mapped": "load, in a folder", "memory": "load, in memory"}.get(
                how, "json.load"
            )
            speed = size * 1e3 / seconds
            print(f"  {name:17} {seconds:7.1f} {speed:6.0f} {before:8.2f} {peak:8.2f}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
