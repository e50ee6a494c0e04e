"""The billboard: one door, paid before it opens, sealed on both sides."""

import copy
import dataclasses
import math
import os
import pickle
import re
from pathlib import Path

import pytest
import torch

import coterie.privacy.billboard as billboard_module
from coterie.privacy.billboard import Billboard, Bounded, ForgedError, Post, bound
from coterie.privacy.entropy import SeededEntropy, open_entropy
from coterie.privacy.events import Gaussian, NonPrivate
from coterie.privacy.ledger import Ledger, LedgerError, OverspentError
from coterie.privacy.mechanisms import Exact, GaussianSum
from coterie.privacy.transcript import FolderTranscript, MemoryTranscript

MECHANISM = GaussianSum(1.0, 2.0)
TEMPLATE = {"w": torch.zeros(3), "b": torch.zeros(())}


def rows(*factors):
    """Stacked rows, one a factor, inside the bound for |factor| <= 1/2."""
    column = torch.tensor(factors)
    return {"w": column[:, None] * torch.tensor([1.0, 0.0, 0.5]), "b": column}


def part(*factors, mechanism=MECHANISM):
    return bound(mechanism, rows(*factors))[0]


def open_board(folder=None, *, mechanisms=(MECHANISM,) * 3, seed=1, cohort=2.0, ledger=None):
    events = [mechanism.event() for mechanism in mechanisms]
    path = None if folder is None else folder / "ledger.jsonl"
    return Billboard(
        mechanisms=mechanisms,
        template=TEMPLATE,
        cohort=cohort,
        ledger=ledger or Ledger(events, path, "plan"),
        transcript=MemoryTranscript() if folder is None else FolderTranscript(folder / "posts"),
        entropy=lambda index: open_entropy(seed, "noise", index),
    )


@pytest.fixture(params=["memory", "folder"])
def place(request, tmp_path):
    return None if request.param == "memory" else tmp_path


class Spy(GaussianSum):
    """A Gaussian sum that says when it perturbs, and what."""

    seen: list = []  # noqa: RUF012

    def perturb(self, total, entropy):
        self.seen.append({name: leaf.clone() for name, leaf in total.items()})
        return super().perturb(total, entropy)


@pytest.fixture
def spy():
    Spy.seen = []
    return Spy(1.0, 2.0)


def test_a_post_is_the_sum_of_the_parts_and_the_noise_of_its_index(place):
    board = open_board(place)
    post = board.post([part(0.25, 0.5), part(-0.125)])
    zero = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in TEMPLATE.items()}
    noise = MECHANISM.perturb(zero, SeededEntropy(1, "noise", 0))
    assert torch.equal(post.value["w"] - noise["w"], torch.tensor([0.625, 0, 0.3125]).double())
    assert post.value["b"] - noise["b"] == 0.625
    assert (post.index, post.event, post.cohort) == (0, Gaussian(2.0), 2.0)
    assert board.next == 1
    board.ledger.close()


def test_posts_come_in_order_and_stay_readable(place):
    board = open_board(place)
    made = [board.post([part(0.25)]) for _ in range(3)]
    assert [post.index for post in made] == [0, 1, 2]
    assert [post.index for post in board.posts] == [0, 1, 2]
    for post in made:
        again = board.read(post.index)
        assert isinstance(again, Post)
        assert again.event == post.event
        assert all(torch.equal(again.value[name], post.value[name]) for name in TEMPLATE)
    assert not torch.equal(made[0].value["w"], made[1].value["w"])
    board.ledger.close()


def test_reading_what_is_not_out_is_refused(place):
    board = open_board(place)
    for index in (0, -1, 3):
        with pytest.raises(KeyError, match="does not exist"):
            board.read(index)
    assert board.posts == ()
    board.ledger.close()


def test_the_plan_is_not_overspent(place):
    board = open_board(place)
    for _ in range(3):
        board.post([])
    with pytest.raises(OverspentError, match="3 releases"):
        board.post([])
    assert len(board.posts) == 3
    board.ledger.close()


def test_an_overspent_post_does_not_even_ask_for_parts():
    board = open_board(mechanisms=())

    def never():
        raise AssertionError("parts were computed though nothing may be posted")
        yield

    with pytest.raises(OverspentError):
        board.post(never())


def test_the_mean_divides_by_the_expected_cohort_not_the_realised_one():
    for count in (0, 1, 5):
        board = open_board(mechanisms=(Exact(),), cohort=2.5)
        post = board.post([part(0.5, mechanism=Exact()) for _ in range(count)])
        assert post.mean["w"].tolist() == pytest.approx([0.5 * count / 2.5, 0, 0.25 * count / 2.5])
        assert post.mean["w"].dtype == torch.float32


