"""The four papers that coterie implements, item by item, and what became of each item here.

One TOML file per paper lists its algorithms, equations, theorems, baselines, data sets, figures and
tables by their printed numbers. `coterie papers` prints them, `tools/papers.py` runs their commands
and writes the tables of docs/papers. This module imports nothing slow.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

Kind = Literal["algorithm", "equation", "theorem", "baseline", "data", "figure", "table"]
Status = Literal["runs", "reproduced", "differs", "not reproduced"]
Machine = Literal["cpu", "gpu", "none"]
_SUFFIX = ".toml"
PAPERS = tuple(
    sorted(
        one.name[: -len(_SUFFIX)] for one in files(__name__).iterdir() if one.name.endswith(_SUFFIX)
    )
)


@dataclass(frozen=True, kw_only=True)
class Item:
    """One numbered thing of a paper.

    Attributes:
        item: Its number as printed, such as "Figure 2" or "Algorithm 1".
        about: What it is, in one line.
        where: The module, flag or setting that has it here.
        status: "runs": implemented, with no number to compare. "reproduced": our number is within
            the paper's stated error, or within `tolerance`. "differs": it is not, and `why` says
            why. "not reproduced": it was not run, and `why` says why.
        command: Remakes it; "" if nothing does.
        quick: A form of the command for tests, of at most some seconds; "" for the command itself.
        machine: What the command needs; "none" without one.
        published: The published number, quoted; "" if there is none.
        ours: Our number from the command; "" if it was not run.
        tolerance: How close "reproduced" is, where the paper states no error.
    """

    paper: str
    item: str
    kind: Kind
    about: str
    where: str = ""
    status: Status
    command: str = ""
    quick: str = ""
    machine: Machine = "none"
    published: str = ""
    ours: str = ""
    tolerance: str = ""
    why: str = ""

    def __post_init__(self) -> None:
        place = f"{self.paper}.toml, {self.item}"
        for name, kinds in (("kind", Kind), ("status", Status), ("machine", Machine)):
            if getattr(self, name) not in get_args(kinds):
                found = ", ".join(get_args(kinds))
                raise ValueError(f"{place}: {name} = {getattr(self, name)!r}; expected {found}")
        if self.status in ("differs", "not reproduced") and not self.why:
            raise ValueError(f"{place}: status {self.status!r} needs a reason (why)")
        if self.status in ("reproduced", "differs") and not (self.published and self.ours):
            raise ValueError(f"{place}: status {self.status!r} needs published and ours")
        if self.status == "runs" and self.published:
            raise ValueError(f"{place}: with a published number it is reproduced, or differs")
        if bool(self.command) != (self.machine != "none"):
            raise ValueError(f"{place}: a command needs a machine, cpu or gpu, and no other item")

    @property
    def anchor(self) -> str:
        """Its place on its page."""
        return "".join(c for c in self.item.lower().replace(" ", "-") if c.isalnum() or c == "-")

    @property
    def page(self) -> str:
        """Its page in the documentation."""
        return f"docs/papers/{self.paper}.md#{self.anchor}"

    def to_json(self) -> dict[str, str]:
        """Return the item for scripts."""
        names = ("paper", "item", "kind", "status", "command", "ours", "published", "page")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Paper:
    """A paper: its citation and its items."""

    key: str
    title: str
    authors: str
    venue: str
    link: str
    items: tuple[Item, ...]

    def count(self, *statuses: Status) -> int:
        """Return the number of items with one of these statuses."""
        return sum(item.status in statuses for item in self.items)


@cache
def read_paper(key: str) -> Paper:
    """Return a paper by its key; raise ValueError for an item that is incomplete."""
    text = files(__name__).joinpath(f"{key}.toml").read_text("utf-8")
    table: dict[str, Any] = tomllib.loads(text)
    items = tuple(Item(paper=key, **item) for item in table["item"])
    found = {name: table[name] for name in ("title", "authors", "venue", "link")}
    return Paper(key, items=items, **found)


def read_papers() -> tuple[Paper, ...]:
    """Return all papers."""
    return tuple(read_paper(key) for key in PAPERS)
