"""The whole weights of a running engine, in 16 bits, written as a Hugging Face folder by rank 0.

Buckets are gathered one at a time, in the order in which rank 0 needs them for its files, and it tells the
others which comes next: see `save_16bit`. Called by the engine; what is written is `export`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timezone

import torch
from torch import Tensor

from zero_strategy.checkpoint.elements import cpu_chunks, dtype_name
from zero_strategy.checkpoint.export import ExportOptions, Source, export
from zero_strategy.checkpoint.full_weights import module_extra_states, whole_on_first
from zero_strategy.checkpoint.hf import hf_record
from zero_strategy.checkpoint.parts import Parts, buffer_records, param_records, persistent_buffers
from zero_strategy.checkpoint.records import ParamRecord
from zero_strategy.comm.together import agreed
from zero_strategy.log import log_event

CHUNK_BYTES = 2**20  # converted at once: small enough to stay in a core's cache
_NO_MORE = -1  # instead of the index of a bucket


def save_16bit(parts: Parts, path: str, options: ExportOptions) -> None:
    """Write the folder. Collective. What the arguments mean is said at `ZeroEngine.save_16bit_model`.

    Rank 0 writes; for each bucket it comes to, it broadcasts the bucket's index and the others send it their
    shards, for which they need no memory. -1 ends it, also where writing has failed; then all ranks agree on
    what rank 0 raises.
    """
    collectives = parts.collectives
    if collectives.rank != 0:
        while (wanted := collectives.broadcast_json(None)) != _NO_MORE:
            whole_on_first(parts.buckets[wanted])
        agreed(collectives, lambda: None)
        return

    def gather(index: int) -> Tensor:
        collectives.broadcast_json(index)
        whole = whole_on_first(parts.buckets[index])
        assert whole is not None, "rank 0 gathers"
        return whole

    def write() -> None:
        try:
            report = export(_source_of(parts, gather), path, options)
            if report.left_out:
                names = ", ".join(report.left_out)
                log_event(f"Left out of {path}, as no part of a Hugging Face model: {names}.")
        finally:
            collectives.broadcast_json(_NO_MORE)

    agreed(collectives, write)


def _source_of(parts: Parts, gather: Callable[[int], Tensor]) -> Source:
    """Describe the model as it is written: parameters in 16 bits, in the order of the buckets."""
    params = {fqn: _in_16_bits(record) for fqn, record in param_records(parts).items()}
    return Source(
        checkpoint_id=None,
        written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        params=params,
        buffers=buffer_records(parts.model),
        hf=hf_record(parts.model),
        chunks=_Chunks(parts, gather),
        module_states=module_extra_states(parts.model),
    )


class _Chunks:
    """Yields the elements of a parameter or buffer; keeps the bucket gathered last, and no other."""

    def __init__(self, parts: Parts, gather: Callable[[int], Tensor]) -> None:
        self._buckets = parts.buckets
        self._gather = gather
        self._places = {
            spec.fqn: (number, index)
            for number, bucket in enumerate(parts.buckets)
            for index, spec in enumerate(bucket.layout.params)
        }
        self._buffers = {names[0]: buffer for buffer, names in persistent_buffers(parts.model)}
        self._gathered: int | None = None
        self._views: list[Tensor] = []

    def __call__(self, fqn: str) -> Iterator[Tensor]:
        return cpu_chunks(self._buffers[fqn] if fqn in self._buffers else self._param(fqn), CHUNK_BYTES)

    def _param(self, fqn: str) -> Tensor:
        number, index = self._places[fqn]
        if number != self._gathered:
            self._views = []  # let go of the one before first: memory for one bucket
            self._views = self._buckets[number].views(self._gather(number))
            self._gathered = number
        return self._views[index]


def _in_16_bits(record: ParamRecord) -> ParamRecord:
    """Narrow a wide dtype to bfloat16, which has the range of fp32."""
    dtype = record.torch_dtype
    if not dtype.is_floating_point or dtype.itemsize <= 2:
        return record
    return record.model_copy(update={"dtype": dtype_name(torch.bfloat16)})
