"""Which data a run is about: where they come from, who and what is left out, what is held out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from coterie.core.rng import derive_key
from coterie.data.catalogue import NAMES, open_named
from coterie.data.embedded import DISTRICTS_TEST_ROWS
from coterie.data.federated import FederatedDataset
from coterie.data.formats import load
from coterie.data.scaling import standardise_clients
from coterie.data.source import Source

DEFAULT_TEST_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class DataChoice:
    """Which data, how to read it, and what is held out.

    Attributes:
        name: A name of the catalogue, or a path to a file.
        options: Options of a named data set, e.g. `clients = 50` for digits.
        source: How to read a file.
        test: Rows held out in every client: a share, or a number of rows. None takes the source's
            own split, else 2 rows for districts, else a quarter.
        split_seed: Seed of a random split.
        standardise: "client" scales every client's features by its own training rows.
        clients: Take the first so many clients; None takes all.
        rows: Training rows kept of each client, at random by split_seed, after the split; None
            keeps all. The test rows stay whole.
        validation: Rows of each client (a share, or a number) that are taken from its training
            rows and only scored on, to choose settings by (`coterie.tune.charge`); None for none.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    source: Source = field(default_factory=Source)
    test: int | float | None = None
    split_seed: int = 0
    standardise: Literal["none", "client"] = "none"
    clients: int | None = None
    rows: int | None = None
    validation: int | float | None = None

    def __post_init__(self) -> None:
        if self.split_seed < 0:
            raise ValueError(f"split_seed = {self.split_seed}: expected a whole number >= 0")
        for name, value in (("clients", self.clients), ("rows", self.rows)):
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}: expected a whole number >= 1; or leave it out")
        if self.name in NAMES and self.source != Source():
            raise ValueError(
                f"{self.name} is made by name: options of files (--target, --levels, ...) do not "
                "apply to it; leave them out"
            )
        if self.name not in NAMES and self.options:
            raise ValueError(
                f"{self.name} is a file: --option {', '.join(self.options)} belongs to data made "
                "by name; leave it out"
            )

    def open(self) -> FederatedDataset:
        """Load all rows of the clients asked for."""
        path = Path(self.name)
        if self.name in NAMES or not (path.suffix or path.exists()):
            data = open_named(self.name, **dict(self.options))
            return data if self.clients is None else data.first(self.clients)
        return load(self.name, self.source, clients=self.clients)

    def split(
        self, data: FederatedDataset | None = None
    ) -> tuple[FederatedDataset, FederatedDataset]:
        """Load, split inside clients, thin out and standardise if asked: (training, test rows).

        `data` are rows that are loaded already, such as those of one site of a federation.
        """
        train, test = self._split(self.open() if data is None else data)
        return self._scale(train if self.validation is None else self._hold_back(train)[0], test)

    def split_validation(self) -> tuple[FederatedDataset, FederatedDataset]:
        """Return the training rows of `split`, and those that are held back to choose by."""
        return self._scale(*self._hold_back(self._split(self.open())[0]))

    def _hold_back(self, train: FederatedDataset) -> tuple[FederatedDataset, FederatedDataset]:
        if self.validation is None:
            raise ValueError("no validation rows are held back: set data.validation, such as 0.25")
        # Other coins than those of the test rows, or clients' last rows would be drawn in step.
        return train.split(self.validation, derive_key("validation", self.split_seed))

    def _split(self, data: FederatedDataset) -> tuple[FederatedDataset, FederatedDataset]:
        if self.test is None and data.source_split is not None:
            train, test = data.split_by_source()
        else:
            usual = DISTRICTS_TEST_ROWS if self.name == "districts" else DEFAULT_TEST_SHARE
            train, test = data.split(usual if self.test is None else self.test, self.split_seed)
        if self.rows is not None:
            train = train.at_most(self.rows, self.split_seed)
        return train, test

    def _scale(
        self, train: FederatedDataset, test: FederatedDataset
    ) -> tuple[FederatedDataset, FederatedDataset]:
        if self.standardise == "client":
            train, scaled = standardise_clients(train, test)
            assert scaled is not None
            return train, scaled
        return train, test
