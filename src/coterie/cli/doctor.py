"""`coterie doctor`: versions, devices, switches, and a self-test of noise and accounting.

The self-test draws noise through the real mechanism with the system's entropy, so its result is
random. All statistics together raise a false alarm with probability below 1e-6. Checks that must
hold exactly (closed forms, orderings, locks) raise none.
"""

import argparse
import json
import math
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from coterie.cli.options import JSON, Commands, aligned, command
from coterie.core.environment import TELEMETRY_OFF, is_offline, version_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_NEEDED = ("coterie", "torch", "numpy", "scipy", "numba", "dp-accounting", "pyarrow", "safetensors")
_EXTRAS = {
    "report": ("altair", "vl-convert-python"),
    "sklearn": ("scikit-learn",),
    "tune": ("optuna",),
    "track": ("mlflow-skinny", "tensorboard"),
    "onnx": ("onnx", "onnxscript"),
    "hdf5": ("h5py",),
    "docs": ("mkdocs", "mkdocs-material", "mkdocstrings"),
}
_LITTLE = 1 << 30
"""Bytes of free disk below which a run folder may not fit."""
_MORE = """\
The self-test takes a few seconds, reads no data and writes nothing. It draws new noise each time:
a correct machine fails with probability below 1e-6. The exit status is 1 if a check failed.

--json prints one object: passed, versions, extras (by name: what is missing, and what to install),
devices, folders, switches, checks (name, passed, found, seconds), seconds."""

ALARM = 1e-6
"""The probability that all statistics together reject correct noise."""
SAMPLES = 200_000
_CELLS = 100
# mu, epsilon at delta = 1e-5: exact Gaussian DP, published to four digits.
_KNOWN = ((1.0, 4.377), (0.5, 1.993), (0.26805, 1.0))


def add(commands: Commands) -> None:
    """Add `doctor`."""
    command(
        commands,
        "doctor",
        "show versions and devices, and test noise and accounting in seconds",
        "coterie doctor",
        _MORE,
        flags=JSON,
        action=doctor,
    )


def doctor(arguments: argparse.Namespace) -> int:
    """Carry out `coterie doctor`."""
    started = time.perf_counter()
    found: dict[str, Any] = {
        "versions": _versions(),
        "extras": _extras(),
        "devices": _devices(),
        "folders": _folders(),
        "switches": _switches(),
    }
    if not arguments.json:
        print(_text(found))
    checks = []
    for check in check_all():
        checks.append(check)
        if not arguments.json:
            mark = "ok  " if check.passed else "FAIL"
            print(f"  {mark}  {check.name:<22}  {check.found}", flush=True)
    problems = found["folders"]["problems"]
    passed = all(check.passed for check in checks) and not problems
    seconds = time.perf_counter() - started
    if arguments.json:
        found |= {"checks": [asdict(check) for check in checks], "seconds": seconds}
        print(json.dumps({"passed": passed, **found}, indent=2))
    else:
        wrong = "; ".join(problems) or (
            "do not run anything private on this machine, and report the failed checks"
        )
        print(f"\n{'all checks passed' if passed else f'FAILED: {wrong}'} ({seconds:.1f} s)")
    return 0 if passed else 1


def _versions() -> dict[str, str]:
    found = {name: version_of(name) or "" for name in _NEEDED}
    return {"python": platform.python_version(), **found}


def _extras() -> dict[str, dict[str, Any]]:
    """Return by extra what is installed, and what to install where a package is missing."""
    found: dict[str, dict[str, Any]] = {}
    for extra, packages in _EXTRAS.items():
        versions = {name: version_of(name) for name in packages}
        whole = None not in versions.values()
        install = None if whole else f"pip install 'coterie[{extra}]'"
        found[extra] = {"installed": whole, "versions": versions, "install": install}
    return found


def _devices() -> dict[str, Any]:
    import torch

    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "threads": torch.get_num_threads(),
        "cuda": [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())],
    }


