"""federation.toml: every mistake is one line that says what to do; numbers follow the list."""

import tomllib
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.core.config import ConfigError, from_table, to_table, to_toml
from coterie.data.config import DataConfig, Source
from coterie.deploy.federation import (
    Agreement,
    Federation,
    SiteEntry,
    colluding_sites,
    load_federation,
    make_agreement,
)
from coterie.deploy.messages import public_hex
from coterie.methods.pmtl import PMTL
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.events import Participation, SharedGaussian
from coterie.privacy.guarantee import Guarantee

KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in range(5)]
HEX = [public_hex(key) for key in KEYS]


def make(**changes):
    base = {
        "task": "regression",
        "shape": (3,),
        "outputs": 1,
        "sites": {
            "north": SiteEntry(clients=("a", "b"), key=HEX[1]),
            "south": SiteEntry(clients=("c",), key=HEX[2]),
            "east": SiteEntry(clients=("d", "e"), key=HEX[3]),
        },
        "coordinator": HEX[0],
    }
    return Federation(**{**base, **changes})


def entry(clients, key=4):
    return SiteEntry(clients=clients, key=HEX[key])


def test_clients_are_numbered_in_the_order_of_the_list():
    federation = make()
    assert federation.clients == ("a", "b", "c", "d", "e")
    found = {name: ids.tolist() for name, ids in federation.client_ids.items()}
    assert found == {"north": [0, 1], "south": [2], "east": [3, 4]}
    assert all(ids.dtype == np.int64 for ids in federation.client_ids.values())
    assert federation.spec.clients == 5 and federation.spec.shape == (3,)


def test_it_is_written_and_read_as_it_is(tmp_path):
    federation = make(trust="secure_aggregation", assumed=("the units",), deadline=5.5)
    path = tmp_path / "federation.toml"
    path.write_text(to_toml(to_table(federation)))
    assert load_federation(path) == federation
    assert load_federation(path).digest() == federation.digest()
    assert list(load_federation(path).sites) == ["north", "south", "east"]


def test_what_was_read_off_rows_is_assumed_of_a_deployment_too():
    source = Source(accepted=("levels of ward", "the units"))
    plan = Plan(
        method=PMTL(),
        privacy=Privacy(epsilon=2.0),
        rounds=2,
        data=DataConfig(name="rows.csv", source=source),
    )
    agreement = Agreement(plan, make(assumed=("the units",)))
    assert agreement.guarantee.assumed[:-1] == ("levels of ward", "the units")
    assert "rows of a client" in agreement.guarantee.assumed[-1]


def test_keys_verify_what_their_owners_signed():
    federation = make()
    federation.coordinator_key.verify(KEYS[0].sign(b"x"), b"x")
    federation.sites["south"].public_key.verify(KEYS[2].sign(b"x"), b"x")


def test_the_digest_is_of_everything_that_all_agree_on():
    base = make()
    others = [
        make(deadline=1.0),
        make(minimum=0.6),
        make(patience=3),
        make(trust="secure_aggregation"),
        make(threshold=0.9),
        make(assumed=("x",)),
        make(simulation=True),
        make(shape=(4,)),
        make(coordinator=HEX[4]),
        make(sites={**base.sites, "west": entry(("f",))}),
        make(sites=dict(reversed(base.sites.items()))),
        make(sites={**base.sites, "south": entry(("c",))}),
    ]
    digests = {base.digest(), *(other.digest() for other in others)}
    assert len(digests) == len(others) + 1, "two federations have one name"


MISTAKES = {
    "a short key": ({"coordinator": HEX[0][:-2]}, "64 hexadecimal digits"),
    "a key in capitals": ({"coordinator": HEX[0].upper()}, "64 hexadecimal digits"),
    "no key": ({"coordinator": ""}, "64 hexadecimal digits"),
    "a private key": ({"coordinator": "-----BEGIN PRIVATE KEY-----"}, "64 hexadecimal digits"),
    "a number for a key": ({"coordinator": 7}, "64 hexadecimal digits"),
    "another task": ({"task": "ranking"}, "expected one of regression"),
    "another trust": ({"trust": "all"}, "expected server or secure_aggregation or nobody"),
    "no shape": ({"shape": ()}, "positive"),
    "a shape of zero": ({"shape": (0, 3)}, "positive"),
    "no outputs": ({"outputs": 0}, "positive"),
    "two outputs of a number": ({"outputs": 2}, "outputs"),
    "one class": ({"task": "multiclass", "outputs": 1}, "outputs"),
    "no time": ({"deadline": 0.0}, "above 0"),
    "negative time": ({"deadline": -1.0}, "above 0"),
    "no end": ({"deadline": float("inf")}, "above 0"),
    "no number": ({"deadline": float("nan")}, "above 0"),
    "a minimum above all": ({"minimum": 1.5}, "from 0 to 1"),
    "a minimum below none": ({"minimum": -0.1}, "from 0 to 1"),
    "a minimum of no number": ({"minimum": float("nan")}, "from 0 to 1"),
    "no patience": ({"patience": -1}, "whole number"),
    "half the sites": ({"threshold": 0.5}, "above 0.5"),
    "more than all sites": ({"threshold": 1.1}, "above 0.5"),
    "no sites": ({"sites": {}}, "at least one"),
    "a site with a slash": ({"sites": {"a/b": entry(("a",))}}, "letters"),
    "a site that climbs": ({"sites": {"..": entry(("a",))}}, "letters"),
    "a site without a name": ({"sites": {"": entry(("a",))}}, "letters"),
    "a long site": ({"sites": {"x" * 65: entry(("a",))}}, "letters"),
    "a site with a newline": ({"sites": {"a\n": entry(("a",))}}, "letters"),
    "a client twice at a site": ({"sites": {"x": entry(("a", "a"))}}, "'a' is listed twice"),
    "a client at two sites": (
        {"sites": {"x": entry(("a",)), "y": entry(("b", "a"), 3)}},
        "'a' is listed twice",
    ),
    "a key twice": ({"sites": {"x": entry(("a",)), "y": entry(("b",))}}, "its own"),
    "the coordinator's key": ({"sites": {"x": entry(("a",), 0)}}, "its own"),
    "two sites that mask": (
        {
            "sites": {"x": entry(("a",)), "y": entry(("b",), 3)},
            "trust": "secure_aggregation",
        },
        "at least 3",
    ),
}


