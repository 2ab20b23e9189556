"""The files of one save of DeepSpeed: which there must be, which are missing, which make it something else.

Called by `detect`, to recognise a folder, and by `deepspeed`. It reads names, never contents.

A save of ZeRO at N ranks is one folder (a tag). Every rank writes
`[bf16_]zero_pp_rank_<rank>_mp_rank_00_optim_states.pt`. The model's states are one file
`mp_rank_00_model_states.pt` at stages 1 and 2, and one a rank at stage 3,
`zero_pp_rank_<rank>_mp_rank_00_model_states.pt`. Other numbers than 00 are ranks of tensor or pipeline
parallelism. Source: names as DeepSpeed 0.19.8 writes them (runtime/engine.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from zero_strategy.errors import CheckpointError, some

_OPTIM = re.compile(
    r"(?P<prefix>(?:bf16_|fp16_)?zero_pp_rank_)(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"
)
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
# Of saves that are split in other ways than over data-parallel ranks: pattern, what it is.
_ELSEWHERE = (
    (re.compile(r"layer_\d+-model_.*\.pt"), "pipeline parallelism (a file for each layer)"),
    (
        re.compile(r"(layer_\d+_)?expert_\d+_.*\.pt|expp_rank_\d+_.*\.pt"),
        "expert parallelism (files of experts)",
    ),
)
MAX_ABSENT = 8  # ranks that are named, and one to show that there are more


class Files(NamedTuple):
    """The files of one save."""

    folder: Path
    optim: dict[int, Path]  # by data-parallel rank
    model: dict[int, Path]  # by rank at stage 3, {0: the file} otherwise
    is_model_sharded: bool

    @property
    def all(self) -> list[Path]:
        """Every file that is read."""
        return [*self.optim.values(), *self.model.values()]


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder holds a file that only DeepSpeed names so."""
    return any(_OPTIM.fullmatch(path.name) or _MODEL.fullmatch(path.name) for path in folder.iterdir())


def find_files(folder: Path) -> Files:
    """Find the files of a save.

    Raises:
        CheckpointError: It is split over other ranks than data-parallel ones, two saves are mixed, or there
            is no optimizer file at all.
    """
    names = sorted(path.name for path in folder.iterdir())
    _refuse_other_splits(folder, names)
    optim = [match for name in names if (match := _OPTIM.fullmatch(name))]
    model = [match for name in names if (match := _MODEL.fullmatch(name))]
    parallel = [match[0] for match in (*optim, *model) if int(match["mp"])]
    if parallel:
        raise _unsupported(folder, "tensor or pipeline parallelism", parallel)
    prefixes = sorted({match["prefix"] for match in optim})
    if len(prefixes) > 1:
        raise mixed(folder, f"The optimizer files begin with {' and with '.join(prefixes)}.")
    sharded = [match for match in model if match["rank"]]
    if sharded and len(sharded) < len(model):
        raise mixed(folder, f"The file {model[0][0]} is of stage 1 or 2, {sharded[0][0]} of stage 3.")
    if not optim:
        raise _without_zero(folder, names)
    if not model:
        raise _missing(folder, ["mp_rank_00_model_states.pt"], "the model's states")
    return Files(
        folder=folder,
        optim={int(match["rank"]): folder / match[0] for match in optim},
        model={int(match["rank"] or 0): folder / match[0] for match in model},
        is_model_sharded=bool(sharded),
    )


def check_complete(files: Files, world_size: int, *, is_model_sharded: bool) -> None:
    """Check that there is a file of each rank, and none of others.

    Args:
        files: The files.
        world_size: Ranks, as the files themselves say.
        is_model_sharded: Whether the stage, as the files say, has a file of model states a rank.

    Raises:
        CheckpointError: Naming what is missing or too much.
    """
    one = next(iter(files.optim.values())).name
    missing = [re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", one) for rank in _absent(files.optim, world_size)]
    if is_model_sharded and not files.is_model_sharded:
        raise mixed(files.folder, "Its optimizer files are of stage 3, its model states of stage 1 or 2.")
    if not is_model_sharded and files.is_model_sharded:
        raise mixed(files.folder, "Its model states are of stage 3, its optimizer files of stage 1 or 2.")
    if is_model_sharded:
        absent = _absent(files.model, world_size)
        missing += [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in absent]
    if missing:
        raise _missing(files.folder, missing, f"the files of all {world_size} ranks")
    surplus = [path.name for rank, path in sorted((files.model | files.optim).items()) if rank >= world_size]
    if surplus:
        why = f"Its files say {world_size} ranks, and there are files of more: {some(surplus)}."
        raise mixed(files.folder, why)


def mixed(folder: Path, why: str) -> CheckpointError:
    """Return the error of files that are not of one save; `why` is a sentence."""
    return CheckpointError(
        what=f"{folder} holds files of more than one save.",
        why=why,
        fix="Use the folder of a tag that was saved once, or remove the files of the other save.",
    )


# -- helpers --


def _absent(present: Collection[int], world_size: int) -> list[int]:
    """Return ranks that are not there: few, as the number of ranks may be anything in a damaged file."""
    looked_at = range(min(world_size, len(present) + MAX_ABSENT + 1))
    return [rank for rank in looked_at if rank not in present]


def _refuse_other_splits(folder: Path, names: Sequence[str]) -> None:
    if (folder / "zero").is_dir():
        raise CheckpointError(
            what=f"{folder} is a universal checkpoint of DeepSpeed, which is not imported.",
            why="It is a conversion: its folder 'zero' holds a folder for each parameter.",
            fix="Import the checkpoint that it was converted from.",
        )
    if (folder / "offloaded_tensors").is_dir():
        raise CheckpointError(
            what=f"{folder} was saved with optimizer state on NVMe, which is not imported.",
            why="That state lies in 'offloaded_tensors' as raw memory, and not in the files of the ranks.",
            fix="In DeepSpeed, load it with offload_optimizer.device 'cpu', save it again and import that.",
        )
    for pattern, kind in _ELSEWHERE:
        found = [name for name in names if pattern.fullmatch(name)]
        if found:
            raise _unsupported(folder, kind, found)


def _unsupported(folder: Path, kind: str, names: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        what=f"{folder} was saved with {kind}, which is not imported.",
        why=f"Weights are then split in more ways than over data-parallel ranks: {some(names)}.",
        fix="Export whole weights in DeepSpeed, and load them with engine.load_full_state_dict.",
    )


def _missing(folder: Path, names: Sequence[str], what: str) -> CheckpointError:
    return CheckpointError(
        what=f"{folder} is incomplete: {some(names)} {'is' if len(names) == 1 else 'are'} missing.",
        why=f"Without {what} a part of every weight would be missing.",
        fix="Copy the files of all nodes into one folder: with node-local disks each has only its own.",
    )


def _without_zero(folder: Path, names: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        what=f"{folder} holds no optimizer files of ZeRO (*_optim_states.pt).",
        why=f"It was saved without ZeRO, or they were not copied. It holds {some(names)}.",
        fix="With ZeRO: copy the files of all ranks. Without it: pass engine.load_full_state_dict the whole "
        'weights, torch.load("mp_rank_00_model_states.pt", weights_only=True)["module"].',
    )