def _folders() -> dict[str, Any]:
    """Return the cache of compiled solvers, and the free space for run folders."""
    from coterie.core.kernels import is_shared, kernel_folder

    cache = kernel_folder()
    cache.mkdir(parents=True, exist_ok=True)
    free, here = shutil.disk_usage(".").free, writable(Path())
    problems = [] if here else ["this folder is not writable: give runs another --out"]
    if here and free < _LITTLE:
        problems.append(f"{free / 1e9:.1f} GB free on the disk of this folder: free some space")
    return {
        "numba_cache": str(cache),
        "numba_cache_writable": is_shared() and writable(cache),
        "free_bytes": free,
        "writable": here,
        "problems": problems,
    }


def _switches() -> dict[str, str | bool]:
    return {"offline": is_offline(), **{name: os.environ.get(name, "") for name in TELEMETRY_OFF}}


def _text(found: dict[str, Any]) -> str:
    """Return versions, devices and folders as text."""
    devices, folders, switches = found["devices"], found["folders"], found["switches"]
    whole = [name for name, extra in found["extras"].items() if extra["installed"]]
    missing = [extra["install"] for extra in found["extras"].values() if not extra["installed"]]
    kept = "writable"
    if not folders["numba_cache_writable"]:
        kept = "NOT writable (every run compiles its solvers)"
    on = [name for name, value in TELEMETRY_OFF.items() if switches[name] != value]
    telemetry = f"NOT switched off by {', '.join(on)}" if on else "of all dependencies off"
    network = "offline" if switches["offline"] else "the network may be used"
    rows = [
        ("versions", ", ".join(f"{name} {number}" for name, number in found["versions"].items())),
        ("extras", ", ".join(whole) or "none installed"),
        *(("", f"missing: {line}") for line in missing),
        (
            "devices",
            f"{devices['system']}, {devices['cores']} cores, {devices['threads']} threads, CUDA: "
            f"{', '.join(devices['cuda']) or 'none'}",
        ),
        ("folders", f"compiled solvers: {kept}; {folders['free_bytes'] / 1e9:.1f} GB free here"),
        ("switches", f"telemetry {telemetry}; {network}"),
    ]
    return "\n".join([*aligned(rows), "", "self-test"])


@dataclass(frozen=True)
class Check:
    """A check: its name, whether it passed, what it found, and its duration."""

    name: str
    passed: bool
    found: str
    seconds: float


def check_all() -> Iterator[Check]:
    """Run every check in turn; a check that raises has failed."""
    for name, check in CHECKS.items():
        started = time.perf_counter()
        try:
            passed, found = check()
        except Exception as error:  # a failure must not hide the other checks
            passed, found = False, f"{type(error).__name__}: {error}"
        yield Check(name, bool(passed), found, time.perf_counter() - started)


def check_entropy() -> tuple[bool, str]:
    """Draw from the system's generator twice: all words differ, with as many ones as zeros."""
    import numpy as np

    from coterie.privacy.entropy import SystemEntropy

    words = SystemEntropy().words(1 << 14)
    again = SystemEntropy().words(1 << 14)
    repeats = 2 * len(words) - len(np.unique(np.concatenate([words, again])))
    ones = int(np.unpackbits(np.concatenate([words, again]).view(np.uint8)).sum())
    bits = 2 * 64 * len(words)
    far = abs(ones - bits / 2) / math.sqrt(bits / 4)
    limit = _two_sided(ALARM / 4)
    found = f"{2 * len(words):,} words of os.urandom, {repeats} repeated; ones: {far:.1f} sigma off"
    return repeats == 0 and far < limit, found


