"""What the coordinator's run folder holds when a run is done: posts, account, certificate.

The same files as those of a simulated run (`coterie.run`), less all that belongs to clients: their
models, their scores and their rows stay at the sites. So `coterie verify`, `coterie report` and
`coterie join` read it like any other. Beside them lie

- `federation.toml`: sites, clients, public keys, trust; hashed into the certificate
- `coordinator.json`: what the coordinator remembers between rounds (private: who was drawn)

**What is told.** Under a hidden cohort nothing that is for others says how many answered a round,
or who: not the summary, not the page, not the certificate, and not how long the run took, which
follows from whom it waited for. `log.jsonl` and `coordinator.json` say it, and are private.

A crash between two files leaves a run without result.json: whoever goes on with it makes the same
posts' files again, and asks for no round. Tests: tests/deployment/test_finish.py.
"""

import json
import math
from pathlib import Path
from typing import Any

from coterie.config import ConfigError
from coterie.deployment.agreement import Agreement
from coterie.deployment.onlookers import caveats, deployment_told
from coterie.evaluation.metrics import Score, score_json
from coterie.log import Log
from coterie.privacy.accounting import Guarantee
from coterie.privacy.billboard import Billboard
from coterie.privacy.files import write_atomically
from coterie.run_plan import advice_of
from coterie.summary import (
    TUNING,
    keep_certificate,
    keep_shared,
    keep_summary,
    noise_told,
    promised,
)
from coterie.tree import Tree

RESULT = "result.json"
_STAYED = "scores of clients' models stayed at the sites: no reference stands beside them"
_UNCOVERED = "how long rounds take, and who answers them, is not covered by epsilon"


def finish(
    folder: Path,
    agreement: Agreement,
    billboard: Billboard,
    shared: Tree,
    guarantee: Guarantee,
    log: Log,
    seconds: float,
) -> dict[str, Any]:
    """Write what a finished run leaves behind; result.json comes last, and marks it as done."""
    summary = summary_of(agreement, guarantee, seconds)
    summary["run"] = str(folder)
    billboard.pack()
    log.note("packed")
    keep_shared(folder, shared)
    keep_facts(folder, agreement)
    released = billboard.ledger.released
    keep_certificate(folder, summary, guarantee, agreement.plan.method.kind, released, log)
    keep_summary(folder, summary)
    return summary


def finished_summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a run that is done; None of one that is not.

    Raises:
        ConfigError: If it is done, and its files are damaged.
    """
    path = folder / RESULT
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        Guarantee.from_json(json.loads((folder / "guarantee.json").read_text(encoding="utf-8")))
        return {**summary, "run": str(folder)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not path.exists():
            return None
        raise ConfigError(
            f"{folder}: the run is done, but {RESULT} or guarantee.json is missing or damaged "
            f"({error!r}); restore them, or remove {RESULT} to have both made again of the posts"
        ) from error


def summary_of(
    agreement: Agreement,
    guarantee: Guarantee,
    seconds: float,
    score: Score | None = None,
    local: Score | None = None,
) -> dict[str, Any]:
    """Return the summary of a deployed run: the keys of a simulated one, null where none apply.

    Args:
        agreement: Plan and federation.
        guarantee: What is promised.
        seconds: How long it took; not told under a hidden cohort.
        score: Of a site's own clients, for the site alone; the coordinator has none.
        local: The same of learning alone.
    """
    plan, federation, run_plan = agreement.plan, agreement.federation, agreement.run_plan
    advice = advice_of(run_plan, federation.spec)
    noised = plan.posts > 0 and guarantee.epsilon < math.inf
    hidden = plan.hides_cohort(federation.spec.clients)
    return {
        "method": plan.method.title,
        "data": run_plan.data.name,
        "clients": federation.spec.clients,
        "task": federation.task,
        "rounds": plan.posts,
        **promised(guarantee),
        **noise_told(plan, federation.spec),
        **score_json(score, local),
        "newcomers": None,
        "noise_to_signal": None,
        "not_covered": _UNCOVERED,
        "tuning": TUNING[run_plan.tuned],
        "caveats": [
            *plan.method.caveats(noised),
            *_claimed(guarantee),
            *caveats(guarantee, federation),
        ],
        "notices": [],
        "seconds": None if hidden and guarantee.epsilon < math.inf else round(seconds, 3),
        "verdict": None if advice is None else advice.to_json(),
        "chosen": run_plan.chosen,
        "references": [],
        "references_missing": [_STAYED] if score is None else [],
        "gap": None,
        "deployment": deployment_told(guarantee, federation, hidden=hidden),
    }


def keep_facts(folder: Path, agreement: Agreement) -> None:
    """Keep what newcomers need to know of rows: public facts of the federation."""
    spec = agreement.federation.spec
    # Which columns there are is for the plan's [data.source] to say: no rows were seen here.
    facts = {"shape": spec.shape, "outputs": spec.outputs, "task": spec.task, "columns": []}
    write_atomically(folder / "data.json", json.dumps({"facts": facts}).encode())


def _claimed(guarantee: Guarantee) -> list[str]:
    """Say of a reproduction that it is one, wherever its epsilon is written."""
    return [] if guarantee.claimed_epsilon is None else [guarantee.statement().splitlines()[0]]