@pytest.mark.parametrize("changes,word", MISTAKES.values(), ids=MISTAKES)
def test_every_mistake_is_one_line(changes, word):
    with pytest.raises(ValueError) as mistake:
        make(**changes)
    text = str(mistake.value)
    assert word in text and "\n" not in text and len(text) < 300, text


def test_a_site_has_clients():
    with pytest.raises(ValueError, match="without clients"):
        SiteEntry(clients=(), key=HEX[1])
    assert SiteEntry(clients=(1, 2), key=HEX[1]).clients == ("1", "2")
    with pytest.raises(ValueError, match="a list"):
        SiteEntry(clients="abc", key=HEX[1])


TEXT = to_toml(to_table(make()))
FILES = {
    "not TOML": ("task = [", "federation.toml"),
    "an unknown word": (TEXT.replace("task =", "wish = 1\ntask =", 1), "wish"),
    "no task": ("\n".join(x for x in TEXT.splitlines() if not x.startswith("task")), "task"),
    "a word for a number": (TEXT.replace("outputs = 1", 'outputs = "one"'), "outputs"),
    "a site without a key": (TEXT.replace(f'key = "{HEX[2]}"\n', ""), "key"),
    "a key that is cut": (TEXT.replace(HEX[2], HEX[2][:-1]), "hexadecimal"),
    "a client twice": (TEXT.replace('"c"', '"a"'), "listed twice"),
    "a word for a list of clients": (
        TEXT.replace('clients = [\n    "c",\n]', 'clients = "c"'),
        "clients",
    ),
    "an empty file": ("", "task"),
}


@pytest.mark.parametrize("text,word", FILES.values(), ids=FILES)
def test_a_file_with_a_mistake_names_it(text, word, tmp_path):
    assert text != TEXT
    path = tmp_path / "federation.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as mistake:
        load_federation(path)
    seen = str(mistake.value)
    assert word in seen and "\n" not in seen.strip(), seen


def test_no_file_is_said_to_be_none(tmp_path):
    with pytest.raises((ConfigError, OSError), match=r"federation\.toml"):
        load_federation(tmp_path / "federation.toml")


def test_a_table_is_read_by_the_letter():
    table = tomllib.loads(TEXT)
    assert from_table(Federation, table, "federation") == make()


@pytest.mark.parametrize(
    "table,word",
    [
        ({"newcomers": 2}, "newcomers"),
        ({"stragglers": {"spread": 0.5}}, "stragglers"),
        ({"data": {"name": "districts", "clients": 3}}, r"data\.clients"),
    ],
)
def test_plans_that_belong_to_a_simulation_are_refused(table, word):
    method = {"kind": "pmtl"}
    base = {"method": method, "privacy": {"epsilon": 1.0}, "data": {"name": "districts"}}
    plan = from_table(Plan, {**base, **table}, "plan")
    with pytest.raises(ConfigError, match=word):
        make_agreement(plan, make())


def test_more_clients_than_sites_may_be_many():
    """A federation of ten thousand clients is listed and numbered in no time."""
    names = tuple(f"client {i}" for i in range(10_000))
    federation = make(sites={"north": SiteEntry(clients=names, key=HEX[1])})
    assert federation.client_ids["north"][-1] == 9_999
    with pytest.raises(ValueError, match="'client 7' is listed twice"):
        replace(federation, sites={"north": SiteEntry(clients=(*names, "client 7"), key=HEX[1])})


@pytest.mark.parametrize(
    "sizes, corrupt, threshold, expected",
    [
        ((2, 2, 2, 2), 0, 2 / 3, 0),
        ((2, 2, 2, 2), 1, 2 / 3, 0),  # less than a site
        ((2, 2, 2, 2), 2, 2 / 3, 1),
        ((4, 1, 1, 1), 3, 2 / 3, 0),  # the largest site may be the one that colludes
        ((1, 1, 1, 1, 1), 4, 0.6, 2),  # 2 t > n + c, t = 4
        ((1, 1, 1, 1, 1), 4, 1.0, 4),
    ],
)
def test_sites_that_may_collude_bring_all_their_clients(sizes, corrupt, threshold, expected):
    names = iter("abcdefghijklmno")
    made = [Ed25519PrivateKey.from_private_bytes(bytes([9 + i]) * 32) for i in range(len(sizes))]
    sites = {
        f"s{at}": entry([next(names) for _ in range(size)], 4) for at, size in enumerate(sizes)
    }
    sites = {
        name: replace(one, key=public_hex(key))
        for (name, one), key in zip(sites.items(), made, strict=True)
    }
    federation = make(sites=sites, trust="nobody", threshold=threshold)
    guarantee = Guarantee(
        (SharedGaussian(9.0, 2.0, 5, corrupt),), Participation("everyone"), "zero_out", 1e-5, 8
    )
    assert colluding_sites(guarantee, federation) == expected
