"""A sharded checkpoint written out as one Hugging Face folder, offline, with the memory of one chunk.

Called by the command line and by anyone who has a checkpoint folder; needs no process group and no model.
It asks `format` for everything that is read, and leaves what is written to `export`.
"""

from __future__ import annotations

import os

from zero_strategy.checkpoint.export import ExportOptions, ExportReport, Source, export
from zero_strategy.checkpoint.format import CheckpointReader, model_tensor_name


def consolidate(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: ExportOptions | None = None,
) -> ExportReport:
    """Write a checkpoint as a Hugging Face folder. See `export`.

    Memory: two chunks of 64 MiB, however large the model. Non-persistent buffers are in no checkpoint.

    Args:
        checkpoint: The checkpoint folder. It is only read.
        out: The folder to write.
        options: See `ExportOptions`.

    Raises:
        CheckpointError: The checkpoint is damaged, the selection is empty or ambiguous, `out` holds anything
            but an earlier output of this checkpoint, or the disk has too little space.
    """
    with CheckpointReader(checkpoint) as reader:
        manifest = reader.manifest
        source = Source(
            checkpoint_id=manifest.checkpoint_id,
            written=manifest.created,
            params=manifest.params,
            buffers=manifest.buffers,
            hf=manifest.hf,
            chunks=lambda fqn: reader.chunks(model_tensor_name(fqn)),
        )
        return export(source, out, options)
