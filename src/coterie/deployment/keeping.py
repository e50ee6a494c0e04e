"""What a site keeps of a finished run: its clients' models and how they do, for itself alone."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from coterie.data.federated import FederatedDataset
from coterie.deployment.agreement import Agreement
from coterie.finished_models import MODELS, write_models
from coterie.privacy.files import write_atomically
from coterie.scores import evaluate
from coterie.summary import json_number, write_metrics
from coterie.tree import Tree


def keep_models(
    agreement: Agreement, site: str, train: FederatedDataset, test: FederatedDataset
) -> Callable[[Path, Tree, Tree], None]:
    """Give what keeps models and scores when a run ends."""
    numbers = agreement.federation.numbers[site]

    def finished(folder: Path, models: Tree, shared: Tree) -> None:
        own_train, own_test = train.only(numbers), test.only(numbers)
        write_models(folder / MODELS, models, own_train.names)

        def rows(ids: np.ndarray) -> Tree:
            return {name: leaf[ids] for name, leaf in models.items()}

        score = evaluate(agreement.run_plan.method.model, rows, own_test)
        write_metrics(folder / "metrics.parquet", own_train, score, None)
        told = {
            "site": site,
            "clients": list(own_train.names),
            "metric": score.metric,
            "value": json_number(score.value),
            "note": "scores of this site's rows; not covered by epsilon, and sent to nobody",
        }
        write_atomically(folder / "site.json", json.dumps(told, indent=2).encode())

    return finished
