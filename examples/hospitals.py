"""Patients of 60 hospitals, made up, in the shape in which tables arrive.

`python hospitals.py` writes two files into the current folder:

    patients.csv      14,000 stays with the outcome `readmitted`
    new_patients.csv  180 stays without it

Categories are text, values are missing, one column is constant, one is free text, and the new file
has a ward that no training row has. Hospitals differ: each has its own model around a common one.
Both files are the same on every machine.
"""

import csv
import math
from datetime import date, timedelta
from pathlib import Path

import numpy as np

HOSPITALS, STAYS, NEW = 60, 14_000, 180
_WARDS = {"cardiology": 0.5, "surgery": -0.4, "oncology": 0.7, "orthopaedics": -0.7}
_SEXES = ("female", "male")
_NOTES = ("walks with a stick", "lives alone", "speaks little", "family visits", "asked for a call")
_FIRST = date(2024, 1, 1)


def main(folder: Path = Path()) -> None:
    """Write both files."""
    draw = np.random.default_rng(20)
    sizes = _sizes(draw)
    slopes = np.array([1.2, 1.0, 0.8]) + draw.normal(0, 0.2, (HOSPITALS, 3))
    levels = draw.normal(-0.6, 0.5, HOSPITALS)
    hospitals = np.repeat(np.arange(HOSPITALS), sizes)
    draw.shuffle(hospitals)
    rows = [_stay(draw, at, h, slopes[h], levels[h]) for at, h in enumerate(hospitals)]
    _write(folder / "patients.csv", rows)
    visits = np.arange(NEW) % HOSPITALS
    new = [_stay(draw, STAYS + at, h, slopes[h], levels[h]) for at, h in enumerate(visits)]
    for at, row in enumerate(new):
        del row["readmitted"]
        if at % 25 == 7:
            row["ward"] = "neurology"
    _write(folder / "new_patients.csv", new)


def _sizes(draw: np.random.Generator) -> np.ndarray:
    """Return how many stays each hospital has: a few large, many small."""
    share = draw.lognormal(0, 1.3, HOSPITALS)
    sizes = np.maximum(24, np.floor(share / share.sum() * STAYS)).astype(int)
    sizes[np.argmax(sizes)] += STAYS - sizes.sum()
    return sizes


def _stay(
    draw: np.random.Generator, at: int, hospital: int, slopes: np.ndarray, level: float
) -> dict[str, object]:
    age, days = draw.normal(64, 13), 1 + draw.gamma(2, 2.5)
    creatinine = math.exp(draw.normal(0, 0.3))
    ward = str(draw.choice(list(_WARDS), p=[0.35, 0.3, 0.15, 0.2]))
    numbers = np.array([(age - 64) / 13, (days - 6) / 3.5, (creatinine - 1) / 0.3])
    odds = level + slopes @ numbers + _WARDS[ward]
    admitted = _FIRST + timedelta(days=int(draw.integers(0, 540)))
    note = f"{draw.choice(_NOTES)}; bed {draw.integers(1, 900)}"
    return {
        "patient_id": f"P{at + 100_000}",
        "hospital": f"H{hospital + 1:02}",
        "admitted": admitted.isoformat(),
        "age": _maybe(draw, 0.02, f"{age:.0f}"),
        "sex": _maybe(draw, 0.03, str(draw.choice(_SEXES))),
        "ward": ward,
        "days": f"{days:.0f}",
        "creatinine": _maybe(draw, 0.14, f"{creatinine:.2f}"),
        "country": "NL",
        "note": note,
        "readmitted": "yes" if draw.random() < 1 / (1 + math.exp(-odds)) else "no",
    }


def _maybe(draw: np.random.Generator, gap: float, value: str) -> str:
    """Return a value, or a gap with this probability."""
    return str(draw.choice(["", "NA"])) if draw.random() < gap else value


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    main()
