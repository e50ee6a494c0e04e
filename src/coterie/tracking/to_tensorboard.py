"""TensorBoard's event file of a run, written whole: no queue, no thread, no host's name in it."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coterie.tracking.record import Record

_NAME = "events.out.tfevents.coterie"


def write_events(record: Record, folder: Path) -> Path:
    """Write a record as TensorBoard reads it; what was there of it before is replaced."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{_NAME}.partial"
    with partial.open("wb") as file:
        writer = RecordWriter(file)
        for event in _events(record):
            writer.write(event.SerializeToString())
        writer.flush()
    partial.replace(folder / _NAME)
    return folder


def _events(record: Record) -> Iterator[Any]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    now = time.time()
    yield Event(wall_time=now, file_version="brain.Event:2")
    settings = "\n".join(f"    {key} = {value}" for key, value in record.settings.items())
    tags = "\n".join(f"- {key}: {value}" for key, value in record.tags.items())
    for name, text in (("plan", settings), ("guarantee", record.statement), ("tags", tags)):
        yield Event(wall_time=now, step=0, summary=Summary(value=[_text(name, text)]))
    last = max((step for step, _, _ in record.by_round), default=0)
    final = [(last, f"final/{key}", value) for key, value in record.metrics.items()]
    for step, key, number in (*record.by_round, *final):
        value = Summary.Value(tag=key, simple_value=number)
        yield Event(wall_time=now, step=step, summary=Summary(value=[value]))


def _text(name: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    plugin = SummaryMetadata.PluginData(plugin_name="text")
    return Summary.Value(
        tag=name,
        tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()]),
        metadata=SummaryMetadata(plugin_data=plugin),
    )
