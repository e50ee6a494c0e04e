"""Parcels in Flower's records: as they were, through Flower's own bytes; all else is refused."""

import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.deploy import messages
from coterie.deploy.messages import Envelope, Expected, RefusedError, digest, sign, verify

with warnings.catch_warnings():
    # Flower's own imports warn of what its dependencies will do one day.
    warnings.simplefilter("ignore")
    from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
    from flwr.supercore.inflatable import inflatable_object, inflatable_utils
    from flwr.supercore.task_identity import TaskIdentity

    from coterie.deploy import flower
    from coterie.deploy.flower import from_records, to_records

pytestmark = pytest.mark.full

KEY = Ed25519PrivateKey.generate()
PROFILE = settings(
    derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
ARRAYS = {"sum/w": np.arange(6.0).reshape(2, 3), "sum/b": np.array(-0.5)}
LETTER = messages.Message("round", "run1", "north", 3, "n" * 32, {"a": [1]}, ARRAYS)
EXPECTED = {name: Expected("float64", array.shape) for name, array in ARRAYS.items()}


def opened(records):
    return verify(from_records(records), KEY.public_key(), EXPECTED)


def envelope():
    return sign(LETTER, KEY)


@pytest.mark.parametrize(
    "carry",
    [lambda records: records, lambda records: recorddict_from_proto(recorddict_to_proto(records))],
    ids=["records", "protobuf"],
)
def test_a_parcel_comes_out_as_it_went_in(carry):
    assert from_records(carry(to_records(envelope()))) == envelope()
    assert digest(opened(carry(to_records(envelope()))).arrays) == digest(ARRAYS)


@pytest.mark.parametrize(
    "numbers", [np.zeros((0, 3)), np.array(2.0), np.arange(300_000.0)], ids=["none", "one", "many"]
)
def test_arrays_of_any_size_survive_flowers_objects(numbers):
    message = messages.Message("round", "run1", "north", 3, "n" * 32, {}, {"x": numbers})
    records = to_records(sign(message, KEY))
    objects = inflatable_object.get_all_nested_objects(records)
    contents = {name: item.deflate() for name, item in objects.items()}
    found = inflatable_utils.inflate_object_from_contents(records.object_id, contents)
    opened = verify(
        from_records(found), KEY.public_key(), {"x": Expected("float64", numbers.shape)}
    )
    assert np.array_equal(opened.arrays["x"], numbers)


def head(**changes):
    base = {"header": envelope().header, "signature": envelope().signature}
    return ConfigRecord({**base, **changes})


def records(first, second):
    return RecordDict({"envelope": first, "arrays": second})


def arrays(**changes):
    raw = envelope().arrays["sum/w"]
    seen = {"dtype": raw.dtype, "shape": raw.shape, "stype": "coterie.raw", "data": raw.data}
    return listed({"sum/w": {**seen, **changes}})


def listed(seen):
    """Arrays that say anything of themselves: not all of it can be said to a constructor."""
    record = ArrayRecord()
    for name, facts in seen.items():
        record[name] = array = Array("float64", (), "coterie.raw", b"")
        for fact, value in facts.items():
            setattr(array, fact, value)
    return record


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


PARCEL = "expected an envelope"
REFUSED = {
    "nothing": (RecordDict(), PARCEL),
    "no arrays": (RecordDict({"envelope": head()}), PARCEL),
    "no envelope": (RecordDict({"arrays": arrays()}), PARCEL),
    "more": (
        RecordDict({"envelope": head(), "arrays": arrays(), "more": MetricRecord({"x": 1.0})}),
        PARCEL,
    ),
    "long names": (RecordDict({"x" * 10**6: head(), "arrays": arrays()}), PARCEL),
    "a model": (RecordDict({"arrays": ArrayRecord([np.zeros(3)])}), PARCEL),
    "metrics": (records(MetricRecord({"header": 1.0}), arrays()), "other types"),
    "other places": (records(arrays(), head()), "other types"),
    "a head in words": (records(head(header="text"), arrays()), "without a header"),
    "a head in a list": (records(head(header=[b"x"]), arrays()), "without a header"),
    "a number for a signature": (records(head(signature=1), arrays()), "without a signature"),
    "more in the head": (records(head(more=1), arrays()), "without a header"),
    "only a head": (records(ConfigRecord({"header": b"x"}), arrays()), "without a header"),
    "numpy": (records(head(), ArrayRecord({"x": Array(np.zeros(2))})), "not written by coterie"),
    "stype": (records(head(), arrays(stype="x" * 10**6)), "not written by coterie"),
    "nested stype": (records(head(), arrays(stype=nested(900))), "not written by coterie"),
    "nested dtype": (records(head(), arrays(dtype=nested(900))), "without type"),
    "a list for a shape": (records(head(), arrays(shape=[2, 3])), "without type, shape"),
    "words for bytes": (records(head(), arrays(data="x" * 48)), "or bytes"),
    "nested shape": (records(head(), arrays(shape=(nested(900),))), "whole numbers"),
    "shape of words": (records(head(), arrays(shape=("2", "3"))), "whole numbers"),
    "shape of truths": (records(head(), arrays(shape=(True, 6))), "whole numbers"),
    "shape of fractions": (records(head(), arrays(shape=(2.0, 3.0))), "whole numbers"),
}


@pytest.mark.parametrize("content,why", REFUSED.values(), ids=REFUSED)
def test_other_records_are_refused_in_a_short_word(content, why):
    with pytest.raises(RefusedError, match=why) as refusal:
        from_records(content)
    assert len(str(refusal.value)) < 300


names = st.sampled_from(["envelope", "arrays", "other"])
scalars = st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.text(max_size=5) | st.binary()
values = scalars | st.lists(st.binary(max_size=5), max_size=3) | st.floats()
configs = st.dictionaries(st.sampled_from(["header", "signature", "x"]), values).map(ConfigRecord)
metrics = st.dictionaries(st.text(max_size=4), st.floats(), max_size=3).map(MetricRecord)
seen = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
shapes = st.lists(st.integers() | seen | st.lists(seen, max_size=2), max_size=3).map(tuple)
single = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["float64", "object", 1, ["x"]]),
        "shape": shapes,
        "stype": st.sampled_from(["coterie.raw", "numpy.ndarray", 3]),
        "data": st.binary(max_size=50),
    }
)
arrayed = st.dictionaries(st.sampled_from(["sum/w", "sum/b", "x"]), single).map(listed)
known = st.sampled_from([head(), arrays()])


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
        question = Message(to_records(envelope()), 7, "train")
        question.metadata.__dict__["_message_id"] = number
        return question

    return make


