"""A self-test of what a guarantee stands on: noise, accounting, entropy and the ledger.

Made for a machine that nobody has tested: a few seconds, no data, nothing kept. Noise goes through
the real mechanism with the system's entropy, so the answer is random; each statistic's false-alarm
rate is stated, and all of them together raise a false alarm with probability below 1e-6. What must
hold exactly (closed forms, orderings, locks) has none.
"""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special

from coterie.privacy.accounting import profile
from coterie.privacy.calibrate import calibrate
from coterie.privacy.entropy import SystemEntropy
from coterie.privacy.events import Gaussian, Participation
from coterie.privacy.ledger import Ledger, LedgerError, OverspentError, locked
from coterie.privacy.mechanisms import GaussianSum

ALARM = 1e-6
"""The probability that sound noise is called broken, by all statistics together."""
SAMPLES = 200_000
_CELLS = 100
_EVERYONE = Participation("everyone")
# mu, epsilon at delta = 1e-5: exact Gaussian DP, published to four digits.
_KNOWN = ((1.0, 4.377), (0.5, 1.993), (0.26805, 1.0))


@dataclass(frozen=True)
class Check:
    """What was tested, whether it held, what was seen, and how long it took."""

    name: str
    passed: bool
    told: str
    seconds: float


def check_all() -> Iterator[Check]:
    """Run every check, one after another; one that breaks has failed."""
    for name, check in CHECKS.items():
        started = time.perf_counter()
        try:
            passed, told = check()
        except Exception as error:  # a broken part must not hide what the others say
            passed, told = False, f"{type(error).__name__}: {error}"
        yield Check(name, bool(passed), told, time.perf_counter() - started)


def check_entropy() -> tuple[bool, str]:
    """Draw words of the system's generator twice: all different, and ones as often as zeros."""
    words = SystemEntropy().words(1 << 14)
    again = SystemEntropy().words(1 << 14)
    repeats = 2 * len(words) - len(np.unique(np.concatenate([words, again])))
    ones = int(np.unpackbits(np.concatenate([words, again]).view(np.uint8)).sum())
    bits = 2 * 64 * len(words)
    far = abs(ones - bits / 2) / math.sqrt(bits / 4)
    limit = _two_sided(ALARM / 4)
    told = f"{len(words) * 2:,} words of os.urandom, {repeats} repeated, {far:.1f} deviations off"
    return repeats == 0 and far < limit, told


def check_noise() -> tuple[bool, str]:
    """Hold the noise of a post of zeros against the Gaussian that is charged for."""
    mechanism = GaussianSum(bound=0.7, noise_multiplier=1.3)
    zeros = {"w": torch.zeros(SAMPLES, dtype=torch.float64)}
    posted = mechanism.perturb(zeros, SystemEntropy())["w"].numpy()
    off = noise_is_off(posted / (mechanism.noise_multiplier * mechanism.bound))
    steps = posted / mechanism.grid({"w": (SAMPLES,)})["w"]
    if not np.array_equal(steps, np.rint(steps)):
        off["grid"] = math.inf
    told = f"{SAMPLES:,} numbers of a post: mean, variance, shape, tails and neighbours"
    if not off:
        return True, f"{told} as charged for (false alarm below {ALARM:g})"
    named = ", ".join(f"{name} ({value:.3g} times the limit)" for name, value in off.items())
    return False, f"{told}: OFF in {named}; do not run with this noise"


def noise_is_off(noise: NDArray[np.float64]) -> dict[str, float]:
    """Return the statistics in which numbers are no standard normals, over their limits.

    Five statistics with a false-alarm rate of 1e-7 each: the mean and the neighbours' correlation
    (normal), the sum of squares and the counts of 100 equally probable cells (chi-square), and the
    count beyond 3.5 deviations (Poisson, by Chernoff's bound).
    """
    each, count = ALARM / 10, len(noise)
    cells = np.clip((special.ndtr(noise) * _CELLS).astype(int), 0, _CELLS - 1)
    expected = count / _CELLS
    spread = ((np.bincount(cells, minlength=_CELLS) - expected) ** 2).sum() / expected
    squares = float((noise**2).sum())
    neighbours = float(noise[:-1] @ noise[1:]) / math.sqrt(count - 1)
    far, usual = int((np.abs(noise) > 3.5).sum()), 2 * count * NormalDist().cdf(-3.5)
    log_chance = (far - usual) - far * math.log(max(far, 1e-9) / usual)
    limit = _two_sided(each)
    ratios = {
        "mean": abs(float(noise.mean())) * math.sqrt(count) / limit,
        "variance": abs(squares - count) / math.sqrt(2 * count) / limit,
        "shape": spread / special.chdtri(_CELLS - 1, each),
        "tails": log_chance / math.log(each / 2),
        "neighbours": abs(neighbours) / limit,
    }
    return {name: value for name, value in ratios.items() if not value <= 1}