def test_an_empty_cohort_posts_noise_and_is_charged(place):
    board = open_board(place)
    post = board.post([])
    assert board.ledger.charged == {0}
    assert all(bool((leaf != 0).all()) for leaf in post.value.values())
    assert {name: leaf.shape for name, leaf in post.value.items()} == {
        name: leaf.shape for name, leaf in TEMPLATE.items()
    }
    board.ledger.close()


def test_an_empty_stack_of_clients_is_an_empty_contribution():
    board = open_board(mechanisms=(Exact(),))
    empty = {"w": torch.zeros(0, 3), "b": torch.zeros(0)}
    made, kept = bound(Exact(), empty)
    assert kept.shape == (0,)
    assert board.post([made]).value["w"].tolist() == [0, 0, 0]


def test_the_order_and_split_of_parts_do_not_matter():
    factors = [0.1, -0.3, 0.45, 0.2, 1e-3, 7.0, -2.0]
    together = open_board().post([part(*factors)])
    for split in ([part(f) for f in factors], [part(f) for f in reversed(factors)]):
        apart = open_board().post(split)
        added = open_board().post([sum(split[1:], split[0])])
        for name in TEMPLATE:
            assert torch.equal(together.value[name], apart.value[name])
            assert torch.equal(together.value[name], added.value[name])


def test_bound_clips_and_gives_the_factor_kept():
    made, kept = bound(MECHANISM, rows(0.25, 100.0))
    norms = [math.sqrt(f * f * (1 + 0.25 + 1)) for f in (0.25, 100.0)]
    assert kept.tolist() == pytest.approx([1.0, 1 / norms[1]], rel=1e-4)
    assert made.total["b"].item() == pytest.approx(0.25 + 100 / norms[1], abs=1e-3)


def test_rows_that_are_not_finite_do_not_move_the_post():
    bad = rows(0.25, 0.5)
    bad["w"][1, 2] = math.nan
    first = open_board().post([bound(MECHANISM, bad)[0]])
    second = open_board().post([part(0.25)])
    assert all(torch.equal(first.value[name], second.value[name]) for name in TEMPLATE)


# Seals.


def sealed():
    return [part(0.25), open_board().post([part(0.25)])]


def test_neither_type_can_be_built_by_hand():
    total = {"w": torch.zeros(3), "b": torch.zeros(())}
    for seal in ((), (None,), (object(),), (True,)):
        with pytest.raises(ForgedError, match=r"bound\(\)"):
            Bounded(total, MECHANISM, *seal)
        with pytest.raises(ForgedError, match=r"Billboard.post\(\)"):
            Post(total, 0, Gaussian(2.0), 2.0, *seal)


@pytest.mark.parametrize("value", sealed(), ids=["Bounded", "Post"])
def test_replace_cannot_forge(value):
    name = "total" if isinstance(value, Bounded) else "value"
    for changes in ({}, {name: {"w": torch.full((3,), 1e9), "b": torch.zeros(())}}):
        with pytest.raises((ForgedError, ValueError, TypeError)):
            dataclasses.replace(value, **changes)


@pytest.mark.parametrize("value", sealed(), ids=["Bounded", "Post"])
def test_the_seal_cannot_be_read_off_a_sealed_value(value):
    seal = billboard_module._SEAL
    assert getattr(value, "seal", None) is not seal
    assert all(held is not seal for held in vars(value).values())
    assert all(held is not seal for held in dataclasses.astuple(value))


@pytest.mark.parametrize("value", sealed(), ids=["Bounded", "Post"])
def test_fields_cannot_be_set(value):
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, None)


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_is_refused_or_harmless(duplicate):
    for value in sealed():
        try:
            again = duplicate(value)
        except ForgedError:
            continue
        tree = "total" if isinstance(value, Bounded) else "value"
        for name in TEMPLATE:
            assert torch.equal(getattr(again, tree)[name], getattr(value, tree)[name])


@pytest.mark.parametrize(
    "duplicate",
    [
        lambda value: value,
        copy.copy,
        copy.deepcopy,
        lambda value: pickle.loads(pickle.dumps(value)),
    ],
    ids=["itself", "copy", "deepcopy", "pickle"],
)
def test_one_contribution_counts_once_in_a_post(duplicate):
    # Twice the same part is twice the sensitivity that the noise was made for.
    one = part(0.5)
    try:
        two = duplicate(one)
    except ForgedError:
        return
    with pytest.raises((ForgedError, ValueError)):
        open_board().post([one, two])
    with pytest.raises((ForgedError, ValueError)):
        open_board().post([one + two])