def check_noise() -> tuple[bool, str]:
    """Compare the noise of a release of zeros with the Gaussian that is charged for."""
    import numpy as np
    import torch

    from coterie.privacy.entropy import SystemEntropy
    from coterie.privacy.mechanisms import GaussianSum

    mechanism = GaussianSum(bound=0.7, noise_multiplier=1.3)
    zeros = {"w": torch.zeros(SAMPLES, dtype=torch.float64)}
    released = mechanism.perturb(zeros, SystemEntropy())["w"].numpy()
    off = noise_is_off(released / (mechanism.noise_multiplier * mechanism.bound))
    grid = mechanism.grid({"w": (SAMPLES,)})
    steps = released / grid["w"] if grid else np.full(SAMPLES, 0.5)
    if not np.array_equal(steps, np.rint(steps)):
        off["grid"] = math.inf
    found = f"mean, variance, shape, tails and correlation of {SAMPLES:,} released numbers"
    if not off:
        return True, f"{found} are as charged for (false alarm below {ALARM:g})"
    named = ", ".join(f"{name} ({value:.3g} times the limit)" for name, value in off.items())
    return False, f"{found}: WRONG in {named}; do not run with this noise"


def noise_is_off(noise: "NDArray[np.float64]") -> dict[str, float]:
    """Return the statistics that reject standard normal noise, as ratios to their limits.

    Five statistics with a false-alarm rate of 1e-7 each: the mean and the correlation of neighbours
    (normal), the sum of squares and the counts of 100 equally likely cells (chi-square), and the
    count beyond 3.5 standard deviations (Poisson, by Chernoff's bound).
    """
    import numpy as np
    from scipy import special

    each, count = ALARM / 10, len(noise)
    cells = np.clip((special.ndtr(noise) * _CELLS).astype(int), 0, _CELLS - 1)
    expected = count / _CELLS
    chi_square = ((np.bincount(cells, minlength=_CELLS) - expected) ** 2).sum() / expected
    squares = float((noise**2).sum())
    neighbours = float(noise[:-1] @ noise[1:]) / math.sqrt(count - 1)
    far, mean = int((np.abs(noise) > 3.5).sum()), 2 * count * NormalDist().cdf(-3.5)
    log_chance = (far - mean) - far * math.log(max(far, 1e-9) / mean)
    limit = _two_sided(each)
    ratios = {
        "mean": abs(float(noise.mean())) * math.sqrt(count) / limit,
        "variance": abs(squares - count) / math.sqrt(2 * count) / limit,
        "shape": chi_square / special.chdtri(_CELLS - 1, each),
        "tails": log_chance / math.log(each / 2),
        "neighbours": abs(neighbours) / limit,
    }
    return {name: value for name, value in ratios.items() if not value <= 1}


def check_sum() -> tuple[bool, str]:
    """Clip and sum rows, some of them huge or NaN: no client changes the sum by more than 1."""
    import torch

    from coterie.privacy.mechanisms import GaussianSum

    mechanism = GaussianSum(bound=1.0, noise_multiplier=2.0)
    rows = torch.ones(5, 8, dtype=torch.float32)
    rows[1], rows[2], rows[3, 0] = 1e30, -7.0, math.nan
    clipped, _ = mechanism.clip({"w": rows})
    norms = torch.linalg.vector_norm(clipped["w"].double(), dim=1)
    together = mechanism.reduce(clipped)["w"]
    others = [torch.cat([clipped["w"][:row], clipped["w"][row + 1 :]]) for row in range(len(rows))]
    sums = torch.stack([mechanism.reduce({"w": rest})["w"] for rest in others])
    moved = float(torch.linalg.vector_norm((together - sums).double(), dim=1).max())
    passed = bool(torch.isfinite(norms).all()) and float(norms.max()) <= 1 and moved <= 1
    return passed, f"clipped norms at most {float(norms.max()):.6f}, sensitivity {moved:.6f}"


