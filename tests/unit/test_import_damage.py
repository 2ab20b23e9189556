"""Files of DeepSpeed with anything in them, and imports that end at any moment: named, and nothing lost.

Oracle: the kind of the error, a `CheckpointError` that names the file or the folder; checkpoints that were
there before, bit for bit. Edits are drawn from a fixed seed.
"""

from __future__ import annotations

import argparse
import collections
import copy
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures.make_deepspeed import TAG
from tests.unit.test_import_deepspeed import FIXTURES, Hostile, edit, hashes, refused
from zero_strategy.checkpoint import manifest as manifest_module
from zero_strategy.checkpoint import restricted_pickle
from zero_strategy.checkpoint.extra import decode_extra
from zero_strategy.checkpoint.format import CheckpointReader
from zero_strategy.checkpoint.importers import deepspeed_states, imported
from zero_strategy.checkpoint.importers.deepspeed import Wanted, read_deepspeed
from zero_strategy.checkpoint.importers.run import ImportOptions, import_checkpoint
from zero_strategy.checkpoint.inspection import find_damage
from zero_strategy.checkpoint.manifest import Manifest
from zero_strategy.cli import main
from zero_strategy.errors import CheckpointError

RANK_1 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


@pytest.fixture
def source(tmp_path: Path) -> Callable[[str], Path]:
    """Copy a checkpoint, to be spoilt."""
    return lambda case: Path(shutil.copytree(FIXTURES / case, tmp_path / case))


def look(folder: Path) -> None:
    """Read all that an import would write."""
    found = read_deepspeed(folder / TAG, Wanted())
    for rank in range(found.world_size):
        list(found.runs_of(rank))


# -- contents ------------------------------------------------------------------------------------------------

ODD: list[Any] = [
    None, True, -1, 2**40, 1.5, "x", b"x", [], [[1]], [None], {}, {1: 2}, {"x": {}}, (3, -1),
    torch.zeros(2, 3), torch.zeros(0), torch.tensor(7), torch.zeros(3, dtype=torch.int8),
    torch.zeros(4).to_sparse(), torch.zeros(5, device="meta"), torch.zeros(1).expand(2**40),
]  # fmt: skip