def test_a_subclass_is_no_way_around_the_seal():
    with pytest.raises(ForgedError, match="subclassed"):

        class Fake(Bounded):
            def __post_init__(self, seal):
                pass


def test_the_name_of_the_seal_occurs_in_one_source_file():
    source = Path(billboard_module.__file__).parents[1]
    holders = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r"\b_SEAL\b", path.read_text(encoding="utf-8"))
    }
    assert holders == {"privacy/billboard.py"}


@pytest.mark.parametrize(
    "fake",
    [None, {"w": torch.zeros(3), "b": torch.zeros(())}, torch.zeros(3), "part", 0],
    ids=["None", "tree", "tensor", "text", "zero"],
)
def test_only_bounded_contributions_are_admitted(fake):
    with pytest.raises(ForgedError, match=r"made by bound\(\)"):
        open_board().post([fake])


def test_a_post_is_no_contribution():
    with pytest.raises(ForgedError):
        open_board().post([open_board().post([])])


@pytest.mark.parametrize(
    "other", [GaussianSum(10.0, 2.0), GaussianSum(1.0, 1.0), Exact()], ids=repr
)
def test_a_contribution_of_another_mechanism_is_refused(other):
    with pytest.raises(ValueError, match="mechanism of this round"):
        open_board().post([part(0.25, mechanism=other)])
    with pytest.raises(ValueError, match="different mechanisms"):
        part(0.25) + part(0.25, mechanism=other)


def test_each_round_has_its_own_mechanism():
    first, second = GaussianSum(1.0, 2.0), GaussianSum(1.0, 4.0)
    board = open_board(mechanisms=(first, second))
    assert (board.mechanism(0), board.mechanism(1)) == (first, second)
    board.post([part(0.25, mechanism=first)])
    with pytest.raises(ValueError, match="mechanism"):
        board.post([part(0.25, mechanism=first)])
    assert board.post([part(0.25, mechanism=second)]).event == Gaussian(4.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"w": torch.zeros(1, 4), "b": torch.zeros(1)},
        {"w": torch.zeros(1, 3), "b": torch.zeros(1, 1)},
        {"w": torch.zeros(1, 3)},
        {"w": torch.zeros(1, 3), "b": torch.zeros(1), "extra": torch.zeros(1)},
        {"w": torch.zeros(1, 1), "b": torch.zeros(1)},  # would broadcast
    ],
)
def test_a_contribution_of_other_shapes_is_refused(wrong):
    with pytest.raises(ValueError, match="shapes"):
        open_board().post([bound(MECHANISM, wrong)[0]])


def test_what_is_posted_is_what_is_charged():
    # The ledger's events are what epsilon is computed from: they must be the mechanisms' own.
    for events in (
        [Gaussian(20.0)] * 3,
        [Gaussian(2.0)] * 2,
        [Gaussian(2.0)] * 4,
        [NonPrivate()] * 3,
    ):
        with pytest.raises(ValueError, match=r"."):
            open_board(ledger=Ledger(events))


def test_no_privacy_is_posted_as_such():
    board = open_board(mechanisms=(Exact(),))
    post = board.post([part(3.0, mechanism=Exact())])
    assert post.event == NonPrivate()
    assert post.value["b"] == 3.0


# Charges, crashes and redoing.


def test_the_charge_is_on_disk_before_parts_are_asked_for_and_before_noise(tmp_path, spy):
    board = open_board(tmp_path, mechanisms=(spy,) * 2)
    path = tmp_path / "ledger.jsonl"
    seen = []

    def parts():
        seen.append(path.read_bytes().endswith(b'{"charge": 0}\n'))
        yield part(0.25, mechanism=spy)

    assert b"charge" not in path.read_bytes()
    board.post(parts())
    assert seen == [True]
    assert len(spy.seen) == 1
    board.ledger.close()


def test_the_charge_is_synced_before_perturb_is_called(tmp_path, monkeypatch):
    order = []
    sync = os.fsync

    def record(descriptor):
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        lines = target.read_bytes().splitlines() if target.is_file() else [b""]
        order.append((target.name, lines[-1] if target.suffix == ".jsonl" else None))
        sync(descriptor)

    class Watched(GaussianSum):
        def perturb(self, total, entropy):
            order.append(("perturb", None))
            return super().perturb(total, entropy)

    monkeypatch.setattr(os, "fsync", record)
    board = open_board(tmp_path, mechanisms=(Watched(1.0, 2.0),))
    order.clear()
    board.post([])
    names = [name for name, _ in order]
    assert order[0] == ("ledger.jsonl", b'{"charge": 0}')
    assert names.index("perturb") == 1
    # Then the post (content, then its name), and the release last.
    assert names[2:] == ["000000.npz.partial", "posts", "ledger.jsonl"]
    assert order[-1][1].startswith(b'{"release": 0')
    board.ledger.close()


