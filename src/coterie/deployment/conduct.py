"""A run of a deployment, at the coordinator: from the agreement to its run folder."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from coterie.core.config import to_table, to_toml
from coterie.core.files import explain_disk_errors, write_atomically
from coterie.core.signals import as_interrupt
from coterie.core.tree import Tree
from coterie.deployment.agreement import FEDERATION, Agreement, promise
from coterie.deployment.certificates import load_private
from coterie.deployment.finish import finish, finished_summary
from coterie.engines.conducting import Conduct, Note, ShortRoundError, Tally, Transport
from coterie.engines.coordinator import Coordinator
from coterie.privacy.ledger import locked
from coterie.run.folder import check_model, claim
from coterie.run.log import Log

_TROUBLE = ("silent", "refused", "failed", "scaled", "zeroed")


def conduct_run(
    agreement: Agreement,
    folder: Path,
    key: Path,
    transport: Callable[[Note], Transport],
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Conduct a run, or go on with the one in the folder; give its summary.

    A run that is done stays as it is: sites that missed its end are told of it, nothing else.

    Args:
        agreement: Plan and federation.
        folder: The run folder.
        key: The coordinator's private key.
        transport: Makes what carries letters, given where to note what it meets.
        say: Takes a line a round, for whoever watches.
    """
    started = time.perf_counter()
    folder = folder.resolve()
    with as_interrupt(), explain_disk_errors(folder), locked(folder):
        claim(folder, agreement.run_plan)
        _keep_federation(folder, agreement)
        check_model(folder, agreement.run_plan.method.model, agreement.federation.spec)
        log = Log(folder / "log.jsonl")
        log.open()
        log.path.chmod(0o600)  # it says who answered
        with _noted(log):
            done = finished_summary(folder)
            coordinator = Coordinator(
                Conduct(
                    plan=agreement.plan,
                    federation=agreement.federation,
                    agreement=agreement.digest,
                    folder=folder,
                    key=load_private(key),
                    transport=transport(log.note),
                    note=log.note,
                )
            )
            shared = _do_rounds(coordinator, log, say)
            if done is not None:
                return done
            seconds = time.perf_counter() - started
            billboard, promised = coordinator.billboard, promise(agreement)
            return finish(folder, agreement, billboard, shared, promised, log, seconds)


def _do_rounds(coordinator: Coordinator, log: Log, say: Callable[[str], None]) -> Tree:
    """Do what rounds are to do; where none are, sites that are away do not keep it from ending."""
    done = coordinator.billboard.next >= coordinator.plan.posts

    def observe(number: int, shared: Tree, tally: Tally) -> None:
        told: dict[str, Any] = tally.told()
        log.note("round", round=number + 1, **told)
        rounds, hidden = coordinator.plan.posts, coordinator.is_hidden
        say(round_line(number + 1, rounds, told, hidden=hidden))

    try:
        return coordinator.run(observe)
    except ShortRoundError as error:
        if not done:
            raise
        log.note("taken_home", sites=0, names=[], why=str(error)[:500])
        return coordinator.shared


def round_line(number: int, rounds: int, told: Mapping[str, Any], *, hidden: bool) -> str:
    """Say what became of a round, in a line; rounds are counted from 1.

    Under a hidden cohort no counts: Flower keeps what is said, for whoever may ask its SuperLink.
    """
    if hidden:
        return f"round {number} of {rounds} is posted"
    if told.get("void"):
        return f"round {number} of {rounds}: void, posted without contributions"
    trouble = ", ".join(f"{told[name]} {name}" for name in _TROUBLE if told.get(name))
    line = f"round {number} of {rounds}: {told['answered']} of {told['asked']} clients answered"
    return f"{line} (sites: {trouble})" if trouble else line


@contextmanager
def _noted(log: Log) -> Iterator[None]:
    """Note in the log what ends a run before its time."""
    try:
        yield
    except KeyboardInterrupt:
        log.note("interrupted", sync=True)
        raise
    except Exception as error:
        with suppress(OSError):  # a full disk must not hide what went wrong
            log.note("failed", sync=True, kind=type(error).__name__, why=str(error)[:500])
        raise


def _keep_federation(folder: Path, agreement: Agreement) -> None:
    """Keep the federation beside the plan; refuse to go on with another."""
    text = to_toml(to_table(agreement.federation))
    path = folder / FEDERATION
    if not path.exists():
        write_atomically(path, text.encode())
    elif path.read_text(encoding="utf-8") != text:
        raise FileExistsError(f"{folder} holds a run of another federation; choose another folder")
