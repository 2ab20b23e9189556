"""The command `zero-strategy import`: a checkpoint of another program turned into a checkpoint folder.

Called by the command line and by anyone who has a checkpoint; needs no process group and no model.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from zero_strategy.checkpoint.importers.deepspeed import Wanted, read_deepspeed
from zero_strategy.checkpoint.importers.detect import find_source
from zero_strategy.checkpoint.importers.imported import ImportReport, write
from zero_strategy.errors import CheckpointError


@dataclass(frozen=True)
class ImportOptions:
    """How to import.

    Attributes:
        tag: The folder of a save below the source, where it has several; None: what its `latest` names.
        optimizer: The class of the optimizer that will go on; None: what the source says.
        weights_only: Leave the optimizer and the loss scale out.
        force: Replace another checkpoint in the output folder.
        drop_unknown: Leave out objects of classes that are not known here, such as a client_state may hold;
            the report names them. If False, a file that has one is refused.
    """

    tag: str | None = None
    optimizer: str | None = None
    weights_only: bool = False
    force: bool = False
    drop_unknown: bool = False


def import_checkpoint(
    source: str | os.PathLike[str], out: str | os.PathLike[str], options: ImportOptions | None = None
) -> ImportReport:
    """Turn a checkpoint of another program into one that `engine.load_checkpoint` takes.

    Nothing of the source is written to or run. Its files are mapped, one rank's at a time, and their tensors
    written in pieces of 64 MiB; the output gets a file for each of its ranks.

    Args:
        source: The folder: of one save, or the one above with its `latest` file.
        out: The folder to write: new, empty, or an earlier output of the same source.
        options: See `ImportOptions`.

    Raises:
        CheckpointError: The source is nothing that can be imported, incomplete or damaged, or the output
            cannot be written.
    """
    options = options or ImportOptions()
    found = find_source(Path(source), options.tag)
    target, origin = Path(os.path.realpath(out)), Path(os.path.realpath(found.folder))
    given = Path(os.path.realpath(source))
    if {origin, given} & {target, *target.parents}:
        raise CheckpointError(
            what=f"The output {target} is the source, or inside it.",
            why="The source is only read.",
            fix="Pass a folder outside it.",
        )
    wanted = Wanted(options.optimizer, options.weights_only, options.drop_unknown)
    imported = read_deepspeed(found.folder, wanted)
    return write(imported, target, force=options.force)
