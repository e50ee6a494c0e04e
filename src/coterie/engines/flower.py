"""Flower as carrier of letters: `Grid` as a transport, parcels as `RecordDict`s, the two apps.

Flower (Beutel et al. 2020, "Flower: a friendly federated learning framework",
https://arxiv.org/abs/2007.14390) brings messages to SuperNodes and back. Nothing else of it is
used: no strategy, no weights by numbers of examples, no differential privacy of its own. A message
holds a parcel (`wire`) and nothing else; whatever else it holds is refused before it is looked at.

Made for flwr 1.41 and 1.42 (Message API). This file does not import torch: a ClientApp is a new
process for every message, and must be light.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeGuard

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from coterie.wire import Parcel, RawArray, RefusedError, peek

_LETTER, _ARRAYS, _RAW = "letter", "arrays", "coterie.raw"
_ERROR = "flower: "
_PAUSE = 0.25
"""Seconds between looks for answers; Flower's own loop waits 3."""
_AGAIN = 3.0
"""Seconds after which a site whose node gave an error is asked again, and new nodes are greeted."""
_SPARE = 5.0
"""Seconds that a message outlives its deadline, for clocks that differ."""


def to_records(parcel: Parcel) -> RecordDict:
    """Put a parcel into records."""
    arrays = {
        name: Array(raw.dtype, raw.shape, _RAW, raw.data) for name, raw in parcel.arrays.items()
    }
    letter = ConfigRecord({"head": parcel.head, "signature": parcel.signature})
    return RecordDict({_LETTER: letter, _ARRAYS: ArrayRecord(arrays)})


