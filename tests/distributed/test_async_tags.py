"""Asynchronous saves under tags, and of parts: what follows the commit happens on a thread, or is raised.

Oracles: what a synchronous save leaves, byte for byte but for ids; the folder's listing. A save is
held back by stopping its writer process, never by a time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zero_strategy as zs
from tests.distributed.state_support import LAYOUTS, assert_same, engine_of, train, whole_state
from tests.distributed.test_async_save import begun, files_of, held_back, raises_at
from tests.harness import distributed, expect_error, rank, subtest
from zero_strategy.checkpoint import tags


def names_in(folder: Path) -> set[str]:
    """Return what is in a folder, hidden or not; the same on all ranks, if nobody writes."""
    dist.barrier()
    found = set(os.listdir(folder))
    dist.barrier()
    return found


def the_pointer_and_what_is_too_old_follow_when_the_checkpoint_is_there(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    engine, optimizer = begun(3, tmp_path / "first")
    for number in (2, 3):
        engine.save_checkpoint(runs, {"number": number}, tag=f"step-{number}", keep_last=2, asynchronous=True)
        train(engine.model, optimizer, 1)
    engine.wait_for_checkpoint()
    assert names_in(runs) == {"step-2", "step-3", "latest"}
    expected = whole_state(engine)
    with held_back(engine, 1):
        engine.save_checkpoint(runs, {"number": 4}, tag="step-4", keep_last=2, asynchronous=True)
        train(engine.model, optimizer, 1)
        found = {name for name in names_in(runs) if not name.startswith(".")}
        assert found == {"step-2", "step-3", "latest"} and (runs / "latest").read_text() == "step-3\n"
    engine.wait_for_checkpoint()
    assert names_in(runs) == {"step-3", "step-4", "latest"}
    assert engine.load_checkpoint(runs) == {"number": 4}
    assert_same(whole_state(engine), expected)
    engine.save_checkpoint(runs, {"number": 4}, tag="again", asynchronous=True)
    engine.wait_for_checkpoint()
    assert files_of(runs / "again") == files_of(runs / "step-4")
    engine.close()


def a_save_ends_where_it_began_though_the_script_has_gone_elsewhere(tmp_path: Path) -> None:
    for place in ("one", "two"):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
    engine, _ = begun(3, tmp_path / "first")
    before = os.getcwd()
    try:
        os.chdir(tmp_path / "two")
        for tag in ("a", "b"):
            engine.save_checkpoint("runs", tag=tag)
        os.chdir(tmp_path / "one")
        with held_back(engine, 1):
            engine.save_checkpoint("runs", tag="c", keep_last=1, asynchronous=True)
            os.chdir(tmp_path / "two")
        engine.wait_for_checkpoint()
    finally:
        os.chdir(before)
    assert names_in(tmp_path / "one" / "runs") == {"c", "latest"}
    assert names_in(tmp_path / "two" / "runs") == {"a", "b", "latest"}
    assert (tmp_path / "two" / "runs" / "latest").read_text() == "b\n"
    engine.close()


def a_pointer_that_cannot_be_written_is_raised_by_the_next_step_and_the_checkpoint_stays(
    tmp_path: Path,
) -> None:
    def refuse(path: Path, content: bytes, temporary: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    runs = tmp_path / "runs"
    engine, optimizer = begun(3, tmp_path / "first")
    engine.save_checkpoint(runs, 1, tag="a", asynchronous=True)
    engine.wait_for_checkpoint()
    replace_file, tags.replace_file = tags.replace_file, refuse
    try:
        engine.save_checkpoint(runs, 2, tag="b", keep_last=1, asynchronous=True)
        raises_at(engine, optimizer, ["[rank 0]", "latest could not be written", "'b' is complete"])
    finally:
        tags.replace_file = replace_file
    assert names_in(runs) == {"a", "b", "latest"}  # nothing is deleted: a is still what `latest` names
    assert (engine.load_checkpoint(runs), engine.load_checkpoint(runs, "b")) == (1, 2)
    engine.save_checkpoint(runs, 3, tag="c", keep_last=1, asynchronous=True)
    engine.wait_for_checkpoint()
    assert names_in(runs) == {"c", "latest"}
    engine.close()


def a_save_that_fails_leaves_the_tags_as_they_were(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    engine, optimizer = begun(3, tmp_path / "first")
    engine.save_checkpoint(runs, 1, tag="a", asynchronous=True)
    engine.save_checkpoint(runs, 2, tag="b", keep_last=1, asynchronous=True)
    engine.wait_for_checkpoint()
    with held_back(engine, 1):
        engine.save_checkpoint(runs, 3, tag="c", keep_last=1, asynchronous=True)
        if rank() == 1:
            engine._saves.writer.kill()
    raises_at(engine, optimizer, ["[rank 1]", "SIGKILL", "untouched"])
    assert names_in(runs) == {"b", "latest"} and engine.load_checkpoint(runs) == 2
    with expect_error(zs.ConfigError, "'a/b' is no tag"):
        engine.save_checkpoint(runs, tag="a/b", asynchronous=True)
    engine.close()


def parts_of_a_state_are_saved_as_they_are_at_once(tmp_path: Path) -> None:
    parts: list[dict[str, Any]] = [
        {"trainable_only": True},
        {"weights_only": True, "trainable_only": True},
    ]
    engine, optimizer = engine_of(LAYOUTS[4])
    train(engine.model, optimizer, 1)
    for options in parts:
        with subtest(f"{options}"):
            name = "-".join(options)
            torch.manual_seed(rank())  # the generators' states are a part of a save
            engine.save_checkpoint(tmp_path / name, **options)
            engine.save_checkpoint(tmp_path / f"{name}-async", asynchronous=True, **options)
            train(engine.model, optimizer, 1)
            engine.wait_for_checkpoint()
            expected = files_of(tmp_path / name)
            assert len(expected) == 2 and files_of(tmp_path / f"{name}-async") == expected
    engine.close()


CELLS: list[Callable[[Path], None]] = [
    the_pointer_and_what_is_too_old_follow_when_the_checkpoint_is_there,
    a_save_ends_where_it_began_though_the_script_has_gone_elsewhere,
    a_pointer_that_cannot_be_written_is_raised_by_the_next_step_and_the_checkpoint_stays,
    a_save_that_fails_leaves_the_tags_as_they_were,
    parts_of_a_state_are_saved_as_they_are_at_once,
]


@distributed(world_size=2, timeout=120)
def test_asynchronous_saves_under_tags_and_of_parts_are_what_those_at_once_are(tmp_path: Path) -> None:
    for cell in CELLS:
        with subtest(cell.__name__):
            cell(tmp_path / cell.__name__)
