"""What a command has to say when it is done."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Told:
    """What a command has to say, and its exit status."""

    out: str
    err: str = ""
    status: int = 0
