"""Seconds per round over Flower: coterie and plain Flower with an equal payload, in one run.

One SuperLink and four SuperNodes, with TLS and key authentication, run all of these in turn:

- `bare`: Flower's own FedAvg strategy; a ClientApp that returns an array of the same size;
- `bare, quick`: the same ClientApp, asked by a loop that polls as often as coterie does (Flower's
  own polls every 3 s);
- `coterie`: PMTL on the school districts, signed messages, a ledger, releases on disk
  (secure aggregation takes two messages per round, hence twice as long: not measured here).

Usage: python benchmarks/flower.py [--rounds 6] [--repeats 2]
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from coterie.data.config import DataConfig
from coterie.deploy.demo import SITES, Demo, site_config, write_demo
from coterie.deploy.processes import LocalFederation

LIMIT = 1.2
_PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "bare"
version = "1.0.0"
description = "Bare Flower"
license = "Apache-2.0"
dependencies = ["flwr"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "bench"

[tool.flwr.app.components]
serverapp = "bare.server:app"
clientapp = "bare.client:app"

[tool.flwr.app.config]
rounds = 1
size = 1
out = ""
quick = false
"""
_SERVER = """\
import json, time
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class Timed(FedAvg):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.ends = [time.time()]

    def aggregate_train(self, server_round, replies):
        found = super().aggregate_train(server_round, replies)
        self.ends.append(time.time())
        return found


def quick(grid, start, rounds, nodes):
    ends, arrays = [time.time()], start
    for _ in range(rounds):
        content = RecordDict({"arrays": arrays})
        ids = set(grid.push_messages([Message(content, node, "train") for node in nodes]))
        replies = []
        while ids:
            found = list(grid.pull_messages(ids))
            replies += found
            ids -= {message.metadata.reply_to_message_id for message in found}
            if ids:
                time.sleep(0.25)
        mean = np.mean([r.content["arrays"]["w"].numpy() for r in replies], axis=0)
        arrays = ArrayRecord({"w": Array(mean.astype(np.float32))})
        ends.append(time.time())
    return ends


@app.main()
def main(grid, context):
    config = context.run_config
    while len(list(grid.get_node_ids())) < 4:
        time.sleep(0.2)
    start = ArrayRecord({"w": Array(np.zeros(int(config["size"]), dtype=np.float32))})
    rounds = int(config["rounds"])
    if config["quick"]:
        ends = quick(grid, start, rounds, list(grid.get_node_ids()))
    else:
        strategy = Timed(fraction_evaluate=0.0, min_available_nodes=4, min_train_nodes=4)
        strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds)
        ends = strategy.ends
    with open(config["out"], "w") as file:
        json.dump([b - a for a, b in zip(ends[:-1], ends[1:])], file)
"""
_CLIENT = """\
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    received = message.content["arrays"]["w"].numpy()
    arrays = ArrayRecord({"w": Array(received.astype(np.float64))})
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
"""


def write_bare(folder: Path) -> Path:
    (folder / "bare").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(_PROJECT)
    (folder / "bare" / "__init__.py").write_text("")
    (folder / "bare" / "server.py").write_text(_SERVER)
    (folder / "bare" / "client.py").write_text(_CLIENT)
    return folder


def bare(federation: LocalFederation, app: Path, out: Path, config: dict) -> list[float]:
    number = federation.submit(app, {**config, "out": str(out)})
    federation.wait(number, 600)
    return json.loads(out.read_text())


def ours(federation: LocalFederation, app, run: Path) -> list[float]:
    key = str(app.keys / "coordinator.key")
    number = federation.submit(app.folder, {"folder": str(run), "key": key})
    status = federation.wait(number, 900)
    if status != "finished:completed":
        raise SystemExit(f"{status}: {(run / 'log.jsonl').read_text()[-2000:]}")
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    marks = [line for line in lines if line["event"] in ("handshake", "setup", "round")]
    ends = [datetime.fromisoformat(line["time"]).timestamp() for line in marks]
    rounds = [(b - a, line) for a, b, line in zip(ends, ends[1:], marks[1:], strict=False)]
    return [seconds for seconds, line in rounds if line["event"] == "round"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    data = DataConfig(name="districts").open()
    size = data.spec.features + 1
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        plain = write_bare(folder / "bareapp")
        kinds: dict[str, Callable[[LocalFederation, int], list[float]]] = {}
        for name, quick in (("bare", False), ("bare, quick", True)):
            config = {"rounds": arguments.rounds, "size": size, "quick": quick}
            kinds[name] = lambda f, i, n=name, c=config: bare(f, plain, folder / f"{n}{i}.json", c)
        demo = Demo(folder=folder / "demo", rounds=arguments.rounds)
        app = write_demo(demo, data)
        nodes = {site: {**site_config(demo.folder, app, site), "runs": 99} for site in SITES}
        kinds["coterie"] = lambda f, i: ours(f, app, folder / f"run{i}")
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        started = time.monotonic()
        with LocalFederation(folder / "flower", app.keys, nodes) as federation:
            for repeat in range(arguments.repeats):
                for name, run in kinds.items():
                    # The first round starts processes and compiles kernels: it is not counted.
                    seconds[name] += run(federation, repeat)[1:]
                    done = f"{time.monotonic() - started:.0f} s"
                    print(f"{name}: {statistics.median(seconds[name]):.2f} s ({done})", flush=True)
    return report(seconds, size)


def report(seconds: dict[str, list[float]], size: int) -> int:
    middle = {name: statistics.median(found) for name, found in seconds.items()}
    print(f"\n4 SuperNodes, {size} parameters, TLS and keys; seconds per round, median (quartiles)")
    for name, found in seconds.items():
        low, _, high = statistics.quantiles(found, n=4)
        ratio = middle[name] / middle["bare"]
        print(f"{name:16} {middle[name]:6.2f} ({low:.2f} to {high:.2f})  {ratio:.2f} of bare")
    ratio = middle["coterie"] / middle["bare"]
    print(f"coterie / bare = {ratio:.2f}, limit {LIMIT}")
    print(f"coterie / bare, quick = {middle['coterie'] / middle['bare, quick']:.2f}")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
