"""An audit through deployed sites: what they answer to a coordinator, honest or hostile.

Sites are those of a deployment (`coterie.deploy.site.Site`): they get signed requests and answer
each with the signed sum of their clients, in this process. The adversary of
`coterie.audit.empirical` sees what follows from their answers:

- With noise on sums, the releases. The canary shares its site with other clients, so a canary that
  changes what its site answers for them is noticed.
- Where clients add the noise, the messages of the canary's site, which hosts no other client: the
  coordinator knows the noise of all other clients that it works with.

A hostile coordinator asks for every round again: with the same request, with another shared tree,
as if the first answer had not counted, and for rounds after the last. Each answer that differs from
the first carries new noise, and counts as one more observation of the same contribution.
"""

import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.audit.bounds import Array
from coterie.audit.empirical import Adversary, Seen
from coterie.core.tree import Tree, map_arrays
from coterie.data.federated import FederatedDataset
from coterie.deploy.federation import Agreement, Federation, SiteEntry
from coterie.deploy.messages import Expected, Message, peek, public_hex, sign, verify
from coterie.deploy.site import SHARED, SUM, Site
from coterie.engine.rounds import ClientHalf, RoundState, client_half
from coterie.engine.store import Ids, Store
from coterie.planning.plan import Plan
from coterie.privacy.billboard import Bounded, Post, Release, admit

_RUN = "0" * 16
_DEADLINE = 3600.0
_FAR = 1e6
_MEMORY = Path("/dev/shm")  # noqa: S108 - sites write before they answer, which takes long on a disk


@dataclass(frozen=True, eq=False)
class Hosts:
    """The sites of one world in one run, and the same clients' state for computing exact sums."""

    sites: dict[str, Site]
    keys: dict[str, Ed25519PrivateKey]
    expected: dict[str, Expected]
    exact: Store
    folder: tempfile.TemporaryDirectory[str]

    def ask(self, name: str, number: int, shared: Tree, ids: Ids, counted: int) -> Tree | None:
        """Return the sum that a site answers; None if it refuses."""
        body = {"clients": ids.tolist(), "counted": counted}
        arrays = {SHARED + leaf: value.numpy() for leaf, value in shared.items()}
        return self._answer(name, "round", number, body, arrays)

    def greet(self) -> None:
        """Let all sites join the run."""
        for name, site in self.sites.items():
            self._answer(name, "handshake", -1, {"agreement": site.agreement.digest}, {})

    def why(self, name: str, number: int) -> str:
        """Return that a site did not answer a round, and its last errors."""
        log = self.sites[name].folder / "errors.log"
        errors = log.read_text(errors="replace")[-500:] if log.exists() else "it refused"
        return f"{name} did not answer round {number + 1}: {errors}"

    def _answer(
        self, name: str, kind: str, number: int, body: dict[str, object], arrays: dict[str, Array]
    ) -> Tree | None:
        message = Message(kind, _RUN, name, number, secrets.token_hex(16), body, arrays)
        envelope = self.sites[name].answer(sign(message, self.keys["coordinator"]))
        if peek(envelope).kind != kind:
            return None
        expected = self.expected if kind == "round" else {}
        answer = verify(envelope, self.keys[name].public_key(), expected)
        return map_arrays({n.removeprefix(SUM): np.array(v) for n, v in answer.arrays.items()})


