"""Parcels in Flower's records: as they were, through Flower's own bytes; all else is refused."""

import json
import warnings

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.wire import Expected, Letter, RefusedError, digest, seal, unseal

with warnings.catch_warnings():
    # Flower's own imports warn of what its dependencies will do one day.
    warnings.simplefilter("ignore")
    from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
    from flwr.supercore.inflatable import inflatable_object, inflatable_utils
    from flwr.supercore.task_identity import TaskIdentity

    from coterie.engines import flower
    from coterie.engines.flower import from_records, to_records

pytestmark = pytest.mark.full

KEY = Ed25519PrivateKey.generate()
PROFILE = settings(
    derandomize=True, deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)
ARRAYS = {"sum/w": np.arange(6.0).reshape(2, 3), "sum/b": np.array(-0.5)}
LETTER = Letter("round", "run1", "north", 3, "n" * 32, {"a": [1]}, ARRAYS)
EXPECTED = {name: Expected("float64", array.shape) for name, array in ARRAYS.items()}


def opened(records):
    return unseal(from_records(records), KEY.public_key(), EXPECTED)


def parcel():
    return seal(LETTER, KEY)


@pytest.mark.parametrize(
    "carry",
    [lambda records: records, lambda records: recorddict_from_proto(recorddict_to_proto(records))],
    ids=["records", "protobuf"],
)
def test_a_parcel_comes_out_as_it_went_in(carry):
    assert from_records(carry(to_records(parcel()))) == parcel()
    assert digest(opened(carry(to_records(parcel()))).arrays) == digest(ARRAYS)


@pytest.mark.parametrize(
    "numbers", [np.zeros((0, 3)), np.array(2.0), np.arange(300_000.0)], ids=["none", "one", "many"]
)
def test_arrays_of_any_size_survive_flowers_objects(numbers):
    letter = Letter("round", "run1", "north", 3, "n" * 32, {}, {"x": numbers})
    records = to_records(seal(letter, KEY))
    objects = inflatable_object.get_all_nested_objects(records)
    contents = {name: item.deflate() for name, item in objects.items()}
    found = inflatable_utils.inflate_object_from_contents(records.object_id, contents)
    opened = unseal(
        from_records(found), KEY.public_key(), {"x": Expected("float64", numbers.shape)}
    )
    assert np.array_equal(opened.arrays["x"], numbers)


def letter(**changes):
    base = {"head": parcel().head, "signature": parcel().signature}
    return ConfigRecord({**base, **changes})


def arrays(**changes):
    raw = parcel().arrays["sum/w"]
    told = {"dtype": raw.dtype, "shape": raw.shape, "stype": "coterie.raw", "data": raw.data}
    return listed({"sum/w": {**told, **changes}})


def listed(told):
    """Arrays that say anything of themselves: not all of it can be said to a constructor."""
    record = ArrayRecord()
    for name, facts in told.items():
        record[name] = array = Array("float64", (), "coterie.raw", b"")
        for fact, value in facts.items():
            setattr(array, fact, value)
    return record


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


REFUSED = {
    "nothing": RecordDict(),
    "no arrays": RecordDict({"letter": letter()}),
    "no letter": RecordDict({"arrays": arrays()}),
    "more": RecordDict({"letter": letter(), "arrays": arrays(), "more": MetricRecord({"x": 1.0})}),
    "long names": RecordDict({"x" * 10**6: letter(), "arrays": arrays()}),
    "a model": RecordDict({"arrays": ArrayRecord([np.zeros(3)])}),
    "metrics": RecordDict({"letter": MetricRecord({"head": 1.0}), "arrays": arrays()}),
    "other places": RecordDict({"letter": arrays(), "arrays": letter()}),
    "a head in words": RecordDict({"letter": letter(head="text"), "arrays": arrays()}),
    "a head in a list": RecordDict({"letter": letter(head=[b"x"]), "arrays": arrays()}),
    "a number for a signature": RecordDict({"letter": letter(signature=1), "arrays": arrays()}),
    "more in the letter": RecordDict({"letter": letter(more=1), "arrays": arrays()}),
    "only a head": RecordDict({"letter": ConfigRecord({"head": b"x"}), "arrays": arrays()}),
    "numpy": RecordDict({"letter": letter(), "arrays": ArrayRecord({"x": Array(np.zeros(2))})}),
    "stype": RecordDict({"letter": letter(), "arrays": arrays(stype="x" * 10**6)}),
    "nested stype": RecordDict({"letter": letter(), "arrays": arrays(stype=nested(900))}),
    "nested dtype": RecordDict({"letter": letter(), "arrays": arrays(dtype=nested(900))}),
    "nested shape": RecordDict({"letter": letter(), "arrays": arrays(shape=(nested(900),))}),
    "shape of words": RecordDict({"letter": letter(), "arrays": arrays(shape=("2", "3"))}),
    "shape of truths": RecordDict({"letter": letter(), "arrays": arrays(shape=(True, 6))}),
    "shape of fractions": RecordDict({"letter": letter(), "arrays": arrays(shape=(2.0, 3.0))}),
}


