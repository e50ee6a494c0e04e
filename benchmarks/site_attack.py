"""Attack a site through the rows of one of its clients, and bound epsilon from below.

A site hosts 40 clients, and its memory holds 20,000 stacked rows. In one world client 7 has 10
rows, in the other 2,000: stacked with the others they do not fit. The adversary knows both sums of
the site and sees the release, of which many are drawn. If one client silenced its site, the sum
would move by the contributions of all. One line of JSON: the claimed epsilon, lower bounds, and by
how many clips the sum moved. Exit status 1 if a lower bound is above the claim.

    python benchmarks/site_attack.py                # client 7 is computed alone
    python benchmarks/site_attack.py --memory 1000  # it does not fit alone: it contributes zeros
"""

import argparse
import json
import secrets
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie import MLP, PMTL, Plan, Privacy
from coterie.audit.bounds import gaussian_bound, threshold_bound
from coterie.core.rng import Rng
from coterie.core.tree import map_arrays
from coterie.data.config import MOST_ROWS, DataConfig
from coterie.deploy.federation import Agreement, Federation, SiteEntry
from coterie.deploy.messages import Expected, Message, public_hex, sign, verify
from coterie.deploy.rows import place_rows
from coterie.deploy.site import SHARED, SUM, Site
from coterie.privacy.entropy import SeededEntropy

CLIENTS, CANARY, FEATURES = 40, 7, 20
NAMES = tuple(f"c{number:02d}" for number in range(CLIENTS))


def rows_of(many: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the rows of all clients, of which the canary has so many."""
    rows = {}
    for number, name in enumerate(NAMES):
        draw = np.random.default_rng(number)
        count = many if number == CANARY else 10
        x = draw.standard_normal((count, FEATURES), dtype=np.float32)
        rows[name] = (x, x[:, 0] + 1)
    return rows


def limited(memory: int) -> None:
    """Let local updates of more stacked rows than this raise, as if memory were exhausted."""
    update = PMTL.local_update

    def limited_update(self, shared, personal, clients, rng, round):
        if len(clients) * clients.longest > memory:
            raise MemoryError(f"{len(clients)} clients of up to {clients.longest} rows")
        return update(self, shared, personal, clients, rng, round)

    PMTL.local_update = limited_update


def site_sum(agreement: Agreement, keys: dict, many: int) -> dict[str, np.ndarray]:
    """Return the sum that the site sends in its only round."""
    name, federation, plan = "site", agreement.federation, agreement.plan
    rows = plan.data.split(place_rows(rows_of(many), federation, name, "attack"))[0]
    shared = plan.method.init(federation.spec, Rng.seeded(0))
    arrays = {SHARED + leaf: value.numpy() for leaf, value in shared.items()}
    expected = {SUM + leaf: Expected("float64", tuple(v.shape)) for leaf, v in shared.items()}
    with tempfile.TemporaryDirectory() as folder:
        site = Site(
            name=name, agreement=agreement, rows=rows, folder=Path(folder), key=keys["site"]
        )

        def ask(kind: str, number: int, body: dict, arrays: dict, expected: dict):
            nonce = secrets.token_hex(16)
            message = Message(kind, "0" * 16, name, number, nonce, body, arrays)
            answer = site.answer(sign(message, keys["coordinator"]))
            return verify(answer, keys["site"].public_key(), expected)

        ask("handshake", -1, {"agreement": agreement.digest}, {}, {})
        body = {"clients": list(range(CLIENTS)), "counted": -1}
        answer = ask("round", 0, body, arrays, expected)
    return {leaf.removeprefix(SUM): np.array(value) for leaf, value in answer.arrays.items()}


def agree(most_rows: int) -> tuple[Agreement, dict[str, Ed25519PrivateKey]]:
    """Return a plan of one round at epsilon 1, its federation, and the keys."""
    keys = {name: Ed25519PrivateKey.generate() for name in ("site", "coordinator")}
    plan = Plan(
        method=PMTL(model=MLP(hidden=(64,))),
        privacy=Privacy(epsilon=1.0, delta=1e-5, clip=0.01, relation="replace"),
        rounds=1,
        simulation_seed=0,
        data=DataConfig(name="", test=1, most_rows=most_rows),
    )
    federation = Federation(
        task="regression",
        shape=(FEATURES,),
        outputs=1,
        sites={"site": SiteEntry(clients=NAMES, key=public_hex(keys["site"]))},
        coordinator=public_hex(keys["coordinator"]),
        deadline=600.0,
        simulation=True,
    )
    return Agreement(plan, federation), keys


def attack(most_rows: int, rows: int, memory: int, draws: int) -> dict:
    """Return the claim, lower bounds from `draws` releases in each world, and the move in clips."""
    agreement, keys = agree(most_rows)
    limited(memory)
    sums = [site_sum(agreement, keys, many) for many in (10, rows)]
    (mechanism,) = agreement.plan.mechanisms(CLIENTS)
    flat = [np.concatenate([leaf.ravel() for leaf in one.values()]) for one in sums]
    move = flat[1] - flat[0]
    deviation = mechanism.noise_multiplier * mechanism.bound
    scores = np.empty((2, draws))
    for world, draw in np.ndindex(2, draws):
        entropy = SeededEntropy(2 * draw + world, "noise", 0)
        total = map_arrays({name: leaf.copy() for name, leaf in sums[world].items()})
        released = mechanism.perturb(total, entropy)
        x = torch.cat([released[name].reshape(-1) for name in sums[0]]).numpy()
        scores[world, draw] = (x - flat[0]) @ move / deviation**2
    delta = agreement.guarantee.delta
    bounds = [
        found(scores[0], scores[1], delta, 0.975) for found in (gaussian_bound, threshold_bound)
    ]
    return {
        "claimed": agreement.guarantee.epsilon,
        "lower_bound": max(bound.epsilon for bound in bounds),
        "bounds": {bound.estimator: bound.epsilon for bound in bounds},
        "clips_moved": float(np.linalg.norm(move)) / mechanism.bound,
        "rows": rows,
        "most_rows": most_rows,
        "draws": draws,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most-rows", type=int, default=MOST_ROWS)
    parser.add_argument("--rows", type=int, default=2_000)
    parser.add_argument("--memory", type=int, default=20_000, help="stacked rows that fit")
    parser.add_argument("--draws", type=int, default=3000)
    given = parser.parse_args()
    found = attack(given.most_rows, given.rows, given.memory, given.draws)
    print(json.dumps(found))
    sys.exit(found["lower_bound"] > found["claimed"])