def places_in(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container of a structure with each of its keys."""
    keys: Any = {dict: content, list: range(len(content)) if isinstance(content, list) else ()}.get(
        type(content), ()
    )
    for key in list(keys):
        yield content, key
        yield from places_in(content[key])


def spoil(path: Path, whole: dict[str, Any], draw: random.Random) -> str:
    """Put something odd in the place of one entry of a file, or take it out; return what was done."""
    content = copy.deepcopy(whole)
    container, key = draw.choice(list(places_in(content)))
    value = draw.choice([*ODD, "take it out"])
    if isinstance(value, str) and value == "take it out":
        del container[key]
    else:
        container[key] = value
    torch.save(content, path)
    return f"{path.name}: {key!r} is {str(value)[:60]}"


@pytest.mark.parametrize(
    "num_edits", [pytest.param(6, id="6"), pytest.param(400, id="400", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("case", ["stage1-bf16-fp32-gradients", "stage2-fp16", "stage3-bf16"])
def test_whatever_a_file_holds_is_read_or_refused_by_name(
    case: str, num_edits: int, source: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, draw = source(case), random.Random(num_edits)
    num_refused = num_named = 0
    for path in sorted((folder / TAG).glob("*.pt")):
        before = path.read_bytes()
        whole = restricted_pickle.load_pickled(path, deepspeed_states.STAND_INS)
        for key in ("loss_scaler", "param_slice_mappings"):  # which only DeepSpeed could store again
            whole.get("optimizer_state_dict", {}).pop(key, None)
        aside = path.with_suffix(".spoilt")
        for _ in range(num_edits):
            what = spoil(aside, whole, draw)
            aside.replace(path)  # the tensors of `whole` are mapped from the file that was there
            try:
                look(folder)
            except CheckpointError as error:
                num_refused += 1
                num_named += str(folder) in str(error)
                assert error.what and error.why and error.fix, f"{what}: {error}"
            except Exception as error:
                raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        path.write_bytes(before)
    assert num_refused > num_edits // 2, "most edits matter"
    assert num_named > 0.7 * num_refused, "others name an entry only"
    look(folder)


def of_optimizer(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["optimizer_state_dict"].update(values)


def of_state(position: int, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["optimizer_state_dict"]["base_optimizer_state"]["state"].update(
        {position: value}
    )


def of_model(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content.update(values)


def say_twice(content: dict[str, Any]) -> None:
    content["param_shapes"][1].update(content["param_shapes"][0])


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        (RANK_1, of_optimizer(zero_stage="two"), "zero_stage is 'two'"),
        (RANK_1, of_optimizer(zero_stage=7), "zero_stage is 7"),
        (RANK_1, of_optimizer(partition_count=[[2], [2]]), "partition_count is [[2], [2]]"),
        (RANK_1, of_optimizer(param_alignment_paddings=[1, 2]), "param_alignment_paddings are [1, 2]"),
        (RANK_1, of_state(0, 7), "its 0 is int"),
        (RANK_1, of_state(0, {"step": "three"}), "more than one save"),
        (MODEL, of_model(frozen_param_fragments=[1]), "'frozen_param_fragments' is list"),
        (MODEL, of_model(shared_params={"a": 3}), "'shared_params' has 'a', which is int"),
        (MODEL, say_twice, "in two places"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(
    name: str,
    change: Callable[[dict[str, Any]], object],
    why: str,
    source: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = source("stage2-fp32")
    edit(folder / TAG / name, change)
    error = refused(folder, tmp_path / "out")
    assert why in str(error) and name in str(error), error


def test_a_number_of_ranks_that_no_folder_has_is_an_error_at_once(
    source: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = source("stage3-fp32")
    for path in (folder / TAG).glob("*_optim_states.pt"):
        edit(path, of_optimizer(partition_count=2**50))
    error = refused(folder, tmp_path / "out")
    assert f"all {2**50} ranks" in error.why and "zero_pp_rank_2_mp_rank_00_optim_states.pt" in error.what


def test_a_latest_file_leads_nowhere_but_to_a_folder_beside_it(
    source: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = source("stage2-fp32")
    inner = folder / "run"
    inner.mkdir()
    shutil.copytree(folder / TAG, tmp_path / TAG)
    for tag in ("..", ".", "../" + TAG, "", "latest"):
        (inner / "latest").write_text(tag)
        assert "there is no such folder beside it" in refused(inner, tmp_path / "out").what


# -- objects of unknown classes ------------------------------------------------------------------------------


def test_objects_of_unknown_classes_are_left_out_if_that_is_asked_for_and_never_run(
    source: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, marker = source("stage2-fp32"), tmp_path / "was-run"
    path = folder / TAG / MODEL
    args = argparse.Namespace(lr=0.1, nested=[collections.namedtuple])
    edit(path, lambda content: content.update(args=args, run=Hostile(marker), kept={"epoch": 7}))
    error = refused(folder, tmp_path / "out")
    assert "'argparse.Namespace'" in error.what and "--drop-unknown" in error.fix
    assert main(["import", str(folder), str(tmp_path / "out"), "--drop-unknown"]) == 0
    printed = capsys.readouterr().out
    assert "client_state['args'] is left out" in printed and "Namespace" in printed
    assert "client_state['run'] is left out" in printed
    with CheckpointReader(tmp_path / "out") as reader:
        encoded: Any = reader.manifest.extra
        client = decode_extra(encoded["$modules"], reader.read_tensor)["user"]["client_state"]
    assert client["kept"] == {"epoch": 7} and "args" not in client and "run" not in client
    assert not marker.exists()

    folder = source("stage1-fp32")
    edit(folder / TAG / MODEL, lambda content: content.update(kept=collections.defaultdict(int, a=1)))
    error = refused(folder, tmp_path / "other", ImportOptions(drop_unknown=True))
    assert "'collections.defaultdict'" in error.what


def test_a_module_that_may_never_be_named_is_refused_also_then(
    source: Callable[[str], Path], tmp_path: Path
) -> None:
    class Shell:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.system, (f"touch {tmp_path / 'was-run'}",))

    folder = source("stage2-fp32")
    edit(folder / TAG / MODEL, lambda content: content.update(args=Shell()))
    error = refused(folder, tmp_path / "out", ImportOptions(drop_unknown=True))
    assert "posix.system" in error.what or "nt.system" in error.what
    assert not (tmp_path / "was-run").exists()


# -- runs that end early -------------------------------------------------------------------------------------


def test_a_run_that_is_killed_leaves_no_folder_and_the_next_one_clears_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "deep" / "out"
    child = os.fork()
    if child == 0:  # the manifest is written last; killed before that, nothing can be cleaned up
        monkeypatch.setattr(Manifest, "write", lambda self, folder, **_: os._exit(7))
        import_checkpoint(FIXTURES / "stage2-fp32", out)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not out.exists() and len(list(out.parent.iterdir())) == 1
    import_checkpoint(FIXTURES / "stage2-fp32", out)
    with CheckpointReader(out) as reader:
        assert find_damage(reader) == []
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("moment", ["before the manifest", "after the manifest", "after all"])
def test_a_run_that_is_interrupted_leaves_the_old_checkpoint_or_the_new_one(
    moment: str, is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    if is_there:
        import_checkpoint(FIXTURES / "stage1-fp32", out)
    before = hashes(out) if is_there else {}

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    module, name = {
        "before the manifest": (manifest_module, "replace_file"),
        "after the manifest": (manifest_module, "remove_own_files"),
        "after all": (imported, "ImportReport"),
    }[moment]
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module, name, stop)
        import_checkpoint(FIXTURES / "stage3-bf16", out, ImportOptions(force=True))
    if moment == "before the manifest":
        assert (hashes(out) if out.exists() else {}) == before
    elif is_there or moment == "after all":
        with CheckpointReader(out) as reader:
            assert reader.manifest.stage == 3 and find_damage(reader) == []
    assert [path for path in tmp_path.iterdir() if path != out] == []