def test_if_the_charge_fails_nothing_is_computed(spy):
    class Broken(Ledger):
        def charge(self, index):
            raise OSError("disk full")

    board = open_board(mechanisms=(spy,), ledger=Broken([spy.event()]))
    asked = []

    def parts():
        asked.append(1)
        yield part(0.25, mechanism=spy)

    with pytest.raises(OSError, match="disk full"):
        board.post(parts())
    assert asked == spy.seen == []


def broken_parts():
    yield part(0.25)
    raise RuntimeError("a client failed")


def test_a_failure_leaves_the_index_charged_and_the_next_post_redoes_it(place):
    board = open_board(place, seed=None)
    with pytest.raises(RuntimeError, match="a client failed"):
        board.post(broken_parts())
    assert board.ledger.charged == {0}
    assert board.ledger.released == {}
    assert board.next == 0
    assert board.posts == ()
    post = board.post([part(0.25)])
    assert post.index == 0
    assert board.ledger.charged == {0}
    if place is not None:
        text = (place / "ledger.jsonl").read_bytes()
        assert text.count(b'"charge"') == 1
        assert text.count(b'"release"') == 1
    board.ledger.close()


@pytest.mark.parametrize("bad", [part(0.25, mechanism=Exact()), None], ids=["mechanism", "type"])
def test_a_refused_part_releases_nothing(bad):
    board = open_board()
    with pytest.raises((ValueError, ForgedError)):
        board.post([part(0.25), bad])
    assert board.next == 0
    assert board.posts == ()


def test_a_redone_post_has_fresh_noise(tmp_path, spy, monkeypatch):
    board = open_board(tmp_path, mechanisms=(spy,), seed=None)
    values = []
    perturb = Spy.perturb

    def dying(self, total, entropy):
        values.append(perturb(self, total, entropy))
        if len(values) == 1:
            raise RuntimeError("killed after the noise was drawn")
        return values[-1]

    monkeypatch.setattr(Spy, "perturb", dying)
    with pytest.raises(RuntimeError, match="killed"):
        board.post([])
    board.ledger.close()
    board = open_board(tmp_path, mechanisms=(spy,), seed=None)
    post = board.post([])
    assert len(values) == 2
    assert torch.equal(post.value["w"], values[1]["w"])
    assert not torch.equal(values[0]["w"], values[1]["w"])
    assert (tmp_path / "ledger.jsonl").read_bytes().count(b'"charge"') == 1
    board.ledger.close()


def files(folder):
    return {path.name: path.read_bytes() for path in (folder / "posts").iterdir()}


def crash_before_release(board, folder, monkeypatch, parts=()):
    """Write a post's file and die before the ledger says so; give the files as they then are."""
    with monkeypatch.context() as patch:

        def dead(self, index, digest):
            raise KeyboardInterrupt

        patch.setattr(Ledger, "release", dead)
        with pytest.raises(KeyboardInterrupt):
            board.post(parts)
    return files(folder)


def test_a_post_file_without_a_release_line_is_never_redone(tmp_path, monkeypatch):
    board = open_board(tmp_path, seed=None)
    kept = crash_before_release(board, tmp_path, monkeypatch)
    board.ledger.close()
    again = open_board(tmp_path, seed=None)
    assert again.next == 1
    assert again.ledger.released.keys() == {0}
    assert files(tmp_path) == kept
    assert again.post([]).index == 1
    assert files(tmp_path)["000000.npz"] == kept["000000.npz"]
    again.ledger.close()


def test_nor_is_it_redone_by_the_same_process(tmp_path, monkeypatch):
    # The file has its final name: others may have read it. Fresh noise under the same charge would
    # be a second release.
    board = open_board(tmp_path, seed=None)
    kept = crash_before_release(board, tmp_path, monkeypatch)
    with pytest.raises(OverspentError, match="never made twice"):
        board.post([])
    assert files(tmp_path)["000000.npz"] == kept["000000.npz"]
    board.ledger.close()


def test_posts_that_no_ledger_knows_are_not_overwritten(tmp_path):
    # The ledger is lost (or was never on disk) but posts are there: whoever read them has seen
    # releases that this account would not count.
    board = open_board(tmp_path, seed=None)
    board.post([part(0.25)])
    kept = files(tmp_path)
    board.ledger.close()
    (tmp_path / "ledger.jsonl").unlink()
    with pytest.raises(ValueError, match="never charged"):
        open_board(tmp_path, seed=None)
    assert files(tmp_path) == kept


