"""Flower as the transport of messages: `Grid`, envelopes as `RecordDict`s, the two apps.

Flower (Beutel et al. 2020, "Flower: a friendly federated learning framework",
https://arxiv.org/abs/2007.14390) carries messages to SuperNodes and back. Nothing else of it is
used: no strategy, no weights by row counts, no differential privacy of Flower's own. A Flower
message has one envelope (`deploy.messages`); any other content is rejected before it is read.

An app folder has plan.toml, federation.toml and the data hook; `coterie deploy init` writes it.
Made for flwr 1.41 and later (Message API). This module imports torch only when a run starts,
because Flower starts a new process of the ClientApp for every message.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from coterie.core.environment import telemetry_off
from coterie.deploy.messages import Envelope, RawArray, RefusedError, pack, peek, unpack
from coterie.deploy.worker import relay

_ENVELOPE, _ARRAYS, _RAW = "envelope", "arrays", "coterie.raw"
_ERROR = "flower: "
_PAUSE = 0.25
"""Seconds between polls for answers; Flower's own loop waits 3."""
_RETRY, _LONGEST_RETRY = 3.0, 30.0
"""Seconds until a site whose node failed is asked again, doubled with every failure after
the second, up to the longest; the first also between handshakes with new nodes."""
_SPARE = 5.0
"""Seconds that a message outlives its deadline, for clocks that differ."""


def client_app(folder: Path) -> ClientApp:
    """Return the ClientApp of an app folder.

    `Context.state` has what was answered last, for inspection. Personal state is on the site's
    disk, because a SuperNode's memory ends with its process.
    """
    telemetry_off()
    app = ClientApp()

    def reply(message: Message, context: Context) -> Message:
        config = dict(context.node_config)
        for name in ("site", "key", "folder"):
            if name not in config:
                raise ValueError(
                    f"the SuperNode was started without {name}: give --node-config "
                    '\'site="..." key="..." folder="..."\''
                )
        envelope = unpack(relay(pack(from_records(message.content)), folder, config))
        header = peek(envelope)
        context.state["coterie"] = ConfigRecord(
            {"run": header.run, "round": header.round, "kind": header.kind}
        )
        return Message(to_records(envelope), reply_to=message)

    app.train()(reply)
    app.query()(reply)
    return app


def server_app(app: Path) -> ServerApp:
    """Return the ServerApp of an app folder."""
    telemetry_off()
    made = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        from coterie.deploy.coordinator import run_coordinator
        from coterie.deploy.federation import load_agreement

        folder = Path(str(context.run_config["folder"])).expanduser()
        key = Path(str(context.run_config["key"])).expanduser()

        def report(line: str) -> None:
            print(f"coterie: {line}", flush=True)  # `flwr run --stream` shows it

        summary = run_coordinator(
            load_agreement(app), folder, key, lambda log: GridTransport(grid, log), report
        )
        report(f"done: {summary['run']}; coterie verify {summary['run']}")

    made.main()(main)
    return made


def to_records(envelope: Envelope) -> RecordDict:
    """Return an envelope as records."""
    arrays = {
        name: Array(raw.dtype, raw.shape, _RAW, raw.data) for name, raw in envelope.arrays.items()
    }
    header = ConfigRecord({"header": envelope.header, "signature": envelope.signature})
    return RecordDict({_ENVELOPE: header, _ARRAYS: ArrayRecord(arrays)})