@pytest.mark.parametrize("records", REFUSED.values(), ids=REFUSED)
def test_other_records_are_refused_in_a_short_word(records):
    with pytest.raises(RefusedError) as refusal:
        from_records(records)
    assert len(str(refusal.value)) < 300


names = st.sampled_from(["letter", "arrays", "other"])
scalars = st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.text(max_size=5) | st.binary()
values = scalars | st.lists(st.binary(max_size=5), max_size=3) | st.floats()
configs = st.dictionaries(st.sampled_from(["head", "signature", "x"]), values).map(ConfigRecord)
metrics = st.dictionaries(st.text(max_size=4), st.floats(), max_size=3).map(MetricRecord)
told = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
shapes = st.lists(st.integers() | told | st.lists(told, max_size=2), max_size=3).map(tuple)
single = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["float64", "object", 1, ["x"]]),
        "shape": shapes,
        "stype": st.sampled_from(["coterie.raw", "numpy.ndarray", 3]),
        "data": st.binary(max_size=50),
    }
)
arrayed = st.dictionaries(st.sampled_from(["sum/w", "sum/b", "x"]), single).map(listed)
known = st.sampled_from([letter(), arrays()])


@PROFILE
@given(st.dictionaries(names, configs | metrics | arrayed | known))
def test_records_are_read_or_refused(content):
    try:
        opened(RecordDict(content))
    except RefusedError:
        return
    pytest.fail("somebody else's records were opened")


class Grid:
    """Gives messages that were prepared; `broken` numbers cannot be read."""

    def __init__(self, replies, broken=()):
        self.replies, self.broken = replies, set(broken)

    def pull_messages(self, numbers):
        if self.broken & set(numbers):
            raise ValueError("Unexpected set of `children`, 4711")
        return [self.replies[number] for number in numbers]


@pytest.fixture
def ask(monkeypatch):
    """Make a question as it lies at a node."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)

    def make(number):
        question = Message(to_records(parcel()), 7, "train")
        question.metadata.__dict__["_message_id"] = number
        return question

    return make


def test_an_error_is_told_by_its_code_alone(ask):
    reply = Message(Error(3, "row 7 holds 4711"), reply_to=ask("a"))
    assert flower._opened(reply) == ("a", "flower: error 3")


def test_a_message_of_something_else_is_a_word(ask):
    reply = Message(RecordDict({"x": MetricRecord({"y": 1.0})}), reply_to=ask("a"))
    number, answer = flower._opened(reply)
    assert number == "a" and "where a letter was expected" in answer


def test_a_letter_is_a_parcel(ask):
    reply = Message(to_records(parcel()), reply_to=ask("a"))
    assert flower._opened(reply) == ("a", parcel())


def test_a_message_that_cannot_be_read_does_not_hide_the_others(ask):
    replies = {n: Message(to_records(parcel()), reply_to=ask(n)) for n in "abc"}
    transport = flower.GridTransport(Grid(replies, broken="b"), lambda *_, **__: None)
    found = dict(transport._pull(list("abc")))
    assert found["a"] == found["c"] == parcel()
    assert found["b"] == "a message that cannot be read (ValueError)"


class Loud(Grid):
    """Gives every answer twice, and one that nobody waits for."""

    def __init__(self, ask):
        replies = {n: Message(to_records(parcel()), reply_to=ask(n)) for n in ("1", "2", "9")}
        super().__init__(replies)
        self.sent = 0

    def push_messages(self, messages):
        first, self.sent = self.sent + 1, self.sent + len(messages)
        return [str(number) for number in range(first, self.sent + 1)]

    def pull_messages(self, numbers):
        return super().pull_messages([*numbers, *numbers, "9"])


def test_replies_that_nobody_waits_for_are_left_alone(ask):
    transport = flower.GridTransport(Loud(ask), lambda *_, **__: None)
    transport._nodes = {"north": 7, "south": 8}
    found = list(transport.ask({"north": parcel(), "south": parcel()}, 5.0))
    assert [site for site, _ in found] == ["north", "south"]
    assert all(answer == parcel() for _, answer in found)