def check_closed_form() -> tuple[bool, str]:
    """Compare epsilon with published values, and delta with the formula of Gaussian DP."""
    from coterie.privacy.accounting import profile
    from coterie.privacy.events import Gaussian, Participation

    normal, worst = NormalDist(), 0.0
    for mu, published in _KNOWN:
        events = (Gaussian(2 / mu),) * 4  # 4 rounds: mu = sqrt(4) / z
        epsilon = profile(events, Participation("everyone"), "zero_out").epsilon(1e-5)
        tail = math.exp(epsilon) * normal.cdf(-epsilon / mu - mu / 2)
        delta = normal.cdf(-epsilon / mu + mu / 2) - tail
        worst = max(worst, abs(epsilon / published - 1), abs(delta / 1e-5 - 1))
    return worst < 1e-3, f"epsilon of {len(_KNOWN)} known plans, relative error at most {worst:.1e}"


def check_distributions() -> tuple[bool, str]:
    """Compare privacy-loss distributions with the looser Renyi bound, and with no sampling."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    from coterie.privacy.accounting import profile
    from coterie.privacy.events import Gaussian, Participation

    z, rounds, rate, delta = 5.0, 100, 0.1, 1e-5
    hidden = profile((Gaussian(z),) * rounds, Participation("poisson", rate), "zero_out")
    visible = profile((Gaussian(z),) * rounds, Participation("poisson", rate, True), "zero_out")
    event = SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(z)), rounds)
    renyi = RdpAccountant().compose(event).get_epsilon(delta)
    tight, loose = hidden.epsilon(delta), visible.epsilon(delta)
    found = f"epsilon {tight:.4f} by distributions, {renyi:.4f} by Renyi, {loose:.4f} if visible"
    return 0.5 * renyi < tight < renyi < loose, found


def check_calibration() -> tuple[bool, str]:
    """Turn an epsilon into noise and back."""
    from coterie.privacy.accounting import profile
    from coterie.privacy.calibrate import calibrate
    from coterie.privacy.events import Gaussian, Participation

    who = Participation("poisson", 0.2)
    z = calibrate(2.0, 1e-5, weights=(1.0,) * 50, participation=who, relation="zero_out")
    back = profile((Gaussian(z),) * 50, who, "zero_out").epsilon(1e-5)
    return (
        0.999 * 2 <= back <= 2,
        f"epsilon 2 calibrated to noise {z:.4f}, which gives epsilon {back:.4f}",
    )


def check_ledger() -> tuple[bool, str]:
    """Charge, release and read back in a temporary folder; misuse is refused."""
    from coterie.privacy.events import Gaussian
    from coterie.privacy.ledger import Ledger, LedgerError, OverspentError, locked

    events = (Gaussian(3.0),) * 2
    with tempfile.TemporaryDirectory(prefix="coterie-doctor-") as name:
        path = Path(name) / "ledger.jsonl"
        started = time.perf_counter()
        with Ledger(events, path, "self-test") as ledger:
            ledger.charge(0)
            ledger.release(0, "0" * 64)
            took = time.perf_counter() - started
            refused = _refuses(lambda: Ledger(events, path, "self-test").close(), LedgerError)
            refused += _refuses(lambda: ledger.charge(2), OverspentError)
        with Ledger(events, path, "self-test") as ledger:
            kept = ledger.charged == {0} and set(ledger.released) == {0}
        with locked(Path(name)):
            refused += _refuses(lambda: _hold(Path(name)), LedgerError)
    found = f"written and synced in {1000 * took:.0f} ms, read back, {refused} of 3 misuses refused"
    return kept and refused == 3, found


def _hold(folder: Path) -> None:
    from coterie.privacy.ledger import locked

    with locked(folder):
        pass


def _refuses(act: Callable[[], object], error: type[Exception]) -> int:
    try:
        act()
    except error:
        return 1
    return 0


def _two_sided(alarm: float) -> float:
    return -NormalDist().inv_cdf(alarm / 2)


CHECKS: dict[str, Callable[[], tuple[bool, str]]] = {
    "entropy": check_entropy,
    "noise": check_noise,
    "clipped sum": check_sum,
    "closed-form accounting": check_closed_form,
    "loss distributions": check_distributions,
    "calibration": check_calibration,
    "ledger": check_ledger,
}


def writable(folder: Path) -> bool:
    """Return whether a folder, or the first existing folder above it, is writable."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)
