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
from zero_strategy.errors import CheckpointError, some

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
        CheckpointError: The checkpoint is damaged, or was saved without its frozen parameters and
            `trainable_only` is not asked for; the selection is empty or ambiguous, `out` holds anything
            but an earlier output of this checkpoint, or the disk has too little space.
    """
    with CheckpointReader(checkpoint) as reader:
        manifest = reader.manifest
        if manifest.frozen_left_out and not (options and options.trainable_only):
            raise _no_whole_model(reader)
        source = Source(
            checkpoint_id=manifest.checkpoint_id,
            written=manifest.created,
            params=manifest.params,
            buffers=manifest.buffers,
            hf=manifest.hf,
            chunks=lambda fqn: reader.chunks(model_tensor_name(fqn), READ_BYTES),
            module_states=_module_states(reader),
            is_whole=not manifest.frozen_left_out,
        )
        return export(source, out, options)


def _module_states(reader: CheckpointReader) -> dict[str, Any]:
    """Return what modules keep beside parameters and buffers, with its tensors still to be read."""
    _, modules = parts_of_extra(reader.manifest.extra)
    states = decode_extra(modules, partial(_streamed, reader))
    return states if isinstance(states, dict) else {}


def _no_whole_model(reader: CheckpointReader) -> CheckpointError:
    names = reader.manifest.frozen_left_out
    return CheckpointError(
        what=f"{reader.folder} was saved without {len(names)} frozen parameters: {some(names, 2)}.",
        why="So it is no whole model (trainable_only=True): who loads an export of it would have random "
        "numbers in their places.",
        fix="Export what was trained alone: --trainable-only (trainable_only=True). Or load it over the "
        "model that has them, and export that: engine.save_16bit_model().",
    )


def _streamed(reader: CheckpointReader, name: str) -> StreamedTensor:
    entry = reader.entry(name)
    return StreamedTensor((name,), entry.shape, entry.torch_dtype, lambda: reader.chunks(name, READ_BYTES))
