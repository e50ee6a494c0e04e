"""Break the mechanism on purpose and see which test goes red.

Each mutant is one edit of a copy of the sources; the tests named for it must fail on the copy and
pass on the original. Run by `make mutants`; the table stands in CONTRIBUTING.md.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutant:
    """One edit, and the test that must notice it."""

    name: str
    file: str
    old: str
    new: str
    test: str


MUTANTS = (
    Mutant(
        "noise halved",
        "privacy/mechanisms.py",
        "deviation = self.noise_multiplier * self.bound\n",
        "deviation = self.noise_multiplier * self.bound / 2\n",
        "tests/statistics/test_noise.py",
    ),
    Mutant(
        "clip skipped",
        "tree.py",
        "    over = relative > bound / unit\n",
        "    over = relative > math.inf\n",
        "tests/properties/test_sensitivity.py",
    ),
    Mutant(
        "float32 norms",
        "tree.py",
        "torch.stack([flat.square().sum(dim=1) for flat in scaled.values()]).sum(dim=0)",
        "torch.stack([flat.float().square().sum(dim=1).double() for flat in scaled.values()]"
        ").sum(dim=0)",
        "tests/properties/test_sensitivity.py",
    ),
    Mutant(
        "rounding forgotten in the clip",
        "privacy/mechanisms.py",
        "clip_rows(rows, self.bound - step * math.sqrt(numbers) / 2)",
        "clip_rows(rows, self.bound)",
        "tests/properties/test_sensitivity.py",
    ),
    Mutant(
        "a weight added",
        "engines/rounds.py",
        "    part, kept = bound(state.mechanism, rows)\n",
        "    for leaf in rows.values():\n"
        "        leaf.mul_(clients.counts.reshape(-1, *[1] * (leaf.dim() - 1)))\n"
        "    part, kept = bound(state.mechanism, rows)\n",
        "tests/methods/test_pmtl.py",
    ),
    Mutant(
        "a weight added after the clip",
        "privacy/mechanisms.py",
        "leaf.mul_(1 / step).round_().mul_(step), clipped)",
        "leaf.mul_(1 / step).round_().mul_(2 * step), clipped)",
        "tests/properties/test_sensitivity.py",
    ),
    Mutant(
        "ledger charged after the sum",
        "privacy/billboard.py",
        "        self._ledger.charge(index)\n        mechanism = self._mechanisms[index]\n",
        "        mechanism = self._mechanisms[index]\n",
        "tests/privacy/test_billboard.py",
    ),
    Mutant(
        "realised cohort as denominator",
        "engines/simulate.py",
        "        self.shared, _ = server_half(\n",
        "        billboard._cohort = max(len(cohort), 1)\n        self.shared, _ = server_half(\n",
        "tests/engines/test_simulate.py",
    ),
    Mutant(
        "noise from a fixed seed",
        "privacy/entropy.py",
        "return SystemEntropy() if seed is None else SeededEntropy(seed, purpose, index)",
        "return SeededEntropy(seed or 0, purpose, index)",
        "tests/statistics/test_noise.py",
    ),
    Mutant(
        "a neighbour's row count decides how a client is solved",
        "solvers/ridge.py",
        "        end = min(end, begin + int((clients.counts[order[begin:]] == longest).sum()))\n",
        "",
        "tests/solvers/test_ridge.py",
    ),
    Mutant(
        "personal models handed to the wrong client",
        "engines/simulate.py",
        "            rows = method.personalise(shared, personal, block, coins)\n",
        "            personal = {name: leaf.roll(1, 0) for name, leaf in personal.items()}\n"
        "            rows = method.personalise(shared, personal, block, coins)\n",
        "tests/contracts/test_methods.py",
    ),
    Mutant(
        "bounds rounded down in print",
        "privacy/words.py",
        "rounding=ROUND_CEILING",
        'rounding="ROUND_FLOOR"',
        "tests/test_cli.py",
    ),
    Mutant(
        "replace counted as zero-out",
        "privacy/mechanisms.py",
        'return self.bound * (2.0 if relation == "replace" else 1.0)',
        "return self.bound",
        "tests/properties/test_sensitivity.py",
    ),
)


def main() -> int:
    """Try every mutant; print a Markdown table; fail if one survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="part of a mutant's name")
    only = parser.parse_args().only or ""
    survivors = 0
    print("| broken on purpose | goes red |\n|---|---|")
    for mutant in MUTANTS:
        if only in mutant.name:
            red = _failing(mutant)
            survivors += not red
            print(f"| {mutant.name} | {red or 'SURVIVED'} |", flush=True)
    return 1 if survivors else 0


def _failing(mutant: Mutant) -> str:
    """Run the named tests on the broken copy; give the first that fails."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        path = source / "coterie" / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            sys.exit(f"{mutant.name}: {mutant.file} no longer holds the text to break, once")
        broken = text.replace(mutant.old, mutant.new)
        if mutant.name == "ledger charged after the sum":
            late = "        self._ledger.charge(index)\n        value = mechanism.perturb("
            broken = broken.replace("        value = mechanism.perturb(", late)
        path.write_text(broken)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += ["-m", "not slow", str(ROOT / mutant.test)]
        environment = {**os.environ, "PYTHONPATH": str(source), "NUMBA_CACHE_DIR": scratch}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        return f"`{failed[0].split()[1]}`" if failed else ""


if __name__ == "__main__":
    sys.exit(main())
