"""What a site keeps of a finished run: its clients' models and how they do, for itself alone.

In the site's folder of the run lie, beside the state between rounds:

- `plan.toml`, `federation.toml`, `shared.npz`, `guarantee.json`: what all have agreed on, what all
  share, and what the plan promises; the certificate of the posts is the coordinator's
- `models/`: the models of this site's clients; `coterie predict` and `coterie export` read them
- `scaling.npz`: where rows are scaled by each client's own, these clients' means and deviations, so
  that models can be used without the rows that they were trained on
- `data.json`: a fingerprint of the site's training rows, and public facts of them
- `metrics.parquet`, `result.json`: how the models do on this site's test rows (`coterie report`)
- `site.json`: whose folder it is; written last

All but the first four are private to the site. Nothing of it is sent to anybody. A run that was
told to finish twice keeps the models that it has: a second draw of a client's own coins would make
others.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.config import to_table, to_toml
from coterie.data.federated import FederatedDataset
from coterie.data.scaling import Moments
from coterie.deployment.agreement import FEDERATION, PLAN, Agreement, promise
from coterie.deployment.finish import summary_of
from coterie.evaluation.baselines import score_local
from coterie.evaluation.metrics import Score, json_number, write_metrics
from coterie.evaluation.score import evaluate
from coterie.finished_models import MODELS, SCALING, write_models
from coterie.privacy.files import replacing, write_atomically
from coterie.recognition import facts_of, recognise_model
from coterie.summary import keep_shared, keep_summary
from coterie.tree import Tree
from coterie.wire import digest

SITE = "site.json"
_NOTE = "scores of this site's rows; not covered by epsilon, and sent to nobody"


def keep_models(
    agreement: Agreement,
    site: str,
    train: FederatedDataset,
    test: FederatedDataset,
    moments: Moments | None = None,
    notices: Sequence[str] = (),
) -> Callable[[Path, Tree, Tree], None]:
    """Return what keeps models and scores when a run ends.

    Args:
        agreement: Plan and federation.
        site: Its name.
        train: The site's training rows, shaped like the whole federation.
        test: Its test rows, likewise.
        moments: Means and deviations of its clients, where rows are scaled by each client's own.
        notices: Hints on its rows.
    """
    numbers = agreement.federation.numbers[site]
    own_train, own_test = train.only(numbers), test.only(numbers)

    def finished(folder: Path, models: Tree, shared: Tree) -> None:
        told = digest({name: leaf.cpu().numpy() for name, leaf in shared.items()})
        if is_kept(folder, told):
            return
        started = time.perf_counter()
        write_models(folder / MODELS, models, own_train.names)
        keep_shared(folder, shared)
        _keep_agreement(folder, agreement)
        _keep_rows(folder, own_train, moments)
        recognise_model(folder, agreement.run_plan.method.model, agreement.federation.spec)
        score, local = _scores(agreement, models, own_train, own_test)
        write_metrics(folder / "metrics.parquet", own_train, score, local)
        summary = _summary(agreement, site, score, local, time.perf_counter() - started)
        keep_summary(folder, {**summary, "notices": list(notices), "run": str(folder)})
        about = {
            "site": site,
            "clients": list(own_train.names),
            "metric": score.metric,
            "value": json_number(score.value),
            "shared": told,
            "note": _NOTE,
        }
        write_atomically(folder / SITE, json.dumps(about, indent=2).encode())

    return finished


def is_kept(folder: Path, shared: str) -> bool:
    """Return whether models of this last shared tree are kept already."""
    try:
        kept = json.loads((folder / SITE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(kept, dict) and kept.get("shared") == shared


def _keep_agreement(folder: Path, agreement: Agreement) -> None:
    write_atomically(folder / PLAN, to_toml(to_table(agreement.run_plan)).encode())
    write_atomically(folder / FEDERATION, to_toml(to_table(agreement.federation)).encode())
    text = json.dumps(promise(agreement).to_json(), indent=2, allow_nan=False)
    write_atomically(folder / "guarantee.json", text.encode())


def _keep_rows(folder: Path, train: FederatedDataset, moments: Moments | None) -> None:
    """Keep what reads other rows as these were read; never the rows."""
    told = {"fingerprint": train.fingerprint(), "facts": facts_of(train)}
    write_atomically(folder / "data.json", json.dumps(told).encode())
    if moments is not None:
        with replacing(folder / SCALING) as file:
            np.savez(file, allow_pickle=False, center=moments[0], scale=moments[1])


def _scores(
    agreement: Agreement, models: Tree, train: FederatedDataset, test: FederatedDataset
) -> tuple[Score, Score | None]:
    """Score the models on the site's own test rows, and beside them learning alone."""
    run_plan = agreement.run_plan

    def rows(ids: NDArray[np.int64]) -> Tree:
        return {name: leaf[ids] for name, leaf in models.items()}

    score = evaluate(run_plan.method.model, rows, test)
    if not run_plan.compare_with_local or "local" not in run_plan.baselines:
        return score, None
    try:
        return score, score_local(run_plan.method, train, test)
    except (ValueError, RuntimeError, ArithmeticError):
        return score, None  # the models are made: what stands beside them must not cost them


def _summary(
    agreement: Agreement, site: str, score: Score, local: Score | None, seconds: float
) -> dict[str, Any]:
    """Return the summary of a site: that of the run, with scores of its own clients."""
    summary = summary_of(agreement, promise(agreement), seconds, score, local)
    own = len(agreement.federation.sites[site].clients)
    deployment = {**summary["deployment"], "site": site}
    not_covered = "metrics of this site's rows, and any tuning done with them"
    return {**summary, "clients": own, "deployment": deployment, "not_covered": not_covered}
