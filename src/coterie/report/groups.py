"""Runs that differ in their seed alone, taken together: means, errors over clients and seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coterie.privacy.guarantee import round_up
from coterie.report.averages import average
from coterie.report.elements import listed
from coterie.report.finished import FinishedRun

APART = 8
"""A page of more runs than this speaks of groups, and shows a few runs one by one."""
_ONE_BY_ONE = 6


@dataclass(frozen=True)
class Group:
    """Runs of one method at one epsilon on one data set."""

    label: str
    runs: tuple[FinishedRun, ...]

    @property
    def first(self) -> FinishedRun:
        """The run that stands for the others where one is shown."""
        return self.runs[0]

    def mean(self, key: str) -> float:
        """Return the mean over runs of a number of the summary."""
        return float(np.mean([run.number(key) for run in self.runs]))

    def error(self, key: str, own: str) -> float:
        """Return the standard error over clients and runs; `own` is that of one run, over clients."""
        values, errors = ([run.number(name) for run in self.runs] for name in (key, own))
        return average(values, errors)[1]

    @property
    def badness(self) -> float:
        """Something that is small for a good metric; infinite where there is none."""
        value = self.mean("value") * (1 if self.first.result["metric"] == "nmse" else -1)
        return math.inf if math.isnan(value) else value


def group(runs: Sequence[FinishedRun]) -> list[Group]:
    """Take runs together that differ in their seed alone."""
    found: dict[tuple[str, ...], list[FinishedRun]] = {}
    for run in runs:
        spent = round_up(run.epsilon) if run.shares else "0"
        of = str(run.result["data"]), run.result["metric"]
        found.setdefault((run.name, spent, *of, run.settings), []).append(run)
    methods = [key[0] for key in found]
    several = len({key[2] for key in found}) > 1
    labels = [_label(key, methods.count(key[0]) > 1, several) for key in found]
    # The same method at the same epsilon with other settings: told apart by a number.
    numbered = [
        f"{label} ({labels[: place + 1].count(label)})" if labels.count(label) > 1 else label
        for place, label in enumerate(labels)
    ]
    return [
        Group(label, tuple(together))
        for label, together in zip(numbered, found.values(), strict=True)
    ]


def _label(key: tuple[str, ...], by_epsilon: bool, by_data: bool) -> str:
    name, spent, data, *_ = key
    label = f"{name} at epsilon {spent}" if by_epsilon and spent != "0" else name
    return f"{label} on {data}" if by_data else label


def are_grouped(runs: Sequence[FinishedRun]) -> bool:
    """Return whether rows are groups: of many runs, and of a comparison, whose own table is."""
    return len(runs) > APART or any(run.entry for run in runs)


def rows_of(runs: Sequence[FinishedRun]) -> list[Group]:
    """Return what has a row of its own: runs, or groups of runs."""
    if are_grouped(runs):
        return group(runs)
    return [Group(run.label, (run,)) for run in runs]


def named(some: Sequence[FinishedRun], runs: Sequence[FinishedRun]) -> str:
    """Name some of a page's runs; those that make up a group by its name."""
    if not are_grouped(runs):
        return listed([run.label for run in some])
    meant, labels = {id(run) for run in some}, []
    for one in group(runs):
        inside = [run.label for run in one.runs if id(run) in meant]
        labels += [one.label] if len(inside) == len(one.runs) else inside
    return listed(labels)


def one_by_one(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    """Choose the runs that are shown one by one: of many, the first of each of the best groups.

    Those with a budget come before those without.
    """
    if len(runs) <= APART:
        return list(runs)
    best = sorted(group(runs), key=lambda one: (not one.first.private, one.badness))
    kept = {id(one.first) for one in best[:_ONE_BY_ONE]}
    return [run for run in runs if id(run) in kept]