class SiteAdversary(Adversary):
    """Attacks a plan through the answers of sites.

    Args:
        plan: The resolved plan; all clients take part in every round.
        worlds: The rows without the canary's, and with them.
        sites: How many sites there are.
        hostile: Whether the coordinator asks for more than the protocol says.
    """

    def __init__(
        self,
        plan: Plan,
        worlds: tuple[FederatedDataset, FederatedDataset],
        *,
        sites: int,
        hostile: bool = False,
    ) -> None:
        super().__init__(plan, worlds, sees_cohort=True)
        self.hostile, clients = hostile, self.spec.clients
        if self.rate < 1:
            raise ValueError(
                "--sites: expected a plan in which all clients take part in all rounds"
            )
        if not 2 <= sites <= clients:
            raise ValueError(f"--sites {sites}: expected 2 to {clients}, the number of clients")
        if hostile and not plan.privacy.noise.local:
            raise ValueError(
                "--hostile: the coordinator adds the noise of this plan, and no epsilon is claimed "
                "against it; let clients add the noise (--noise local)"
            )
        # A site of its own for the canary where the coordinator is the adversary.
        first = [1] if plan.privacy.noise.local else []
        rest = np.array_split(np.arange(sum(first), clients), sites - len(first))
        self.hosted = [np.arange(count) for count in first] + list(rest)
        names = [f"site{number}" for number in range(sites)]
        self.keys = {name: Ed25519PrivateKey.generate() for name in (*names, "coordinator")}
        self.names = dict(zip(names, self.hosted, strict=True))

    def open_store(self, plan: Plan, world: FederatedDataset, shared: Tree) -> Any:
        """Return sites that join a new run."""
        entries = {
            name: SiteEntry(
                clients=tuple(f"c{one}" for one in ids), key=public_hex(self.keys[name])
            )
            for name, ids in self.names.items()
        }
        federation = Federation(
            task=self.spec.task,
            shape=self.spec.shape,
            outputs=self.spec.outputs,
            sites=entries,
            coordinator=public_hex(self.keys["coordinator"]),
            deadline=_DEADLINE,
            simulation=True,
        )
        agreement = Agreement(plan, federation)
        folder = tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None)
        sites = {
            name: Site(
                name=name,
                agreement=agreement,
                rows=world.where(np.isin(world.owners, ids)),
                folder=Path(folder.name) / name,
                key=self.keys[name],
            )
            for name, ids in self.names.items()
        }
        contribution = plan.method.contribution(self.spec)
        template = {name: tuple(leaf.shape) for name, leaf in contribution.items()}
        totals = plan.mechanisms(self.spec.clients)[0].totals(template)
        expected = {SUM + name: Expected("float64", shape) for name, shape in totals.items()}
        exact = super().open_store(plan, world, shared)
        hosts = Hosts(sites, self.keys, expected, exact, folder)
        hosts.greet()
        return hosts

    def close_store(self, store: Any) -> None:
        """Remove the folders of the sites."""
        store.folder.cleanup()

    def half(self, world: int, state: RoundState, store: Any, ids: Ids) -> ClientHalf:
        """Return the sum over the sites of a world."""
        hosts: Hosts = store
        total = None
        for name, own in self.names.items():
            answer = hosts.ask(name, state.round, state.shared, own, state.round - 1)
            part = self._admitted(state, hosts, name, answer)
            total = part if total is None else total + part
        assert total is not None
        return ClientHalf(total, {}, torch.zeros(0, dtype=torch.bool))

    def _messages(
        self, state: RoundState, release: Release, stores: list[Any], others: Ids, inside: bool
    ) -> tuple[Post, list[Seen]]:
        """Ask the sites; return the release, and what the canary's site answered."""
        noisy, hosts = replace(state, mechanism=release.mechanism), stores[int(inside)]
        own, *rest = self.names
        seen: list[Seen] = []
        for shared, answer in self._answers(state, hosts, own):
            exact = self._exact(replace(state, shared=shared), stores[1].exact, keep=not seen)
            if not seen:
                release.add(self._admitted(noisy, hosts, own, answer))
            nothing = {name: torch.zeros_like(leaf) for name, leaf in exact.items()}
            seen.append(self.standardised(state.mechanism, answer, nothing, exact))
        for name in rest:
            clients = self.names[name]
            answer = hosts.ask(name, state.round, state.shared, clients, state.round - 1)
            release.add(self._admitted(noisy, hosts, name, answer))
        return release.publish(), seen

    def _answers(self, state: RoundState, hosts: Hosts, name: str) -> Iterator[tuple[Tree, Tree]]:
        """Yield a site's answer, and answers to further requests that tell more."""
        number, ids = state.round, self.names[name]
        first = hosts.ask(name, number, state.shared, ids, number - 1)
        if first is None:
            raise RuntimeError(hosts.why(name, number))
        yield state.shared, first
        if not self.hostile:
            return
        # From far away a client moves back: another contribution, at the clip again.
        other = {leaf: value + _FAR for leaf, value in state.shared.items()}
        further = ((number, number - 1), (number, number - 2), (self.plan.posts, number))
        for (round, counted), shared in product(further, (state.shared, other)):
            again = hosts.ask(name, round, shared, ids, counted)
            if again is not None and any(not again[leaf].equal(first[leaf]) for leaf in first):
                yield shared, again

    def _exact(self, state: RoundState, store: Store, *, keep: bool) -> Tree:
        """Return the canary's contribution without noise, and keep its state."""
        canary = self.hosted[0]
        first = partial(self.plan.method.init_client_state, state.shared, self.spec)
        half = client_half(state, store.take(canary, first), self.worlds[1].clients(canary))
        if keep:
            store.put(canary, half.personal)
        return half.part.total

    def _admitted(self, state: RoundState, hosts: Hosts, name: str, answer: Tree | None) -> Bounded:
        if answer is None:
            raise RuntimeError(hosts.why(name, state.round))
        template = {
            leaf: tuple(value.shape)
            for leaf, value in self.plan.method.contribution(self.spec).items()
        }
        arrays = {leaf: value.numpy() for leaf, value in answer.items()}
        return admit(state.mechanism, arrays, self.names[name], template)[0]
