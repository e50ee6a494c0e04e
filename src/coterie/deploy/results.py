"""What the coordinator and the sites store when a run is finished.

**The coordinator's run folder** has the files of a simulated run (`coterie.runs.run`), without
everything that belongs to clients: their models, scores and rows stay at the sites. `coterie
verify`, `coterie report` and `coterie onboard` read it like any other. Two files are added:

- `federation.toml`: sites, clients, public keys, trust; its hash is in the certificate
- `coordinator.json`: the state of the coordinator between rounds (private: it has the cohort)

Under a hidden cohort no file that is for others reveals who answered a round, or how many: neither
the summary nor the report nor the certificate, nor the duration of the run, which depends on the
sites that it waited for. `log.jsonl` and `coordinator.json` have this, and are private. After a
crash between two files a run has no result.json; resuming it writes the same files from the
releases, and asks for no round.

**A site's folder of the run** has, besides the state between rounds:

- `plan.toml`, `federation.toml`, `shared.npz`, `guarantee.json`: the agreement, the shared tree and
  the guarantee of the plan; the coordinator has the certificate of the releases
- `models/`: the models of this site's clients, with what prepares their rows (`scaling.npz`), so
  that `coterie predict` and `coterie export` need no training rows
- `data.json`: a fingerprint of the site's training rows, and public facts about them
- `metrics.parquet`, `result.json`: scores on this site's test rows (`coterie report`)
- `site.json`: the site; written last

All but the first four are private to the site, and none is sent. A run that is finished twice keeps
its first models: a second draw from a client's random stream would make others.
Tests: tests/deploy/test_results.py.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.core.config import ConfigError, to_table, to_toml
from coterie.core.files import write_atomically
from coterie.core.tree import Tree
from coterie.data.federated import FederatedDataset
from coterie.deploy.federation import FEDERATION, PLAN, Agreement, caveats, deployment_facts
from coterie.deploy.messages import digest
from coterie.engine.models import MODELS, write_models
from coterie.evaluation.baselines import score_local
from coterie.evaluation.metrics import Score, json_number, score_json, write_metrics
from coterie.evaluation.predict import variances
from coterie.evaluation.score import evaluate
from coterie.planning.rules import advice_for
from coterie.privacy.billboard import Billboard
from coterie.privacy.guarantee import Guarantee
from coterie.privacy.reviewer import review
from coterie.runs.budget import read_spent
from coterie.runs.certificate import keep_certificate
from coterie.runs.folder import check_model, facts_of, keep_shared, keep_summary
from coterie.runs.log import Log
from coterie.runs.summary import TUNING, for_reviewer, noise_summary, promised

RESULT, SITE = "result.json", "site.json"
_AT_SITES = "Models of clients and their scores stay at the sites."
_NO_BASELINES = "scores stay at the sites, so there are no baselines"
_NOT_COVERED = "the duration of rounds, and which sites answer, are not covered by epsilon"
_SITE_NOT_COVERED = "metrics of this site's rows, and any tuning done with them"
_SITE_NOTE = "scores on this site's rows; not covered by epsilon, and not sent to anyone"


def finish(
    folder: Path,
    agreement: Agreement,
    billboard: Billboard,
    shared: Tree,
    log: Log,
    seconds: float,
) -> dict[str, Any]:
    """Write the files of a finished run; result.json comes last, and marks it as finished."""
    summary = {**summary_of(agreement, seconds), "run": str(folder)}
    summary["reviewer"] = for_reviewer(agreement.guarantee, billboard)
    billboard.pack()
    log.note("packed")
    keep_shared(folder, shared)
    # What new clients need. Columns are in the plan's [data.source]: the coordinator saw no rows.
    spec = agreement.federation.spec
    facts = {"shape": spec.shape, "outputs": spec.outputs, "task": spec.task, "columns": []}
    write_atomically(folder / "data.json", json.dumps({"facts": facts}).encode())
    keep_certificate(folder, summary, agreement.guarantee, agreement.plan, billboard, log)
    keep_summary(folder, summary)
    return summary


def finished_summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a finished run, None for an unfinished one."""
    path = folder / RESULT
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        Guarantee.from_json(json.loads((folder / "guarantee.json").read_text(encoding="utf-8")))
        return {**summary, "run": str(folder)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not path.exists():
            return None
        raise ConfigError(
            f"{folder}: the run is finished, but {RESULT} or guarantee.json is missing or damaged "
            f"({error!r}); restore them, or remove {RESULT} to write both again from the releases"
        ) from error


def summary_of(
    agreement: Agreement, seconds: float, score: Score | None = None, local: Score | None = None
) -> dict[str, Any]:
    """Return the summary of a deployed run: the keys of a simulated one, null where none apply.

    The duration is left out under a hidden cohort. The scores of a site's own clients, and of the
    local baseline, are for the site only.
    """
    plan, federation, guarantee = agreement.plan, agreement.federation, agreement.guarantee
    advice = advice_for(plan, agreement.spec)
    private = guarantee.epsilon < math.inf
    hidden = plan.hides_cohort(federation.spec.clients)
    claimed = guarantee.claimed_epsilon is not None
    return {
        "method": str(plan.method),
        "data": plan.data.name,
        "clients": federation.spec.clients,
        "task": federation.task,
        "rounds": plan.posts,
        **promised(guarantee),
        "reviewer": review(guarantee),
        **noise_summary(plan, agreement.spec),
        **score_json(score, local),
        "newcomers": None,
        "noise_to_signal": None,
        "not_covered": _NOT_COVERED,
        "tuning": TUNING[plan.tuned],
        "caveats": [
            *plan.method.notes(private=plan.posts > 0 and private).caveats,
            # A reproduction of a published result is marked wherever its epsilon is written.
            *(guarantee.statement().splitlines()[:1] if claimed else ()),
            *caveats(guarantee, federation),
            *([_AT_SITES] if score is None else []),
        ],
        "notices": [],
        "seconds": None if hidden and private else round(seconds, 3),
        "verdict": None if advice is None else advice.to_json(),
        "chosen": plan.chosen,
        "references": [],
        "references_missing": [_NO_BASELINES] if score is None else [],
        "data_used": None,  # the rows are at the sites
        "register": None,  # each site has its own
        "gap": None,
        "deployment": deployment_facts(guarantee, federation, hidden=hidden),
    }


def save_models(
    agreement: Agreement,
    site: str,
    train: FederatedDataset,
    test: FederatedDataset,
    notices: Sequence[str] = (),
) -> Callable[[Path, Tree, Tree], None]:
    """Return a function that stores models and scores at a site when a run ends.

    Training and test rows are shaped like the whole federation.
    """
    ids = agreement.federation.client_ids[site]
    own_train, own_test = train.only(ids), test.only(ids)

    def finished(folder: Path, models: Tree, shared: Tree) -> None:
        version = digest({name: leaf.cpu().numpy() for name, leaf in shared.items()})
        if is_saved(folder, version):
            return
        started = time.perf_counter()
        kept = {**own_train.scaling, **variances(agreement.plan.method, shared, own_train)}
        write_models(folder / MODELS, models, own_train.names, kept)
        keep_shared(folder, shared)
        _save_facts(folder, agreement, own_train)
        check_model(folder, agreement.plan.method.model, agreement.spec)
        score, local = _scores(agreement, models, own_train, own_test)
        write_metrics(folder / "metrics.parquet", own_train, score, local)
        seconds = time.perf_counter() - started
        summary = summary_of(agreement, seconds, score, local)
        summary |= {"clients": len(ids), "not_covered": _SITE_NOT_COVERED}
        summary |= {"deployment": {**summary["deployment"], "site": site}}
        summary |= {"register": read_spent(folder)}
        keep_summary(folder, {**summary, "notices": list(notices), "run": str(folder)})
        about = {
            "site": site,
            "clients": list(own_train.names),
            "metric": score.metric,
            "value": json_number(score.value),
            "shared": version,
            "note": _SITE_NOTE,
        }
        write_atomically(folder / SITE, json.dumps(about, indent=2).encode())

    return finished


def is_saved(folder: Path, shared: str) -> bool:
    """Return whether models of the shared tree with this digest are stored already."""
    try:
        about = json.loads((folder / SITE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(about, dict) and about.get("shared") == shared


def _save_facts(folder: Path, agreement: Agreement, train: FederatedDataset) -> None:
    """Store the agreement, and what is needed to read other rows in the same way; never rows."""
    write_atomically(folder / PLAN, to_toml(to_table(agreement.plan)).encode())
    write_atomically(folder / FEDERATION, agreement.federation.to_toml().encode())
    text = json.dumps(agreement.guarantee.to_json(), indent=2, allow_nan=False)
    write_atomically(folder / "guarantee.json", text.encode())
    facts = {"fingerprint": train.fingerprint(), "facts": facts_of(train)}
    write_atomically(folder / "data.json", json.dumps(facts).encode())


def _scores(
    agreement: Agreement, models: Tree, train: FederatedDataset, test: FederatedDataset
) -> tuple[Score, Score | None]:
    """Return the scores of the models and of the local baseline on the site's test rows."""
    plan = agreement.plan

    def rows(ids: NDArray[np.int64]) -> Tree:
        return {name: leaf[ids] for name, leaf in models.items()}

    score = evaluate(plan.method.model, rows, test)
    if not plan.compare_with_local or "local" not in plan.baselines:
        return score, None
    try:
        return score, score_local(plan.method, train, test)
    except (ValueError, RuntimeError, ArithmeticError):
        return score, None  # a failed baseline must not lose the models