def from_records(records: RecordDict) -> Parcel:
    """Take a parcel out of records.

    Raises:
        RefusedError: If they hold anything else.
    """
    if set(records) != {_LETTER, _ARRAYS}:
        came = [str(name)[:40] for name in sorted(records)[:4]]
        raise RefusedError(f"records {came} where a letter was expected")
    letter, arrays = records[_LETTER], records[_ARRAYS]
    if not isinstance(letter, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise RefusedError("records of other types than a letter's")
    head, signature = letter.get("head"), letter.get("signature")
    if set(letter) != {"head", "signature"} or not isinstance(head, bytes):
        raise RefusedError("a letter without a head")
    if not isinstance(signature, bytes):
        raise RefusedError("a letter without a signature")
    raws = {str(name): _raw(array) for name, array in arrays.items()}
    return Parcel(head, signature, raws)


def _raw(array: Array) -> RawArray:
    """Take over what an array says of itself; Flower reads it from JSON, of whatever types."""
    if type(array.stype) is not str or array.stype != _RAW:
        raise RefusedError("an array that was written by something else")
    shape = array.shape
    if type(array.dtype) is not str or type(array.data) is not bytes or type(shape) is not tuple:
        raise RefusedError("an array without type, shape or bytes")
    if any(type(length) is not int for length in shape):
        raise RefusedError("an array with a shape that is not of whole numbers")
    return RawArray(array.dtype, shape, array.data)


class GridTransport:
    """Carries parcels over a Flower grid.

    A node is taken for a site when it has answered a greeting under the site's key. Nodes that come
    later, or come back under another number, are greeted as they appear.
    """

    def __init__(self, grid: Grid, note: Callable[..., None]) -> None:
        self._grid, self._note = grid, note
        self._nodes: dict[str, int] = {}
        self._greeted: dict[int, float] = {}
        self._greetings: dict[str, int] = {}
        self._greet: Callable[[], Parcel] | None = None
        self._recognise: Callable[[Parcel], str] | None = None
        self._next_look = 0.0

    def meet(
        self,
        greet: Callable[[], Parcel],
        recognise: Callable[[Parcel], str],
        sites: int,
        seconds: float,
    ) -> set[str]:
        """Greet nodes until so many sites are recognised, or time is up."""
        self._greet, self._recognise = greet, recognise
        end = time.monotonic() + seconds
        while len(self._nodes) < sites and time.monotonic() < end:
            self._look_around(seconds)
            time.sleep(_PAUSE)
        return set(self._nodes)

    def ask(
        self, questions: Mapping[str, Parcel], seconds: float
    ) -> Iterator[tuple[str, Parcel | str]]:
        """Send questions; give answers as they come, until all did or time is up.

        A site whose node is not there, or fails, is asked again until time is up.
        """
        end = time.monotonic() + seconds
        unsent, waiting, errors = dict.fromkeys(questions, 0.0), dict[str, str](), dict[str, str]()
        while (unsent or waiting) and time.monotonic() < end:
            self._look_around(end - time.monotonic())
            self._send(questions, unsent, waiting, end)
            for number, answer in self._pull(list(waiting)):
                site = waiting.pop(number, None)
                if site is None:  # twice, or a reply to something else
                    continue
                if _is_of_node(answer):
                    self._note("node_error", site=site, why=answer)
                    unsent[site] = time.monotonic() + _AGAIN
                    errors[site] = answer
                else:
                    yield site, answer
            if unsent or waiting:
                time.sleep(_PAUSE)
        for site in (*unsent, *waiting.values()):
            if site in errors:  # told as such, also where it was asked once more in vain
                yield site, errors[site]

    def _send(
        self,
        questions: Mapping[str, Parcel],
        unsent: dict[str, float],
        waiting: dict[str, str],
        end: float,
    ) -> None:
        now = time.monotonic()
        ready = [site for site, due in unsent.items() if due <= now and site in self._nodes]
        if not ready:
            return
        messages = [
            self._message(questions[site], self._nodes[site], "train", end - now) for site in ready
        ]
        for site, number in zip(ready, self._grid.push_messages(messages), strict=False):
            if number:
                waiting[str(number)] = site
                del unsent[site]

    def _message(self, parcel: Parcel, node: int, kind: str, seconds: float) -> Message:
        return Message(to_records(parcel), node, kind, ttl=max(seconds, 1.0) + _SPARE)

    def _pull(self, numbers: list[str]) -> list[tuple[str, Parcel | str]]:
        """Look for answers; one that cannot be read must not hide the others."""
        if not numbers:
            return []
        try:
            return [_opened(message) for message in self._grid.pull_messages(numbers)]
        except (httpx.HTTPError, OSError):
            raise  # the SuperLink is gone; the run can be resumed
        except Exception as error:
            if len(numbers) == 1:
                return [(numbers[0], f"a message that cannot be read ({type(error).__name__})")]
        found = []
        for number in numbers:
            found += self._pull([number])
        return found

    def _read_greetings(self, recognise: Callable[[Parcel], str]) -> None:
        """Take nodes that answered a greeting for the sites that they are."""
        for number, answer in self._pull(list(self._greetings)):
            node = self._greetings.pop(number, None)
            if node is None:
                continue
            if _is_of_node(answer):
                # Nobody knows which site it is. It may be mended: it is greeted again, soon.
                self._note("node_error", why=answer)
                self._greeted[node] = time.monotonic() + _AGAIN
                continue
            try:
                if isinstance(answer, str):
                    raise RefusedError(answer)
                site = recognise(answer)
            except RefusedError as refusal:
                self._note("stranger", why=str(refusal))
                continue
            self._nodes[site] = node
            self._note("met", site=site)

    def _look_around(self, seconds: float) -> None:
        """Greet nodes that are new, and read what greeted ones answered."""
        greet, recognise, now = self._greet, self._recognise, time.monotonic()
        if greet is None or recognise is None:
            return
        self._read_greetings(recognise)
        if now < self._next_look:
            return
        self._next_look = now + _AGAIN
        known = set(self._nodes.values())
        for node in self._grid.get_node_ids():
            due = self._greeted.get(node, -1.0)
            if node not in known and due < now:
                self._greeted[node] = now + max(seconds, 10 * _AGAIN)
                (number,) = self._grid.push_messages(
                    [self._message(greet(), node, "query", seconds)]
                )
                self._greetings[str(number)] = node


def _is_of_node(answer: Parcel | str) -> TypeGuard[str]:
    """Return whether Flower, not the site, has answered: its app could not start, or raised."""
    return isinstance(answer, str) and answer.startswith(_ERROR)


def _opened(message: Message) -> tuple[str, Parcel | str]:
    number = message.metadata.reply_to_message_id
    if message.has_error():
        # Its code alone: the reason is an exception's text, which may quote rows.
        return number, f"{_ERROR}error {message.error.code}"
    try:
        return number, from_records(message.content)
    except RefusedError as refusal:
        return number, str(refusal)


def make_server_app(conduct: Callable[[Grid, Context], None]) -> ServerApp:
    """Make a ServerApp of what conducts a run over a grid."""
    app = ServerApp()
    app.main()(conduct)
    return app


def make_client_app(answer: Callable[[Parcel, Context], Parcel]) -> ClientApp:
    """Make a ClientApp of what answers parcels.

    `Context.state` says what was answered last, for whoever looks there; personal state is on the
    site's disk, since a SuperNode's memory ends with it.
    """
    app = ClientApp()

    def reply(message: Message, context: Context) -> Message:
        parcel = answer(from_records(message.content), context)
        letter = peek(parcel)
        context.state["coterie"] = ConfigRecord(
            {"run": letter.run, "round": letter.round, "kind": letter.kind}
        )
        return Message(to_records(parcel), reply_to=message)

    app.train()(reply)
    app.query()(reply)
    return app
