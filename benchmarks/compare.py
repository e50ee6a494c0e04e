"""How long `coterie compare` takes: 5 methods x 4 epsilons x 3 seeds on districts.

    python benchmarks/compare.py [--workers 2]

Prints the wall clock of the runs and of the report, seconds a cell, and what the same cells take in
one process. The aim is below 5 minutes on 2 cores.
"""

import argparse
import contextlib
import io
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq

from coterie.cli.main import main

METHODS = "local,fedavg,pmtl,pfeb,mtlsvm"


def timed(*arguments: str) -> float:
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        status = main(list(arguments))
    if status:
        sys.exit(status)
    return time.perf_counter() - started


def bench() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="2")
    parser.add_argument("--seeds", default="3")
    parser.add_argument("--epsilons", default="0.5,1,2,4")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "compare"
        runs = timed(
            "compare", "--data", "districts", "--method", METHODS, "--epsilon", given.epsilons,
            "--seeds", given.seeds, "--workers", given.workers, "--out", str(out), "--no-report",
            "--quiet",
        )  # fmt: skip
        report = timed("report", str(out))
        table = pq.read_table(out / "comparison.parquet")
        size = (out / "report.html").stat().st_size
    seconds = table["seconds"].to_numpy()
    print(f"{table.num_rows} cells, {given.workers} workers: {runs:.1f} s, report {report:.1f} s")
    print(f"cells one after another: {seconds.sum():.1f} s, {seconds.mean():.2f} s a cell")
    print(f"report.html: {size / 1e6:.2f} MB; aim: below 300 s in all, got {runs + report:.1f} s")


if __name__ == "__main__":
    bench()
