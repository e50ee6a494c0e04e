"""`coterie doctor`: what it prints, and that it detects broken parts."""

import json
import math

import numpy as np
import pytest
import torch

from coterie.cli import doctor
from coterie.cli.doctor import CHECKS, check_all, check_noise, noise_is_off
from coterie.cli.main import main
from coterie.privacy import accounting, mechanisms
from coterie.privacy.profiles import GaussianProfile

pytestmark = pytest.mark.full


def test_a_sound_machine_passes(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and [check["name"] for check in found["checks"]] == list(CHECKS)
    assert found["versions"]["coterie"] and found["versions"]["torch"]
    assert found["devices"]["cores"] >= 1 and found["folders"]["free_bytes"] > 0
    assert found["switches"]["DO_NOT_TRACK"]


def test_a_person_is_told_the_same(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.count("  ok    ") == len(CHECKS) and "FAIL" not in out
    for part in ("versions", "extras", "devices", "switches", "all checks passed"):
        assert part in out


def test_a_missing_extra_is_named_with_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(
        "coterie.cli.doctor.version_of", lambda name: None if name == "mlflow-skinny" else "1"
    )
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["extras"]
    assert found["track"]["install"] == "pip install 'coterie[track]'"
    assert found["report"]["installed"] and found["report"]["install"] is None


NORMALS = mechanisms.normals


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("variance", lambda entropy, count: 0.98 * NORMALS(entropy, count)),
        ("mean", lambda entropy, count: NORMALS(entropy, count) + 0.02),
        ("shape", lambda entropy, count: np.sign(NORMALS(entropy, count))),
        ("tails", lambda entropy, count: np.clip(NORMALS(entropy, count), -3.5, 3.5)),
        ("neighbours", lambda entropy, count: np.repeat(NORMALS(entropy, count // 2), 2)),
        ("variance", lambda entropy, count: np.zeros(count)),
    ],
)
def test_broken_noise_is_caught_and_named(monkeypatch, name, broken):
    monkeypatch.setattr(mechanisms, "normals", broken)
    passed, found = check_noise()
    assert not passed and name in found


def test_a_failed_check_is_printed_and_fails_the_command(monkeypatch, capsys):
    monkeypatch.setattr(mechanisms, "normals", lambda entropy, count: np.zeros(count))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  noise" in out and "FAILED: do not run anything private" in out


def test_noise_off_the_grid_is_caught(monkeypatch):
    def unrounded(self, total, entropy):
        scale = self.noise_multiplier * self.bound
        noise = scale * torch.from_numpy(NORMALS(entropy, total["w"].numel()))
        return {"w": total["w"] + noise}

    monkeypatch.setattr(mechanisms.GaussianSum, "perturb", unrounded)
    passed, found = check_noise()
    assert not passed and "grid" in found


def test_sound_noise_is_hardly_ever_called_broken():
    # The statistics over their limits, by seeds: none beyond 1 in 200 tries, and not all near 0.
    worst = 0.0
    for seed in range(200):
        noise = np.random.default_rng(seed).standard_normal(20_000)
        assert not noise_is_off(noise)
        worst = max(worst, abs(noise.mean()) * math.sqrt(20_000))
    assert 2 < worst < 5


def test_a_clip_that_lets_too_much_through_is_caught(monkeypatch):
    clip = mechanisms.GaussianSum.clip

    def loose(self, rows):
        return clip(mechanisms.GaussianSum(1.5 * self.bound, self.noise_multiplier), rows)

    monkeypatch.setattr(mechanisms.GaussianSum, "clip", loose)
    assert not doctor.check_sum()[0]


@pytest.mark.parametrize("check", ["closed-form accounting", "calibration", "loss distributions"])
def test_an_accountant_that_says_too_little_is_caught(monkeypatch, check):
    honest = accounting.profile

    def flattering(events, participation, relation):
        found = honest(events, participation, relation)
        if participation.visible:
            return found
        return GaussianProfile(0.1)

    monkeypatch.setattr(accounting, "profile", flattering)
    assert not CHECKS[check]()[0]


def test_entropy_that_repeats_is_caught(monkeypatch):
    words = np.arange(1 << 14, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    monkeypatch.setattr(
        "coterie.privacy.entropy.SystemEntropy.words", lambda self, count: words[:count]
    )
    assert not doctor.check_entropy()[0]


def test_a_lock_that_does_not_hold_is_caught(monkeypatch):
    monkeypatch.setattr("coterie.privacy.ledger.fcntl.flock", lambda *args: None)
    passed, found = doctor.check_ledger()
    assert not passed and "1 of 3" in found


def test_a_check_that_breaks_has_failed_and_the_others_go_on(monkeypatch):
    def broken():
        raise OSError("no space left")

    monkeypatch.setitem(CHECKS, "ledger", broken)
    found = {check.name: check for check in check_all()}
    assert not found["ledger"].passed and "no space left" in found["ledger"].found
    assert all(check.passed for name, check in found.items() if name != "ledger")
