"""A sharded checkpoint written out as one folder of whole weights, offline, with the memory of a few chunks.

Called by the command line and by anyone who has a checkpoint folder; needs no process group and no model.
It asks `format` for everything that is read, and leaves what is written to `export`.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from zero_strategy.checkpoint.export import ExportOptions, ExportReport, Source, export
from zero_strategy.checkpoint.extra import decode_extra, parts_of_extra
from zero_strategy.checkpoint.format import CheckpointReader
from zero_strategy.checkpoint.records import model_tensor_name
from zero_strategy.checkpoint.streamed import StreamedTensor
from zero_strategy.errors import some
from zero_strategy.log import LOGGER

READ_BYTES = 2**20  # at once: small enough to stay in a core's cache until it has been copied on


def consolidate(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: ExportOptions | None = None,
) -> ExportReport:
    """Write a checkpoint as a folder of whole weights. See `export`.

    Memory: less than 64 MiB, however large the model and its tensors. Non-persistent buffers are in no
    checkpoint.

    Args:
        checkpoint: The checkpoint folder. It is only read, and of it the weights only.
        out: The folder to write.
        options: See `ExportOptions`.

    Raises:
        CheckpointError: The checkpoint is damaged, the selection is empty or ambiguous, `out` holds anything
            but an earlier output of this checkpoint, or the disk has too little space.
    """
    with CheckpointReader(checkpoint) as reader:
        manifest = reader.manifest
        if manifest.frozen_left_out and not (options and options.trainable_only):
            LOGGER.warning(
                "%s was saved without %d frozen parameters (%s): they are not in %s either, which is no "
                "whole model. Load it over the model that has them.",
                *(reader.folder, len(manifest.frozen_left_out), some([*manifest.frozen_left_out], 2), out),
            )
        source = Source(
            checkpoint_id=manifest.checkpoint_id,
            written=manifest.created,
            params=manifest.params,
            buffers=manifest.buffers,
            hf=manifest.hf,
            chunks=lambda fqn: reader.chunks(model_tensor_name(fqn), READ_BYTES),
            module_states=_module_states(reader),
        )
        return export(source, out, options)


def _module_states(reader: CheckpointReader) -> dict[str, Any]:
    """Return what modules keep beside parameters and buffers, with its tensors still to be read."""
    _, modules = parts_of_extra(reader.manifest.extra)
    states = decode_extra(modules, partial(_streamed, reader))
    return states if isinstance(states, dict) else {}


def _streamed(reader: CheckpointReader, name: str) -> StreamedTensor:
    entry = reader.entry(name)
    return StreamedTensor((name,), entry.shape, entry.torch_dtype, lambda: reader.chunks(name, READ_BYTES))
