"""Processor seconds of commands that answer before any training: init, data show, refusals, help.

The table is that of examples/hospitals.py, 14,000 rows of 60 hospitals. Each command runs in a
process of its own; the median of the repeats is printed, with the imports of its start counted.

    python benchmarks/commands.py [--repeats 3]
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "hospitals.py"
COMMANDS = (
    "init patients.csv --client hospital --target readmitted --yes --out {fresh}.toml",
    "data show --plan plan.toml",
    "data show districts",
    "run --data patient.csv --epsilon 1",
    "run --data patients.csv --target readmited --epsilon 1",
    "run --data districts --method pmlt --epsilon 1",
    "predict nowhere --data new_patients.csv",
    "run --help",
)


def seconds_of(line: list[str], folder: str) -> float:
    """Return the processor seconds of a process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *line], cwd=folder, capture_output=True, check=False, timeout=300
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print a line per command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        seconds_of([str(EXAMPLE)], folder)
        seconds_of(["-m", "coterie", *COMMANDS[0].format(fresh="plan").split()], folder)
        for command in COMMANDS:
            lines = [command.format(fresh=f"plan{at}").split() for at in range(repeats)]
            found = [seconds_of(["-m", "coterie", *line], folder) for line in lines]
            print(f"{statistics.median(found):5.2f} s  coterie {command.format(fresh='plan')}")


if __name__ == "__main__":
    main()