def from_records(records: RecordDict) -> Envelope:
    """Return the envelope in records; refuse anything else."""
    if set(records) != {_ENVELOPE, _ARRAYS}:
        received = [str(name)[:40] for name in sorted(records)[:4]]
        raise RefusedError(f"records are {received}, expected an envelope")
    record, arrays = records[_ENVELOPE], records[_ARRAYS]
    if not isinstance(record, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise RefusedError("records have other types than an envelope's")
    header, signature = record.get("header"), record.get("signature")
    if set(record) != {"header", "signature"} or not isinstance(header, bytes):
        raise RefusedError("envelope without a header")
    if not isinstance(signature, bytes):
        raise RefusedError("envelope without a signature")
    return Envelope(header, signature, {str(name): _raw(array) for name, array in arrays.items()})


def _raw(array: Array) -> RawArray:
    """Return an array's bytes; Flower reads its fields from JSON, of any types."""
    if type(array.stype) is not str or array.stype != _RAW:
        raise RefusedError("array was not written by coterie")
    shape = array.shape
    if type(array.dtype) is not str or type(array.data) is not bytes or type(shape) is not tuple:
        raise RefusedError("array without type, shape or bytes")
    if any(type(length) is not int for length in shape):
        raise RefusedError("array with a shape that is not of whole numbers")
    return RawArray(array.dtype, shape, array.data)


class _NodeErrors:
    """Errors of nodes in a row: when to ask again, and lines of the log that sum them up."""

    def __init__(self, log: Callable[..., None]) -> None:
        self._log = log
        self._counts: dict[Hashable, int] = {}

    def note(self, node: Hashable, **facts: str) -> float:
        """Count an error; return the seconds until the node is to be asked again.

        The 1st, 2nd, 4th, 8th, ... in a row are logged: `times` is how many since the last line.
        """
        count = self._counts[node] = self._counts.get(node, 0) + 1
        if count & (count - 1) == 0:
            self._log("node_error", **facts, times=max(count // 2, 1))
        return float(min(_RETRY * 2 ** max(count - 2, 0), _LONGEST_RETRY))

    def answered(self, node: Hashable) -> None:
        """Begin a new row."""
        self._counts.pop(node, None)


class GridTransport:
    """Carries envelopes over a Flower grid.

    A node is identified as a site when it has answered a handshake under the site's key. Nodes that
    appear later, or return under another id, get a handshake when they appear.
    """

    def __init__(self, grid: Grid, log: Callable[..., None]) -> None:
        self._grid, self._log, self._errors = grid, log, _NodeErrors(log)
        self._nodes: dict[str, int] = {}
        self._next_handshake: dict[int, float] = {}
        self._handshakes: dict[str, int] = {}
        self._handshake: Callable[[], Envelope] | None = None
        self._identify: Callable[[Envelope], str] | None = None
        self._next_scan = 0.0

    def connect(
        self,
        handshake: Callable[[], Envelope],
        identify: Callable[[Envelope], str],
        sites: int,
        seconds: float,
    ) -> set[str]:
        """Send handshakes until so many sites are identified or time is up; return the sites."""
        self._handshake, self._identify = handshake, identify
        end = time.monotonic() + seconds
        while len(self._nodes) < sites and time.monotonic() < end:
            self._scan(seconds)
            time.sleep(_PAUSE)
        return set(self._nodes)

    def ask(
        self, requests: Mapping[str, Envelope], seconds: float
    ) -> Iterator[tuple[str, Envelope | str]]:
        """Send requests; yield answers as they come, until all did or time is up.

        A site whose node is absent, or fails, is asked again until time is up.
        """
        end = time.monotonic() + seconds
        unsent, waiting, errors = dict.fromkeys(requests, 0.0), dict[str, str](), dict[str, str]()
        while (unsent or waiting) and time.monotonic() < end:
            self._scan(end - time.monotonic())
            self._send(requests, unsent, waiting, end)
            for number, answer in self._pull(list(waiting)):
                site = waiting.pop(number, None)
                if site is None:  # a duplicate, or a reply to something else
                    continue
                if _is_node_error(answer):
                    wait = self._errors.note(site, site=site, reason=answer)
                    unsent[site] = time.monotonic() + wait
                    errors[site] = answer
                else:
                    self._errors.answered(site)
                    yield site, answer
            if unsent or waiting:
                time.sleep(_PAUSE)
        for site in (*unsent, *waiting.values()):
            if site in errors:  # reported, even if a later request got no answer
                yield site, errors[site]

    def _send(
        self,
        requests: Mapping[str, Envelope],
        unsent: dict[str, float],
        waiting: dict[str, str],
        end: float,
    ) -> None:
        now = time.monotonic()
        ready = [site for site, due in unsent.items() if due <= now and site in self._nodes]
        if not ready:
            return
        messages = [
            _message(requests[site], self._nodes[site], "train", end - now) for site in ready
        ]
        for site, number in zip(ready, self._grid.push_messages(messages), strict=False):
            if number:
                waiting[str(number)] = site
                del unsent[site]

    def _pull(self, numbers: list[str]) -> list[tuple[str, Envelope | str]]:
        """Return the answers that arrived; one that cannot be read does not hide the others."""
        if not numbers:
            return []
        try:
            return [_opened(message) for message in self._grid.pull_messages(numbers)]
        except (httpx.HTTPError, OSError):
            raise  # the SuperLink is gone; the run can be resumed
        except Exception as error:
            if len(numbers) == 1:
                return [(numbers[0], f"message cannot be read ({type(error).__name__})")]
        found = []
        for number in numbers:
            found += self._pull([number])
        return found

    def _read_handshakes(self, identify: Callable[[Envelope], str]) -> None:
        """Identify the sites of nodes that answered a handshake."""
        for number, answer in self._pull(list(self._handshakes)):
            node = self._handshakes.pop(number, None)
            if node is None:
                continue
            if _is_node_error(answer):
                # Its site is not known. The node may recover, so it soon gets another handshake.
                wait = self._errors.note(node, reason=answer)
                self._next_handshake[node] = time.monotonic() + wait
                continue
            try:
                if isinstance(answer, str):
                    raise RefusedError(answer)
                site = identify(answer)
            except RefusedError as error:
                self._log("unknown_node", reason=str(error))
                continue
            self._nodes[site] = node
            self._log("connected", site=site)

    def _scan(self, seconds: float) -> None:
        """Read answers to handshakes, and send handshakes to new nodes."""
        handshake, identify, now = self._handshake, self._identify, time.monotonic()
        if handshake is None or identify is None:
            return
        self._read_handshakes(identify)
        if now < self._next_scan:
            return
        self._next_scan = now + _RETRY
        known = set(self._nodes.values())
        for node in self._grid.get_node_ids():
            if node not in known and self._next_handshake.get(node, -1.0) < now:
                self._next_handshake[node] = now + max(seconds, 10 * _RETRY)
                message = _message(handshake(), node, "query", seconds)
                (number,) = self._grid.push_messages([message])
                self._handshakes[str(number)] = node


def _message(envelope: Envelope, node: int, kind: str, seconds: float) -> Message:
    return Message(to_records(envelope), node, kind, ttl=max(seconds, 1.0) + _SPARE)


def _is_node_error(answer: Envelope | str) -> TypeGuard[str]:
    """Return whether Flower answered for the site: its app could not start, or raised."""
    return isinstance(answer, str) and answer.startswith(_ERROR)


def _opened(message: Message) -> tuple[str, Envelope | str]:
    number = message.metadata.reply_to_message_id
    if message.has_error():
        # Only its code: the reason is the text of an exception, which may quote rows.
        return number, f"{_ERROR}error {message.error.code}"
    try:
        return number, from_records(message.content)
    except RefusedError as error:
        return number, str(error)
