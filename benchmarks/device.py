"""One run on a GPU: pfl-research 0.6, an earlier version of coterie, and this one.

    python benchmarks/device.py --before SOURCE --peer-path DIR [--sweeps 3]

SOURCE is the `src` folder of the earlier version (`git worktree add ../before COMMIT`), and DIR
holds pfl, as `benchmarks/peers.py` says. Every version runs in a process of its own, in turn with
the other. Rows of the table, in client-steps per second:

- whole round: W1 of `benchmarks/peers.py`, 205 clients x 170 images, 100 per round x 10 steps, with
  clip, exact sum, noise, ledger and store; `tf32` is the same with `--precision tf32`;
- the others: `benchmarks/methods.py`, 100 clients x 10 steps per round, and over fedavg of the same
  model and version.

The floor is the time that the arithmetic of W1 takes at the GPU's peak in float32 (67 TFLOP/s on an
H200, 218.8 MFLOP per client-step).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FLOOR = 306_000
WANTED = {
    "cnn": ("fedavg", "naive_dp", "dpfedmtl, local noise", "pmtl, 4 clusters", "related, mean",
            "finetune, kl", "finetune, ewc"),
    "mlp": ("fedavg", "naive_dp", "dpfedmtl, local noise", "pmtl, 4 clusters"),
    "linear": ("fedavg", "naive_dp"),
    "module": ("fedavg", "fedavg, bfloat16", "finetune, kl", "finetune, ewc"),
    "char_lstm": ("fedavg", "fedavg, bfloat16", "finetune, kl", "finetune, ewc"),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", help="src folder of an earlier version", metavar="SOURCE")
    parser.add_argument("--peer-path", metavar="DIR", help="where pfl is, if not installed")
    parser.add_argument("--sweeps", type=int, default=3, help="processes of each version")
    parser.add_argument("--models", nargs="*", default=list(WANTED), choices=list(WANTED))
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given)
        return
    versions = {"now": str(HERE.parent / "src")}
    if given.before:
        versions = {"before": given.before, **versions}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
    peer = []
    for _ in range(given.sweeps):
        peer.append(asked(given, versions["now"], "peers.py", "--device", "cuda")["pfl"])
        for name, source in versions.items():
            own = [__file__, "--measure", "--models", *given.models]
            runs[name].append(asked(given, source, *own))
    show(statistics.median(peer), {name: medians(found) for name, found in runs.items()})


def asked(given: argparse.Namespace, source: str, program: str, *words: str) -> dict[str, float]:
    """Return what a program of this folder prints as its last line, with this version."""
    path = os.pathsep.join([source, str(HERE), os.environ.get("PYTHONPATH", "")])
    peer = ["--peer-path", given.peer_path] if given.peer_path else []
    command = [sys.executable, str(HERE / program), *words, *peer]
    made = subprocess.run(
        command,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    if made.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {made.returncode}")
    last: dict[str, float] = json.loads(made.stdout.splitlines()[-1])
    print(program, source, json.dumps(last), file=sys.stderr, flush=True)
    return last


def measure(given: argparse.Namespace) -> None:
    """Print the speeds of the version on the path."""
    import torch

    import methods
    import peers
    from coterie.models import CNN, MLP, Linear
    from coterie.models.module import Module
    from coterie.models.zoo import CharLSTM
    from coterie.planning.plan import Speed
    from coterie.solvers.sgd import SGD

    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    models = {
        "cnn": CNN(), "mlp": MLP(), "linear": Linear(), "module": Module(methods.Network),
        "char_lstm": CharLSTM(hidden=32),
    }  # fmt: skip
    found = {}
    w1 = argparse.Namespace(device="cuda", rounds=10, block=0)
    found["whole round"] = peers.ours(w1)
    if "tf32" in str(Speed.__annotations__["precision"]):  # versions before do not know it
        found["whole round, tf32"] = peers.ours(w1, precision="tf32")
    sgd = SGD(lr=methods.LR, steps=10, batch=methods.BATCH)
    for name in given.models:
        data = methods.rows_of(models[name], 100).to("cuda")
        for entry in methods.entries(models[name], 100, sgd, "cuda"):
            if entry.name in WANTED[name]:
                methods.client_steps(entry, data, 1, Speed(device="cuda"))  # compiles, records
                speed = methods.client_steps(entry, data, 5, Speed(device="cuda"))
                found[f"{name}: {entry.name}"] = speed
    print(json.dumps(found))


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def show(peer: float, found: dict[str, dict[str, float]]) -> None:
    """Print the table in Markdown."""
    now, before = found["now"], found.get("before", {})
    print(f"pfl-research 0.6: {peer:,.0f} client-steps per second\n")
    print(
        "| client-steps per second | before | now | now / before | before / fedavg | now / fedavg |"
    )
    print("|---|---|---|---|---|---|")
    for name, speed in now.items():
        base = name.split(":")[0] + ": fedavg"
        was = before.get(name)
        share = f"{speed / now[base]:.2f}" if base in now and base != name else ""
        old = f"{was / before[base]:.2f}" if was and share else ""
        gain, was_text = (f"{speed / was:.2f}", f"{was:,.0f}") if was else ("", "")
        print(f"| {name} | {was_text} | {speed:,.0f} | {gain} | {old} | {share} |")
    for version, speeds in found.items():
        whole = speeds["whole round"]
        print(f"{version}: whole round {whole / peer:.0f} x pfl, {whole / FLOOR:.0%} of the floor")


if __name__ == "__main__":
    main()
