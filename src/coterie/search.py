"""Where to look next: settings proposed by Optuna's tree-structured Parzen estimator.

Bergstra, Bardenet, Bengio and Kegl, "Algorithms for Hyper-Parameter Optimization", NIPS 2011. What
was tried is modelled by two densities, of good settings and of the others; proposed is what the
first finds likely and the second does not. The study lives in memory, from a seed, and says
nothing: no file, no log. Optuna is an extra (`pip install coterie[tune]`), loaded on first use.

A proposal follows from the scores before it: on private rows it is covered by no epsilon, and
selection by private runs (`coterie.selection`) draws settings by chance instead.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coterie.core.config import ConfigError


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`; whole ones if both ends are written as whole numbers.

    Tried evenly in the logarithm where both ends are positive and at least a factor of 10 apart,
    else evenly.
    """

    low: float | int
    high: float | int

    def __post_init__(self) -> None:
        ends = (self.low, self.high)
        if not all(math.isfinite(end) for end in ends) or not self.low < self.high:
            raise ConfigError(
                f"range {self.low}..{self.high}: expected two numbers, the smaller one first, such "
                "as 0.01..10"
            )

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are tried."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def logarithmic(self) -> bool:
        """Whether factors are tried evenly, rather than differences."""
        return self.low > 0 and self.high / self.low >= 10


Choice = Sequence[Any] | Range


class Search:
    """Proposes settings and learns from how they did.

    Args:
        grid: Values or a range to choose from, by dotted key.
        seed: Of what is proposed.

    Raises:
        ConfigError: If Optuna is not installed.
    """

    def __init__(self, grid: Mapping[str, Choice], seed: int) -> None:
        try:
            import optuna
        except ImportError as error:
            raise ConfigError(
                "search = 'optuna' needs Optuna, which is not installed: pip install "
                "'coterie[tune]', or list values and search the whole grid"
            ) from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._grid = dict(grid)
        self._failed = optuna.trial.TrialState.FAIL
        sampler = optuna.samplers.TPESampler(seed=seed)
        self._study = optuna.create_study(sampler=sampler, direction="minimize")

    def ask(self) -> tuple[Any, dict[str, Any]]:
        """Propose settings; the first thing given is to be handed back to `tell`."""
        trial = self._study.ask()
        return trial, {key: _suggest(trial, key, choice) for key, choice in self._grid.items()}

    def tell(self, trial: Any, badness: float | None) -> None:
        """Learn how bad proposed settings are; None if they cannot be run at all."""
        if badness is None or not math.isfinite(badness):
            self._study.tell(trial, state=self._failed)
        else:
            self._study.tell(trial, badness)


def _suggest(trial: Any, key: str, choice: Choice) -> Any:
    if not isinstance(choice, Range):
        # By place: values may be lists, which Optuna does not take.
        return choice[trial.suggest_categorical(key, list(range(len(choice))))]
    if choice.whole:
        return trial.suggest_int(key, choice.low, choice.high, log=choice.logarithmic)
    low, high = float(choice.low), float(choice.high)
    # Four digits are enough to tell settings apart, and can be read.
    found = float(f"{trial.suggest_float(key, low, high, log=choice.logarithmic):.4g}")
    return min(max(found, low), high)
