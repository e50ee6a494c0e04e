"""A site's part in secure aggregation: its contribution of a round leaves it masked.

The protocol is that of `coterie.secagg`; here it is tied to rounds. Secrets live in memory alone: a
site that was restarted says that it has no session, and the coordinator sets up anew.

**Guarantee:** of a round one sum is opened at most, whatever a coordinator asks. The numbers of a
round are the same however often they are masked (`SiteRun.contribution`). Before a site takes part
in opening a round it notes the survivors on its disk, and from then on helps to open that round for
no others. An opening takes `sites_needed` of all n sites; so for openings of a round about two
lists some site would have to help with both, and an honest one, if 2 `sites_needed` exceeds n by
more than the number of dishonest sites. Tests: tests/engines/test_masked.py.
"""

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

from coterie.engines.federation import Federation
from coterie.privacy.validation import grid_steps
from coterie.secagg.member import Member
from coterie.secagg.ring import to_ring
from coterie.wire import Letter, RefusedError, digest

if TYPE_CHECKING:
    from coterie.engines.site_run import Arrays, Reply, SiteRun

MASKED = "masked"
NO_SESSION = "no session"
SETUP_SESSIONS = 256
"""Sums that one setup makes keys for, at most; the protocol itself allows more."""


def sites_needed(federation: Federation) -> int:
    """Return how many sites t an opening takes: a public number, which no coordinator can lower.

    2 t > n + 1: one site that colludes with a coordinator gains nothing by it (see `secagg.gate`).
    """
    sites = len(federation.sites)
    return max((sites + 1) // 2 + 1, math.ceil(federation.threshold * sites - 1e-9))


def told_of(round: int, arrays: "Arrays") -> str:
    """Name what a round is about: its number and the shared tree, the same at all sites.

    It goes into the masks between sites. Sites that were told different things have masks that do
    not cancel: a coordinator that gives one site another tree, or another round, opens nothing.
    """
    return digest({**arrays, "round": np.array([round], dtype=np.int64)})


class Masking:
    """One setup of a site: its member of the protocol, and which round each session was for."""

    def __init__(self, setup: str, member: Member, advertisement: dict[str, str]) -> None:
        self.setup, self.member, self.advertisement = setup, member, advertisement
        self.rounds: dict[int, int] = {}


def keys(run: "SiteRun", letter: Letter) -> "Reply":
    """Begin a setup: make keys for many sessions, and advertise the public ones."""
    setting = run.site.setting
    if setting.federation.trust != "secure_aggregation":
        raise RefusedError("this federation does not mask its sums")
    setup, sessions = letter.body.get("setup"), letter.body.get("sessions")
    if type(setup) is not str or type(sessions) is not int or not 1 <= sessions <= SETUP_SESSIONS:
        raise RefusedError("a setup without a name or a number of sessions")
    if run.masking is not None and run.masking.setup == setup:
        return "keys", {"advertisement": run.masking.advertisement}, {}
    opened: dict[Hashable, list[str]] = {
        int(number): names for number, names in run.state["opened"].items()
    }
    member, advertisement = Member.begin(
        run.name, setup, setting.name, sessions, setting.key, opened
    )
    run.masking = Masking(setup, member, advertisement)
    return "keys", {"advertisement": advertisement}, {}


def shares(run: "SiteRun", letter: Letter) -> "Reply":
    """Share secrets with the sites whose keys came, each under its own key."""
    masking, federation = _masking(run, letter), run.site.setting.federation
    advertisements = letter.body.get("advertisements")
    if not isinstance(advertisements, dict):
        raise RefusedError("shares were asked for without keys")
    listed = {name: site.public_key for name, site in federation.sites.items()}
    dealt = masking.member.share(advertisements, listed, sites_needed(federation))
    return "shares", {"shares": dealt}, {}


def masked(run: "SiteRun", letter: Letter) -> "Reply":
    """Return the round's sum under this session's masks."""
    masking, session = _masking(run, letter), _session(letter)
    if masking.rounds.get(session, letter.round) != letter.round:
        raise RefusedError("a session that was another round's")
    if not masking.member.ready:
        dealt = letter.body.get("shares")
        masking.member.receive(dealt if isinstance(dealt, dict) else {})
    total = run.contribution(letter)
    mechanism = run.site.mechanisms[letter.round]
    grid = grid_steps(mechanism, {name: tuple(leaf.shape) for name, leaf in total.items()})
    if grid is None:
        raise RefusedError("sums without noise lie on no grid, and cannot be masked")
    masking.rounds[session] = letter.round
    told = told_of(letter.round, letter.arrays)
    vector = masking.member.mask(session, to_ring(total, grid), letter.round, told)
    return MASKED, run.failure, {MASKED: vector}


def unmask(run: "SiteRun", letter: Letter) -> "Reply":
    """Help to open the sum of a round, once."""
    masking, session = _masking(run, letter), _session(letter)
    survivors = letter.body.get("survivors")
    if masking.rounds.get(session) != letter.round:
        raise RefusedError("an opening of a session that was not this round's")
    if not isinstance(survivors, list) or any(type(one) is not str for one in survivors):
        raise RefusedError("an opening without a list of survivors")
    opened, number = run.state["opened"], str(letter.round)
    if opened.get(number, sorted(survivors)) != sorted(survivors):
        raise RefusedError(f"round {letter.round + 1} was opened for other survivors")
    _check_noise(run, letter.round, survivors)
    revealed = masking.member.reveal(session, survivors)
    # On disk before it leaves; a list that the member refuses is not kept.
    run.keep(opened={**opened, number: sorted(survivors)})
    return "unmask", {"revealed": revealed}, {}


def _check_noise(run: "SiteRun", round: int, survivors: list[str]) -> None:
    """Refuse to open a sum of fewer clients than those whose noise is counted on."""
    mechanism, federation = run.site.mechanisms[round], run.site.setting.federation
    hosted = sum(len(federation.sites[one].clients) for one in survivors if one in federation.sites)
    if hosted < mechanism.honest:
        raise RefusedError(f"survivors with {hosted} clients: noise of {mechanism.honest} counts")


def _masking(run: "SiteRun", letter: Letter) -> Masking:
    masking = run.masking
    if masking is None or letter.body.get("setup") != masking.setup:
        raise RefusedError(f"{NO_SESSION}: this site is not set up")
    return masking


def _session(letter: Letter) -> int:
    session = letter.body.get("session")
    if type(session) is not int or session < 0:
        raise RefusedError(f"{NO_SESSION}: none was named")
    return session