def test_an_error_is_told_by_its_code_alone(ask):
    reply = Message(Error(3, "row 7 holds 4711"), reply_to=ask("a"))
    assert flower._opened(reply) == ("a", "flower: error 3")


def test_a_message_of_something_else_is_a_word(ask):
    reply = Message(RecordDict({"x": MetricRecord({"y": 1.0})}), reply_to=ask("a"))
    number, answer = flower._opened(reply)
    assert number == "a" and "expected an envelope" in answer


def test_a_letter_is_a_parcel(ask):
    reply = Message(to_records(envelope()), reply_to=ask("a"))
    assert flower._opened(reply) == ("a", envelope())


def test_a_message_that_cannot_be_read_does_not_hide_the_others(ask):
    replies = {n: Message(to_records(envelope()), reply_to=ask(n)) for n in "abc"}
    transport = flower.GridTransport(Grid(replies, broken="b"), lambda *_, **__: None)
    found = dict(transport._pull(list("abc")))
    assert found["a"] == found["c"] == envelope()
    assert found["b"] == "message cannot be read (ValueError)"


class Loud(Grid):
    """Gives every answer twice, and one that nobody waits for."""

    def __init__(self, ask):
        replies = {n: Message(to_records(envelope()), reply_to=ask(n)) for n in ("1", "2", "9")}
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
    found = list(transport.ask({"north": envelope(), "south": envelope()}, 5.0))
    assert [site for site, _ in found] == ["north", "south"]
    assert all(answer == envelope() for _, answer in found)


