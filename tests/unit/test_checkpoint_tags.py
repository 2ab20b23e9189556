"""Checkpoints under tags: which one is meant, what `latest` may hold, which are deleted, what a save leaves.

Oracle: the folders that the test made. Tolerance: none. How engines save and load them is tested with several
ranks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.synthetic_checkpoint import edit_manifest, save, write_rank_files
from zero_strategy.checkpoint import staging, tags
from zero_strategy.checkpoint.folders import FolderLock, lock_folder
from zero_strategy.checkpoint.format import CheckpointReader
from zero_strategy.checkpoint.own_files import MANIFEST_NAME
from zero_strategy.checkpoint.records import new_checkpoint_id
from zero_strategy.errors import CheckpointError, ConfigError


def save_tags(outer: Path, *names: str) -> None:
    """Save one after the other; each holds the number of its place."""
    for number, name in enumerate(names):
        save(outer / name, {"w": torch.full((50,), float(number))}, world_size=2)


def value_in(path: Path, tag: str | None = None) -> float:
    with CheckpointReader(path, tag=tag) as reader:
        return reader.read("model/w", 0, 1).item()


# -- which one is meant --


def test_a_checkpoint_is_found_by_its_folder_by_its_tag_and_by_the_outer_folder(tmp_path: Path) -> None:
    save_tags(tmp_path, "a")
    assert value_in(tmp_path / "a") == value_in(tmp_path, "a") == value_in(tmp_path) == 0
    save_tags(tmp_path, "a", "b", "c")
    (tmp_path / "latest").write_text("b")  # as DeepSpeed writes it
    assert (value_in(tmp_path), value_in(tmp_path, "c"), value_in(tmp_path / "a")) == (1, 2, 0)
    (tmp_path / "latest").write_text("c\n")
    assert value_in(tmp_path) == 2


def test_what_a_killed_save_left_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    save_tags(tmp_path, "a", f".b.{new_checkpoint_id()}.partial")
    assert tags.tags_in(tmp_path) == ["a"]
    assert value_in(tmp_path) == 0


def test_an_ambiguous_or_missing_checkpoint_is_refused_with_what_there_is(tmp_path: Path) -> None:
    save_tags(tmp_path, "a", "b", "c")
    (tmp_path / "c" / MANIFEST_NAME).write_text("{}")
    latest = tmp_path / "latest"
    with pytest.raises(CheckpointError, match=r"(?s)holds 3 checkpoints: a, b, c.*'latest'.*its tag"):
        tags.choose(tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint 'd'.*Complete, newest first: b, a"):
        tags.choose(tmp_path, "d")
    with pytest.raises(CheckpointError, match=r"(?s)is a checkpoint.*'b' was asked for.*Leave the tag out"):
        tags.choose(tmp_path / "a", "b")
    for text in ("d", "../a", "", "a\nb", "/etc", "latest", ".hidden", "\x00", "x" * 1000):
        latest.write_text(text)
        with pytest.raises(CheckpointError, match=r"(?s)latest.*Complete, newest first: b, a"):
            tags.choose(tmp_path)
    latest.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"(?s)latest.*\\xff"):
        tags.choose(tmp_path)
    latest.write_text("c")  # is there, and is broken
    with pytest.raises(CheckpointError, match=r"(?s)another program.*Complete in .*: b, a; pass one"):
        CheckpointReader(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"(?s)incomplete"):
        CheckpointReader(tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"(?s)no complete checkpoint.*found: nothing"):
        tags.choose(tmp_path / "empty", "a")


@pytest.mark.parametrize("tag", ["", "a/b", "..", ".a", "a\\b", " a", "a\n", "latest", "x" * 201, 3, None])
def test_what_cannot_be_a_folder_is_no_tag(tag: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)is no tag"):
        tags.check_tag(tag)


def test_a_save_that_would_hide_a_checkpoint_or_be_hidden_is_refused(tmp_path: Path) -> None:
    save_tags(tmp_path, "a")
    tags.check_outer(tmp_path, "b")
    tags.check_outer(tmp_path, None)
    with pytest.raises(CheckpointError, match=r"(?s)itself a checkpoint"):
        tags.check_outer(tmp_path / "a", "b")
    tags.point_to(tmp_path, "a", new_checkpoint_id())
    with pytest.raises(CheckpointError, match=r"(?s)Pass a tag"):
        tags.check_outer(tmp_path, None)
    (tmp_path / "other" / "latest").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"(?s)is a folder"):
        tags.check_outer(tmp_path / "other", "b")


# -- which are deleted --


def test_the_oldest_complete_ones_are_deleted_and_nothing_else(tmp_path: Path) -> None:
    save_tags(tmp_path, "old", "notes", "broken", "z", "short", "b", "a", "new")
    (tmp_path / "notes" / "why.txt").write_text("mine")
    (tmp_path / "broken" / MANIFEST_NAME).write_text("{}")
    rank_file = next((tmp_path / "short").glob("rank-*"))
    os.truncate(rank_file, 10)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "text").write_text("mine")
    tags.remove_oldest(tmp_path, "new", keep_last=3)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"notes", "broken", "short", "b", "a", "new", "foreign", "text"}
    assert (tmp_path / "notes" / "why.txt").exists() and value_in(tmp_path / "notes") == 1
    tags.remove_oldest(tmp_path, "new", keep_last=1)
    assert {path.name for path in tmp_path.iterdir()} == left - {"a", "b"}


def test_the_one_saved_last_stays_whatever_the_clock_says(tmp_path: Path) -> None:
    save_tags(tmp_path, "a", "b", "new")
    edit_manifest(tmp_path / "new", lambda document: document.update(created="1999-01-01T00:00:00+00:00"))
    tags.remove_oldest(tmp_path, "new", keep_last=1)
    assert tags.tags_in(tmp_path) == ["new"]


def test_nothing_is_deleted_for_a_newest_that_is_not_there(tmp_path: Path) -> None:
    save_tags(tmp_path, "a", "b")
    tags.remove_oldest(tmp_path, "elsewhere", keep_last=1)
    assert tags.tags_in(tmp_path) == ["a", "b"]


def test_what_a_link_leads_to_is_neither_deleted_nor_counted_nor_tidied_up(tmp_path: Path) -> None:
    outer, data = tmp_path / "runs", tmp_path / "data"
    save_tags(outer, "a", "b", "c", "d", "new")
    save_tags(data, "base", "c")
    write_rank_files(data / "base", {"model/w": torch.ones(50)}, 2, new_checkpoint_id())  # of a killed save
    for name, target in {"best": "b", "last": "new", "base": data / "base", "other": data / "c"}.items():
        (outer / name).symlink_to(target)
    (outer / "nowhere").symlink_to("gone")
    (outer / "round").symlink_to("round")
    elsewhere = {path: path.lstat().st_ino for path in data.rglob("*")}
    tags.remove_superseded(outer)
    tags.remove_oldest(outer, "new", keep_last=2)
    assert tags.tags_in(outer) == ["b", "base", "best", "d", "last", "new", "other"]
    assert {path: path.lstat().st_ino for path in data.rglob("*")} == elsewhere
    assert (value_in(outer, "best"), value_in(outer, "last")) == (1, 4)
    assert [complete.tag for complete in tags.complete_in(outer)] == ["b", "d", "new"]
    for name in ("best", "base"):
        with pytest.raises(CheckpointError, match=r"(?s)is a link to .* was not deleted"):
            staging.delete(outer / name)
    assert (outer / "best").is_symlink() and {
        path: path.lstat().st_ino for path in data.rglob("*")
    } == elsewhere


def test_a_checkpoint_that_is_being_saved_into_is_not_deleted(tmp_path: Path) -> None:
    save_tags(tmp_path, "a", "new")
    lock = lock_folder(tmp_path / "a")
    tags.remove_oldest(tmp_path, "new", keep_last=1)
    assert tags.tags_in(tmp_path) == ["a", "new"]
    lock.release()
    tags.remove_oldest(tmp_path, "new", keep_last=1)
    assert tags.tags_in(tmp_path) == ["new"]


# -- where a save writes --


def begun(path: Path, *, is_alone: bool = False) -> tuple[staging.Staging, FolderLock]:
    stage = staging.staging_of(path, new_checkpoint_id(), in_place=path.exists())
    lock = staging.begin(stage, is_alone=is_alone)
    assert lock.is_held
    return stage, lock


def test_a_new_path_appears_when_all_of_it_is_there(tmp_path: Path) -> None:
    stage, lock = begun(tmp_path / "runs" / "a")
    assert not stage.final.exists() and stage.target.parent == stage.final.parent
    save(stage.target, {"w": torch.ones(5)}, world_size=2)
    staging.publish(stage)
    lock.release()
    assert value_in(tmp_path / "runs" / "a") == 1
    assert os.listdir(tmp_path / "runs") == ["a"]
    again, lock = begun(tmp_path / "runs" / "a")
    assert again.target == again.final
    staging.discard(again)  # of a folder that was there nothing is removed
    lock.release()
    assert value_in(tmp_path / "runs" / "a") == 1


def test_a_folder_made_in_the_meantime_is_not_replaced(tmp_path: Path) -> None:
    stage, lock = begun(tmp_path / "a")
    save(stage.target, {"w": torch.ones(5)}, world_size=2)
    save(tmp_path / "a", {"w": torch.zeros(5)}, world_size=2)
    with pytest.raises(CheckpointError, match=r"(?s)could not be moved.*something else was put there"):
        staging.publish(stage)
    staging.discard(stage)
    lock.release()
    assert os.listdir(tmp_path) == ["a"] and value_in(tmp_path / "a") == 0


def test_leftovers_of_the_same_name_are_removed_and_those_of_others_only_among_tags(tmp_path: Path) -> None:
    leftovers = {name: tmp_path / f".{name}.{new_checkpoint_id()}.partial" for name in ("a", "b", "c")}
    for path in leftovers.values():
        save(path, {"w": torch.ones(5)}, world_size=2)
    (leftovers["c"] / "notes.txt").write_text("mine")
    foreign = [tmp_path / ".a.partial", tmp_path / ".a.0123.partial", tmp_path / "a.0123456789abcdef.partial"]
    for path in foreign:
        save(path, {"w": torch.ones(5)}, world_size=2)
    stage, lock = begun(tmp_path / "a")
    staging.discard(stage)
    lock.release()
    assert not leftovers["a"].exists() and leftovers["b"].exists() and leftovers["c"].exists()
    stage, lock = begun(tmp_path / "a", is_alone=True)
    staging.discard(stage)
    lock.release()
    assert not leftovers["b"].exists()
    assert os.listdir(leftovers["c"]) == ["notes.txt"]
    assert all((path / MANIFEST_NAME).exists() for path in foreign)


def test_what_a_killed_save_left_inside_a_checkpoint_is_removed_by_the_next_under_any_tag(
    tmp_path: Path,
) -> None:
    save_tags(tmp_path, "a", "b", "busy", "broken")
    complete = set(tmp_path.rglob("*"))
    for tag in ("a", "busy", "broken"):
        write_rank_files(tmp_path / tag, {"model/w": torch.ones(50)}, 2, new_checkpoint_id())
        (tmp_path / tag / "notes.txt").write_text("mine")
    (tmp_path / "broken" / MANIFEST_NAME).write_text("{}")
    lock = lock_folder(tmp_path / "busy")
    tags.remove_superseded(tmp_path)
    lock.release()
    added = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")} - {
        path.relative_to(tmp_path) for path in complete
    }
    assert sum(path.parts[0] == "a" for path in added) == 1  # the notes
    assert sum(path.parts[0] == "busy" for path in added) == 3
    assert sum(path.parts[0] == "broken" for path in added) == 3
    assert value_in(tmp_path, "a") == 0


def test_another_save_to_the_same_place_is_refused_and_one_to_another_place_left_alone(
    tmp_path: Path,
) -> None:
    stage, lock = begun(tmp_path / "a")
    for is_alone in (False, True):
        with pytest.raises(CheckpointError, match=f"(?s)Another save into {tmp_path / 'a'} is going on"):
            begun(tmp_path / "a", is_alone=is_alone)
        other, its_lock = begun(tmp_path / "b", is_alone=is_alone)
        assert stage.target.exists()
        staging.discard(other)
        its_lock.release()
    lock.release()
    assert [path.name for path in tmp_path.iterdir()] == [stage.target.name]


def test_a_lock_ends_when_it_is_released_also_while_a_forked_process_has_it_open(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path)
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        with pytest.raises(CheckpointError, match="is going on"):
            lock_folder(tmp_path)
        lock.release()
        lock.release()
        with lock_folder(tmp_path) as again:
            assert again.is_held
        with lock_folder(tmp_path) as again:
            assert again.is_held
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_without_locks_nothing_is_taken_for_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    stage, lock = begun(tmp_path / "a")
    save(stage.target, {"w": torch.ones(5)}, world_size=2)
    lock.release()
    (tmp_path / "incomplete").mkdir()
    write_rank_files(tmp_path / "incomplete", {"model/w": torch.ones(50)}, 2, new_checkpoint_id())
    monkeypatch.setattr(fcntl, "flock", refuse)
    for name in ("a", "b", "incomplete"):
        other = staging.staging_of(tmp_path / name, new_checkpoint_id(), in_place=name == "incomplete")
        assert not staging.begin(other, is_alone=True).is_held
        staging.discard(other)
    assert len(list(stage.target.iterdir())) == 3 and len(list((tmp_path / "incomplete").iterdir())) == 2


def test_latest_is_written_under_a_name_of_its_own_and_what_killed_saves_left_goes(tmp_path: Path) -> None:
    save_tags(tmp_path, "a", "b")
    under_way, left = (tmp_path / f".latest.{new_checkpoint_id()}.tmp" for _ in range(2))
    under_way.write_text("b")  # of another save that goes on
    left.write_text("a")
    os.utime(left, (0, 0))
    tags.point_to(tmp_path, "a", new_checkpoint_id())
    tags.remove_superseded(tmp_path)
    assert (tmp_path / "latest").read_text() == "a\n"
    assert {path.name for path in tmp_path.glob(".*")} == {under_way.name}
