"""Nodes that answer a greeting with an error, are mended, and come late: over a grid of our own."""

import warnings
from types import SimpleNamespace

import pytest

from coterie.wire import Parcel, RefusedError

with warnings.catch_warnings():
    # Flower's own imports warn of what its dependencies will do one day.
    warnings.simplefilter("ignore")
    from coterie.engines import flower

pytestmark = pytest.mark.full
GREETING = Parcel(b"{}", b"", {})


class Reply:
    """What the grid gives back: an error, or a parcel in records."""

    def __init__(self, number, parcel):
        self.metadata = SimpleNamespace(reply_to_message_id=number)
        self.error = SimpleNamespace(code=8)
        self.parcel = parcel

    def has_error(self):
        return self.parcel is None

    @property
    def content(self):
        return flower.to_records(self.parcel)


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
            replies.append(Reply(number, None if fails else Parcel(head, b"", {})))
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

    def meet(failures, sites, seconds=60.0):
        street, log = Street(failures), []
        transport = flower.GridTransport(street, lambda event, **facts: log.append((event, facts)))
        known = {b"1": "north", b"2": "south"}

        def recognise(parcel):
            if parcel.head not in known:
                raise RefusedError("a site that is not in the federation")
            return known[parcel.head]

        found = transport.meet(lambda: GREETING, recognise, sites, seconds)
        return found, street, log, now[0]

    return meet


def test_a_node_that_fails_is_no_stranger_and_is_greeted_again_until_it_answers(carry):
    found, street, log, seconds = carry({1: 0, 2: 2}, 2)
    assert found == {"north", "south"} and seconds < 15
    assert street.greeted.count(1) == 1 and street.greeted.count(2) == 3
    events = [event for event, _ in log]
    assert events.count("node_error") == 2 and "stranger" not in events
    assert all("site" not in facts for event, facts in log if event == "node_error")
    assert [facts["site"] for event, facts in log if event == "met"] == ["north", "south"]


def test_a_node_that_never_answers_is_told_of_and_left_behind(carry):
    found, street, log, seconds = carry({1: 0, 2: -1}, 2)
    assert found == {"north"} and seconds >= 60
    assert 5 <= street.greeted.count(2) <= 25
    whys = {facts["why"] for event, facts in log if event == "node_error"}
    assert whys == {"flower: error 8"}


def test_a_node_that_is_nobodys_is_a_stranger(carry):
    found, street, log, _ = carry({1: 0, 3: 0}, 2, seconds=20.0)
    assert found == {"north"}
    assert [facts["why"] for event, facts in log if event == "stranger"] == [
        "a site that is not in the federation"
    ]
    assert street.greeted.count(3) == 1