# Nodes that answer a handshake with an error, are mended, and come late: over a grid of our own.


GREETING = Envelope(b"{}", b"", {})


class Reply:
    """What the grid gives back: an error, or a envelope in records."""

    def __init__(self, number, envelope):
        self.metadata = SimpleNamespace(reply_to_message_id=number)
        self.error = SimpleNamespace(code=8)
        self.envelope = envelope

    def has_error(self):
        return self.envelope is None

    @property
    def content(self):
        return flower.to_records(self.envelope)


class Street:
    """A grid with nodes whose apps raise so many times before they answer; -1 for ever."""

    def __init__(self, failures):
        self.failures, self.waiting, self.greeted = dict(failures), {}, []

    def get_node_ids(self):
        return list(self.failures)

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            number = f"m{len(self.greeted)}"
            self.greeted.append(message)
            self.waiting[number] = message
            numbers.append(number)
        return numbers

    def pull_messages(self, numbers):
        replies = []
        for number in numbers:
            node = self.waiting.pop(number)
            fails = self.failures[node] != 0
            self.failures[node] -= self.failures[node] > 0
            head = str(node).encode()
            replies.append(Reply(number, None if fails else Envelope(head, b"", {})))
        return replies


@pytest.fixture
def carry(monkeypatch):
    """Meet the sites of a street, in no time."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(flower, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    # Flower makes messages inside a run alone.
    monkeypatch.setattr(flower, "Message", lambda records, node, kind, ttl: node)

    def connect(failures, sites, seconds=60.0):
        street, log = Street(failures), []
        transport = flower.GridTransport(street, lambda event, **facts: log.append((event, facts)))
        known = {b"1": "north", b"2": "south"}

        def identify(envelope):
            if envelope.header not in known:
                raise RefusedError("a site that is not in the federation")
            return known[envelope.header]

        found = transport.connect(lambda: GREETING, identify, sites, seconds)
        return found, street, log, now[0]

    return connect


def test_a_node_that_fails_is_no_stranger_and_is_greeted_again_until_it_answers(carry):
    found, street, log, seconds = carry({1: 0, 2: 2}, 2)
    assert found == {"north", "south"} and seconds < 15
    assert street.greeted.count(1) == 1 and street.greeted.count(2) == 3
    events = [event for event, _ in log]
    assert events.count("node_error") == 2 and "unknown_node" not in events
    assert all("site" not in facts for event, facts in log if event == "node_error")
    assert [facts["site"] for event, facts in log if event == "connected"] == ["north", "south"]


def test_a_node_that_never_answers_is_told_of_and_left_behind(carry):
    found, street, log, seconds = carry({1: 0, 2: -1}, 2)
    assert found == {"north"} and seconds >= 60
    assert 4 <= street.greeted.count(2) <= 8  # ever longer pauses
    told = [facts for event, facts in log if event == "node_error"]
    assert {facts["reason"] for facts in told} == {"flower: error 8"}
    assert [facts["times"] for facts in told] == [1, 1, 2]  # the first, second and fourth


def test_errors_in_a_row_are_summed_up_and_begin_anew_after_an_answer():
    log = []
    errors = flower._NodeErrors(lambda event, **facts: log.append(facts))
    waits = [errors.note("north", reason="x") for _ in range(100)]
    assert waits[:7] == [3, 3, 6, 12, 24, 30, 30] and max(waits) == 30
    assert len(log) == 7 and sum(facts["times"] for facts in log) == 64
    errors.answered("north")
    assert errors.note("north", reason="x") == 3 and log[-1]["times"] == 1


def test_a_node_that_is_nobodys_is_a_stranger(carry):
    found, street, log, _ = carry({1: 0, 3: 0}, 2, seconds=20.0)
    assert found == {"north"}
    assert [facts["reason"] for event, facts in log if event == "unknown_node"] == [
        "a site that is not in the federation"
    ]
    assert street.greeted.count(3) == 1
