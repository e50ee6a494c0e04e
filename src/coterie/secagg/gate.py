"""The gate: an answer that opens only if enough sites answered about the same survivors.

A coordinator that tells different sites different lists of survivors could open sums over fewer
sites than the threshold. Bonawitz et al. (2017) close this with a further message: sites sign the
list, and reveal shares only when they hold `threshold` signatures of the same list. Here it costs
no message. For each session every site i deals, next to its two secrets, n + 1 random polynomials
of degree threshold - 1: a base P and one E_v for each site v. The *gate* of i for a list L is

    G_i(L) = P(0) + sum over v in L of E_v(0),

and i seals its answer about L under a key made from G_i(L). Every site that answers about L sends
with its answer, for each i, its share P(x) + sum over v in L of E_v(x) of G_i(L), once.

**Guarantee:** with n sites, c of them dishonest and 2 threshold > n + c, G_i(L) of an honest i is
uniform given all that others see, unless at least threshold - c honest sites answered about exactly
L. Hence answers about one list at most can be opened. *Proof.* Let honest j have answered about
L_j. Shares are linear, so G_i(L) is either uniform or a fixed combination of what is known:
weights a_j on honest answers, and anything on the polynomials at places of dishonest sites. Write
Q for the polynomial of L, and D_v = E_v if v is not in L, -E_v if it is: j's share is
Q(x_j) + sum of D_v(x_j) over v in S_j, the sites in which L_j and L differ. Polynomials are
independent, so for each v the weights on D_v combine to 0 for every polynomial of that degree: the
a_j of those j with v in S_j, with weights on the c places. Such a combination is empty or has more
than `threshold` places. If some is not empty, the others' weights on Q, less those, still give Q(0)
from places disjoint from these among honest sites, and need `threshold` places: together
2 threshold + 1 <= (n - c) + 2 c = n + c, a contradiction. So only sites with L_j = L have weights,
and Q(0) needs `threshold` places, at least threshold - c of them honest.
Two lists would need 2 (threshold - c) <= n - c honest answers, a contradiction again.
"""

import hashlib
import json
import secrets
from collections.abc import Collection, Sequence

from coterie.secagg.masks import Scope, hkdf, told
from coterie.secagg.shamir import PRIME, to_bytes


def fresh(names: Sequence[str]) -> list[int]:
    """Draw the constants of a gate: of the base, then of each name."""
    return [secrets.randbelow(PRIME) for _ in range(len(names) + 1)]


def part(row: Sequence[int], names: Sequence[str], survivors: Collection[str]) -> int:
    """Return what a row says of a list: the gate itself of constants, a share of it of shares."""
    base, *others = row
    listed = (value for name, value in zip(names, others, strict=True) if name in survivors)
    return (base + sum(listed)) % PRIME


def list_digest(survivors: Collection[str]) -> str:
    """Name a list of survivors."""
    return hashlib.sha256(json.dumps(sorted(survivors)).encode()).hexdigest()


def key_of(gate: int, scope: Scope, session: int, name: str) -> bytes:
    """Derive the key under which a site seals its answer."""
    return hkdf(to_bytes([gate]), told("gate", scope.run, scope.setup, str(session), name))
