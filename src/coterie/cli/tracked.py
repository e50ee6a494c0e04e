"""`--track`: log finished runs to a tracker. A run is never lost because that fails."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

Runs = Sequence[Path] | Mapping[Path, str]


def tracked(runs: Runs, arguments: argparse.Namespace, group: Path | None = None) -> int:
    """Log finished runs as `--track` asks; return the exit status.

    `group` is the folder of a comparison that the runs belong to, which may have labels for them.
    """
    status = 0
    for kind in dict.fromkeys(arguments.track):
        try:
            places = _log(runs, kind, arguments.track_dir, group)
        except Exception as error:  # any error of a tracker: the runs are paid for
            kept = group or next(iter(runs))
            print(
                f"--track {kind} failed ({error}); the run is kept. Try again: "
                f"`coterie {arguments.command} --resume {kept} --track {kind}`",
                file=sys.stderr,
            )
            status = 1
        else:
            if not arguments.quiet:
                print(f"tracked by {kind}: {', '.join(places)}", file=sys.stderr)
    return status


def _log(runs: Runs, kind: str, where: str | None, group: Path | None) -> list[str]:
    from coterie.tracking import as_kind, close_parent, open_parent, track

    named, place = as_kind(kind), None if where is None else Path(where)
    if group is None:
        return [track(run, named, where=place) for run in runs]
    parent = open_parent(group, named, where=place)
    for run in runs:
        track(run, named, parent=parent, where=place)
    close_parent(group, named, parent, runs, where=place)
    return [parent]
