"""`coterie export`: one client's model as a file of its own, to be handed to that client."""

import argparse
import json
from pathlib import Path
from typing import Any

from coterie.cli.options import Commands, check_file, command

_MORE = """\
The file holds that client's model, its own means and deviations where rows are scaled by each
client's own rows, and public facts: task, features, classes, the model, and the guarantee of the
run as others see it. Nothing of any other client is in it. Give it to that client alone: a model
that is given away gives away what it learnt of its client's rows.

safetensors: parameters and facts; `coterie predict FILE` reads it.
torch:       a program of torch.export (.pt2): torch.export.load(FILE).module()(rows).
onnx:        a graph with the input "rows" and the output "outputs" (needs coterie[onnx]).
torch and onnx take raw rows, (rows, features), and do the scaling themselves."""

_SUFFIX = {"safetensors": ".safetensors", "torch": ".pt2", "onnx": ".onnx"}


def add(commands: Commands) -> None:
    """Add `export`."""
    parser = command(
        commands,
        "export",
        "one client's model as a file of its own: safetensors, torch or ONNX",
        'coterie export runs/districts-pfeb --client "district 1010" --out model.safetensors',
        _MORE,
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a finished run")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--client", metavar="NAME", help="whose model")
    who.add_argument("--all", metavar="DIR", help="a file for each client, in this folder")
    parser.add_argument(
        "--format", choices=tuple(_SUFFIX), default="safetensors", help="default safetensors"
    )
    parser.add_argument("--out", metavar="FILE", help="default NAME with the format's suffix")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(action=export)


def export(arguments: argparse.Namespace) -> int:
    """Carry out `coterie export`."""
    from coterie.exports import read_clients

    folder, suffix = Path(arguments.run), _SUFFIX[arguments.format]
    if arguments.all is not None and arguments.out is not None:
        raise ValueError("--out names one file, and --all writes one a client: give one of them")
    if arguments.out is not None:
        paths = {arguments.client: check_file(Path(arguments.out), "--out")}
    else:
        paths = _paths(folder, arguments.client, Path(arguments.all or "."), suffix)
    models = read_clients(folder, list(paths))
    if arguments.all is not None:
        Path(arguments.all).mkdir(parents=True, exist_ok=True)
    for path, model in zip(paths.values(), models, strict=True):
        _save(arguments.format, path, model)
    if arguments.json:
        written = [{"client": name, "file": str(path)} for name, path in paths.items()]
        print(json.dumps({"run": str(folder), "format": arguments.format, "files": written}))
    elif arguments.client is not None:
        print(
            f"model of {arguments.client}: {paths[arguments.client]}; give it to that client alone"
        )
    else:
        print(f"{len(paths)} models in {arguments.all}; give each to its client alone")
    return 0


def _paths(folder: Path, client: str | None, place: Path, suffix: str) -> dict[str, Path]:
    """Say where models go: of all clients, or of one, under the same name in either case."""
    from coterie.exports import all_clients, file_name, file_names

    known = all_clients(folder)
    if client is not None:
        known = [name for name in known if name.lower() == client.lower()]
    called = dict(zip(known, file_names(known, suffix), strict=True))
    if client is not None:
        called = {client: called.get(client) or file_name(client, suffix)}
    return {name: place / file for name, file in called.items()}


def _save(format: str, path: Path, model: Any) -> None:
    if format == "safetensors":
        from coterie.exports import save_client

        save_client(path, model)
        return
    from coterie.portable import save_onnx, save_torch

    (save_torch if format == "torch" else save_onnx)(path, model)