def test_a_closed_billboard_posts_nothing(tmp_path):
    board = open_board(tmp_path)
    board.ledger.close()
    with pytest.raises((LedgerError, ValueError)):
        board.post([])
    assert files(tmp_path) == {}


def test_a_closed_billboard_does_not_redo_a_charged_post_either(tmp_path):
    # The lock is gone: another process may be redoing this very post, with other noise.
    board = open_board(tmp_path, seed=None)
    with pytest.raises(RuntimeError, match="a client failed"):
        board.post(broken_parts())
    board.ledger.close()
    with pytest.raises((LedgerError, ValueError)):
        board.post([])
    assert files(tmp_path) == {}


def test_a_stray_file_among_the_posts_is_ignored(tmp_path):
    board = open_board(tmp_path)
    board.post([])
    board.ledger.close()
    (tmp_path / "posts" / "notes.npz").write_bytes(b"")
    board = open_board(tmp_path)
    assert board.next == 1
    board.ledger.close()


def test_posting_from_within_a_post_is_refused():
    board = open_board(seed=None)

    def nested():
        board.post([])
        yield part(0.25)

    with pytest.raises(RuntimeError, match="one after another"):
        board.post(nested())
    assert board.posts == ()


def test_released_posts_are_read_back_by_the_next_process(tmp_path):
    board = open_board(tmp_path)
    made = [board.post([part(0.25)]), board.post([])]
    board.ledger.close()
    again = open_board(tmp_path)
    assert again.next == 2
    for before, after in zip(made, again.posts, strict=True):
        assert all(torch.equal(before.value[name], after.value[name]) for name in TEMPLATE)
    again.ledger.close()


@pytest.mark.parametrize("damage", ["missing", "altered", "empty", "other post"])
def test_a_missing_or_altered_post_is_refused(tmp_path, damage):
    board = open_board(tmp_path)
    board.post([part(0.25)])
    board.post([])
    board.ledger.close()
    path = tmp_path / "posts" / "000000.npz"
    if damage == "missing":
        path.unlink()
    elif damage == "altered":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.write_bytes((tmp_path / "posts" / "000001.npz").read_bytes())
    with pytest.raises(ValueError, match="release 0 is missing or altered"):
        open_board(tmp_path)


def test_a_refused_billboard_lets_go_of_the_ledger(tmp_path):
    board = open_board(tmp_path)
    board.post([])
    board.ledger.close()
    path = tmp_path / "posts" / "000000.npz"
    content = path.read_bytes()
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="altered") as refused:
        open_board(tmp_path)
    path.write_bytes(content)
    again = open_board(tmp_path)
    assert again.next == 1
    again.ledger.close()
    assert refused.value is not None


def test_changing_a_post_does_not_change_the_transcript(place):
    board = open_board(place)
    post = board.post([part(0.25)])
    before = post.value["w"].clone()
    post.value["w"].mul_(0)
    assert torch.equal(board.read(0).value["w"], before)
    board.read(0).value["w"].mul_(0)
    assert torch.equal(board.read(0).value["w"], before)
    board.ledger.close()


def test_changing_a_part_after_it_was_bounded_does_not_exceed_the_bound():
    # In-place arithmetic on what `bound` returned, or on the rows it was given, is an easy slip.
    given = rows(0.25)
    made, _ = bound(MECHANISM, given)
    given["w"].mul_(1e9)
    assert made.total["w"].abs().max() <= 1


def test_a_release_with_its_noise_takes_no_further_part_and_is_the_same(place):
    early, late = open_board(place), open_board(None)
    with early.charged(0) as release:
        release.add(part(0.25))
        release.perturb()
        release.perturb()  # once, however often it is asked for
        with pytest.raises(RuntimeError, match="no part may be added"):
            release.add(part(0.5))
        assert early.next == 0  # nothing is out
        post = release.publish()
    assert torch.equal(post.value["w"], late.post([part(0.25)]).value["w"])
    early.ledger.close()


def test_noise_that_is_not_published_is_forgotten(place):
    board = open_board(place, seed=None)
    with board.charged(0) as release:
        release.perturb()
        (unpublished, _), board_next = release._ready, board.next
    assert release._ready is None and board_next == 0
    with pytest.raises(RuntimeError, match="closed"):
        release.publish()
    post = board.post([])  # under the same charge, with fresh noise
    assert board.ledger.charged == {0}
    assert not torch.equal(post.value["w"], unpublished.value["w"])
    board.ledger.close()
