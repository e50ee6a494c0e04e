"""How long `coterie plan` takes from a cold start: a new process each time, the best of three.

Asserts that no plan loads torch and that each answers within 2 seconds, 1,000 rounds of
hidden coins included (privacy-loss distributions). Run it on a machine that
is otherwise idle: neighbours slow both down.

    python benchmarks/plan.py
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time

LONG = "--epsilon 1 --parameters 10 --rounds 1000"
PLANS = {
    "everyone, rounds by rule": "--clients 550 --epsilon 1 --parameters 10",
    "everyone, 1,000 rounds": f"--clients 550 {LONG}",
    "coins 1/2, 1,000 rounds": f"--clients 205 --cohort 100 {LONG}",
    "coins 1/10, 1,000 rounds": f"--clients 1000 --cohort 100 {LONG}",
    "coins 1/100, 1,000 rounds": f"--clients 10000 --cohort 100 {LONG}",
    "coins 1/500, 1,000 rounds": f"--clients 10000 --cohort 20 {LONG}",
    "fixed cohorts, 1,000 rounds": f"--clients 205 --cohort 100 {LONG} --sampling fixed "
    "--relation replace",
    "noise given": "--clients 205 --cohort 100 --noise-multiplier 10 --epsilon 2 --parameters 10",
}
CODE = """
import sys
from coterie.cli.main import main
status = main(sys.argv[1:])
assert "torch" not in sys.modules and "coterie.data" not in sys.modules
sys.exit(status)
"""
LIMIT = 2.0


def measure(flags: str) -> tuple[float, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    command = [sys.executable, "-c", CODE, "plan", *flags.split()]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "80"}
    )
    wall = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{flags}: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = {}
    for name, flags in PLANS.items():
        walls, works = zip(*(measure(flags) for _ in range(arguments.times)), strict=True)
        found[name] = {"wall_seconds": min(walls), "cpu_seconds": min(works)}
        if not arguments.json:
            print(f"{name:<28}  {min(walls):5.2f} s  ({min(works):.2f} s of CPU)", flush=True)
    if arguments.json:
        print(json.dumps(found, indent=2))
    slow = [name for name, times in found.items() if times["wall_seconds"] > LIMIT]
    if slow:
        raise SystemExit(f"slower than {LIMIT} s: {', '.join(slow)}")


if __name__ == "__main__":
    main()
