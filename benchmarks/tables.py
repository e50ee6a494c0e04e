"""A CSV or Parquet file of many clients: processor seconds and resident memory of `load`.

Beside it, on one thread each, pyarrow's own reader with the grouping that federated data need
(codes of clients, a stable sort, one float32 matrix), and pandas likewise. Every reader runs in a
process of its own, imports not counted; peak resident memory is the kernel's high-water mark.
Readers alternate, and the least of the repeats is printed: other programs only ever add.

    python benchmarks/tables.py [--rows 5000000] [--clients 50000] [--folder /tmp] [--repeats 3]
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

FEATURES = 19

MEASURE = """
import sys, time

how, path = sys.argv[1:3]
import numpy as np
names = [f"x{j}" for j in range(19)]
if how == "coterie":
    import torch
    from coterie.data.load import Source, load

    load(sys.argv[3], Source(client="client", target="y"))  # what is imported late
elif how == "pandas":
    import pandas as pd
else:
    import pyarrow as pa, pyarrow.csv, pyarrow.parquet
    pa.set_cpu_count(1)

begin = time.process_time()
if how == "coterie":
    data = load(path, Source(client="client", target="y"))
    found = int(data.offsets[-1]), len(data)
elif how == "pandas":
    table = pd.read_csv(path) if path.endswith("csv") else pd.read_parquet(path)
    codes, clients = pd.factorize(table["client"])
    order = np.argsort(codes, kind="stable")
    x = table[names].to_numpy(np.float32)[order]
    found = len(x), len(clients)
else:
    options = pa.csv.ReadOptions(use_threads=False)
    if path.endswith("csv"):
        table = pa.csv.read_csv(path, read_options=options)
    else:
        table = pa.parquet.read_table(path, use_threads=False)
    coded = table["client"].combine_chunks().dictionary_encode()
    order = np.argsort(coded.indices.to_numpy(), kind="stable")
    x = np.column_stack([table[name].to_numpy() for name in names]).astype(np.float32)[order]
    found = len(x), len(coded.dictionary)
seconds = time.process_time() - begin
with open("/proc/self/status") as status:
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**20
print(*found, seconds, peak)
"""


def write(folder, rows, clients):
    """Write the same rows as CSV and as Parquet, a part at a time."""
    rng = np.random.default_rng(0)
    sheet, file = folder / "rows.csv", folder / "rows.parquet"
    names = ["client", *(f"x{j}" for j in range(FEATURES)), "y"]
    kinds = [pa.string(), *(pa.float64() for _ in names[1:])]
    schema = pa.schema(list(zip(names, kinds, strict=True)))
    plain = csv.WriteOptions(quoting_style="none")
    with (
        csv.CSVWriter(sheet, schema, write_options=plain) as text,
        parquet.ParquetWriter(file, schema) as packed,
    ):
        for first in range(0, rows, 100_000):
            count = min(100_000, rows - first)
            ids = pa.array(rng.integers(0, clients, count)).cast(pa.string())
            values = [rng.normal(size=count).round(6) for _ in range(FEATURES + 1)]
            part = pa.table([ids, *values], schema=schema)
            text.write(part)
            packed.write(part)
    small = folder / "small.csv"
    small.write_text("client,x0,y\na,1,2\nb,2,3\na,3,4\n")
    return (sheet, file), small


def measure(how, path, small):
    """Read in a process of its own: rows, clients, processor seconds, peak GiB."""
    command = [sys.executable, "-c", MEASURE, how, str(path), str(small)]
    rows, clients, seconds, peak = subprocess.check_output(command, text=True).split()
    return int(rows), int(clients), float(seconds), float(peak)


def run(given, work):
    """Write the files and print a line for every reader."""
    paths, small = write(work, given.rows, given.clients)
    for path in paths:
        size = path.stat().st_size / 1e9
        print(f"{path.suffix[1:]}, {size:.2f} GB, {given.rows:,} x {FEATURES + 2}")
        found = {how: [] for how in given.readers}
        for _ in range(given.repeats):
            for how, times in found.items():
                times.append(measure(how, path, small))
        assert len({times[0][:2] for times in found.values()}) == 1, "the readers disagree"
        for how, times in found.items():
            seconds, peak = min(one[2] for one in times), max(one[3] for one in times)
            print(f"  {how:8} {seconds:6.2f} CPU s  {peak:5.2f} GiB", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--clients", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--readers", nargs="+", default=["coterie", "pyarrow", "pandas"])
    parser.add_argument("--folder", default=None, help="where to write; default: temporary")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        run(options, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