def check_sum() -> tuple[bool, str]:
    """Clip and add up rows, among them broken and huge ones: no client moves a sum too far."""
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
    return passed, f"rows of norm {float(norms.max()):.6f} at most, one client moves {moved:.6f}"


def check_closed_form() -> tuple[bool, str]:
    """Hold epsilon against published values, and delta against the formula of Gaussian DP."""
    normal, worst = NormalDist(), 0.0
    for mu, published in _KNOWN:
        found = profile(
            (Gaussian(2 / mu),) * 4, _EVERYONE, "zero_out"
        )  # 4 rounds: mu = sqrt(4) / z
        epsilon = found.epsilon(1e-5)
        tail = math.exp(epsilon) * normal.cdf(-epsilon / mu - mu / 2)
        delta = normal.cdf(-epsilon / mu + mu / 2) - tail
        worst = max(worst, abs(epsilon / published - 1), abs(delta / 1e-5 - 1))
    return worst < 1e-3, f"epsilon of {len(_KNOWN)} known plans, off by {worst:.1e} at most"


def check_distributions() -> tuple[bool, str]:
    """Hold privacy-loss distributions against Renyi's looser bound, and against no sampling."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    z, rounds, rate, delta = 5.0, 100, 0.1, 1e-5
    found = profile((Gaussian(z),) * rounds, Participation("poisson", rate), "zero_out")
    seen = profile((Gaussian(z),) * rounds, Participation("poisson", rate, True), "zero_out")
    event = SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(z)), rounds)
    renyi = RdpAccountant().compose(event).get_epsilon(delta)
    tight, loose = found.epsilon(delta), seen.epsilon(delta)
    told = f"epsilon {tight:.4f} by distributions, {renyi:.4f} by Renyi, {loose:.4f} if seen"
    return 0.5 * renyi < tight < renyi < loose, told


def check_calibration() -> tuple[bool, str]:
    """Turn an epsilon into noise and back."""
    who = Participation("poisson", 0.2)
    z = calibrate(2.0, 1e-5, weights=(1.0,) * 50, participation=who, relation="zero_out")
    back = profile((Gaussian(z),) * 50, who, "zero_out").epsilon(1e-5)
    return 0.999 * 2 <= back <= 2, f"epsilon 2 asked for, noise {z:.4f}, epsilon {back:.4f} back"


def check_ledger() -> tuple[bool, str]:
    """Charge and release in a folder of its own, read it back, overspend and share it: refused."""
    events = (Gaussian(3.0),) * 2
    with tempfile.TemporaryDirectory(prefix="coterie-doctor-") as name:
        path = Path(name) / "ledger.jsonl"
        started = time.perf_counter()
        with Ledger(events, path, "checkup") as ledger:
            ledger.charge(0)
            ledger.release(0, "0" * 64)
            took = time.perf_counter() - started
            refused = _refuses(lambda: Ledger(events, path, "checkup").close(), LedgerError)
            refused += _refuses(lambda: ledger.charge(2), OverspentError)
        with Ledger(events, path, "checkup") as ledger:
            kept = ledger.charged == {0} and set(ledger.released) == {0}
        with locked(Path(name)):
            refused += _refuses(lambda: _hold(Path(name)), LedgerError)
    told = f"written and synced in {1000 * took:.0f} ms, read back, {refused} of 3 misuses refused"
    return kept and refused == 3, told


def _hold(folder: Path) -> None:
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
    """Return whether a file can be written into a folder, or into the first that exists above it."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)
