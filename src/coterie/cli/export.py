"""`coterie export`: one client's model as a file for that client."""

import argparse
import json
from pathlib import Path

from coterie.cli.options import JSON, TRUST, Commands, add_flags, check_file, check_run, command

_MORE = """\
The file holds that client's model, its own means and standard deviations if features are
standardised per client, and public metadata: task, features, classes, model and the guarantee of
the run. It holds nothing of any other client. Give it to that client only: a model discloses what
it learnt from its client's rows.

  safetensors: parameters and metadata; `coterie predict FILE` reads it.
  torch:       a torch.export program (.pt2): torch.export.load(FILE).module()(rows).
  onnx:        a graph with one input per column of the table: text, dates,
    gaps; classes have probabilities (needs coterie[onnx]).

torch takes features, (rows, features), and so does onnx for arrays and plain numbers. Both include
the scaling."""

_SUFFIX = {"safetensors": ".safetensors", "torch": ".pt2", "onnx": ".onnx"}


def add(commands: Commands) -> None:
    """Add `export`."""
    parser = command(
        commands,
        "export",
        "write one client's model to a file: safetensors, torch or ONNX",
        'coterie export runs/districts-pfeb --client "district 1010" --out model.safetensors',
        _MORE,
        action=export,
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a finished run")
    who = parser.add_mutually_exclusive_group(required=True)
    add_flags(
        who, {"--client NAME": "the client", "--all DIR": "one file per client, in this folder"}
    )
    flags = {
        "--format {safetensors,torch,onnx}": "default safetensors",
        "--out FILE": "default NAME with the format's suffix",
    }
    add_flags(parser, flags | TRUST | JSON)
    parser.set_defaults(format="safetensors")


def export(arguments: argparse.Namespace) -> int:
    """Carry out `coterie export`."""
    folder, suffix = (
        check_run(arguments.run, "models", "federation.toml"),
        _SUFFIX[arguments.format],
    )
    if arguments.all is not None and arguments.out is not None:
        raise ValueError("--out names one file, and --all writes one per client: give one of them")
    from coterie.serve import export as library

    if arguments.out is not None:
        paths = {arguments.client: check_file(Path(arguments.out), "--out")}
    else:
        paths = _paths(folder, arguments.client, Path(arguments.all or "."), suffix)
    models = library.read_clients(folder, list(paths), trust=arguments.trust)
    if arguments.all is not None:
        Path(arguments.all).mkdir(parents=True, exist_ok=True)
    writers = {"torch": library.save_torch, "onnx": library.save_onnx}
    for path, model in zip(paths.values(), models, strict=True):
        writers.get(arguments.format, library.save_client)(path, model)
    if arguments.json:
        written = [{"client": name, "file": str(path)} for name, path in paths.items()]
        print(json.dumps({"run": str(folder), "format": arguments.format, "files": written}))
    elif arguments.client is not None:
        path = paths[arguments.client]
        print(f"model of {arguments.client}: {path}; give it to that client only")
    else:
        print(f"{len(paths)} models in {arguments.all}; give each to its client only")
    return 0


def _paths(folder: Path, client: str | None, place: Path, suffix: str) -> dict[str, Path]:
    """Return the path of each model; a client has the same file name with and without --all."""
    from coterie.serve.export import all_clients, file_name, file_names

    known = all_clients(folder)
    if client is not None:
        known = [name for name in known if name.lower() == client.lower()]
    named = dict(zip(known, file_names(known, suffix), strict=True))
    if client is not None:
        named = {client: named.get(client) or file_name(client, suffix)}
    return {name: place / file for name, file in named.items()}
