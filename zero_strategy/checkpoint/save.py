"""A checkpoint of a running engine is written: by every rank what it owns.

Nothing is gathered. Every rank stores its range of every parameter and of its state, as named runs of
elements; rank 0 also buffers and extra state. Called by the engine; the format is `format`'s business, and
reading is `opened`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from zero_strategy.checkpoint import averages, rng
from zero_strategy.checkpoint.background import WriterProcess
from zero_strategy.checkpoint.elements import dtype_name
from zero_strategy.checkpoint.extra import MODULES_KEY, encode_extra
from zero_strategy.checkpoint.folders import FolderLock
from zero_strategy.checkpoint.full_weights import module_extra_states
from zero_strategy.checkpoint.parts import (
    Description,
    Parts,
    describe,
    manifest_of,
    own_pieces,
    persistent_buffers,
)
from zero_strategy.checkpoint.records import (
    file_metadata,
    model_tensor_name,
    new_checkpoint_id,
    optim_tensor_name,
    rank_file_name,
    rng_tensor_name,
)
from zero_strategy.checkpoint.safetensors_io import FileLayout, RankFile
from zero_strategy.checkpoint.saves import Saves
from zero_strategy.checkpoint.staging import Staging, begin, discard, publish, staging_of
from zero_strategy.checkpoint.tags import check_outer, check_tag, point_to, remove_oldest, remove_superseded
from zero_strategy.comm.collectives import Collectives
from zero_strategy.comm.together import agreed, told_by_first
from zero_strategy.errors import CheckpointError, ConfigError
from zero_strategy.optim import full_state
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer


class Run(NamedTuple):
    """Elements of one named tensor, in their order, that this rank stores.

    Attributes:
        name: Of the tensor, as the manifest has it ("model/embed.weight").
        shape: Of the whole tensor.
        start: The first element of the flattened tensor that is stored.
        values: [numel] in the dtype that is stored, where they are.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    values: Tensor


class _Stored(NamedTuple):
    """What one rank has to write."""

    tensors: list[tuple[str, Tensor]]  # as they are called in the file
    rows: list[list[Any]]  # of each: name, shape, dtype, first element, number of elements, as JSON
    plain_states: list[dict[str, dict[str, Any]]]  # of each optimizer: FQN -> key -> value that is no tensor
    description: Description | None  # of rank 0


class Destination(NamedTuple):
    """Where a checkpoint goes."""

    path: str  # its folder, or with a tag the outer one
    tag: str | None = None
    keep_last: int | None = None  # checkpoints in the outer folder; the oldest beyond it are deleted

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint."""
        return Path(self.path, self.tag or "")


class Begun(NamedTuple):
    """A save that has begun, as one rank sees it."""

    checkpoint_id: str
    staging: Staging
    file: Path  # of this rank
    metadata: dict[str, str]  # of the file
    lock: FolderLock | None  # of rank 0


def save(parts: Parts, destination: Destination, extra: Any, background: Saves | None = None) -> None:
    """Write a checkpoint. See `ZeroEngine.save_checkpoint`.

    Args:
        parts: The engine's.
        destination: Where to.
        extra: The user's state.
        background: What goes on with the save once the state has been copied; None: this call does, without
            a copy.
    """
    collectives = parts.collectives
    stored = agreed(collectives, lambda: _what_to_store(parts, destination, extra))
    begun = _begin(collectives, destination)
    prepared = PreparedSave(begun, destination, stored, collectives.rank)
    if background is None:
        _finish(prepared, collectives)
        return
    try:
        agreed(collectives, lambda: background.prepare(prepared.copy))
    except BaseException:
        prepared.undo()
        prepared.end()
        raise
    background.begin(str(destination.folder), begun.checkpoint_id, prepared)


def _begin(collectives: Collectives, destination: Destination) -> Begun:
    """Make the folder to write to, and keep other saves out of it. Collective.

    Raises:
        CheckpointError: The folder cannot be made, or another save is going on; on all ranks.
    """
    rank, world_size, folder = collectives.rank, collectives.world_size, destination.folder
    made: list[tuple[Staging, FolderLock]] = []  # by rank 0

    def make_folder() -> list[Any]:
        checkpoint_id, in_place = new_checkpoint_id(), folder.exists()
        staging = staging_of(folder, checkpoint_id, in_place=in_place)
        made.append((staging, begin(staging, is_alone=destination.tag is not None)))
        return [checkpoint_id, in_place]

    checkpoint_id, in_place = told_by_first(collectives, make_folder)
    staging, lock = made[0] if made else (staging_of(folder, checkpoint_id, in_place=in_place), None)
    file = staging.target / rank_file_name(rank, world_size, checkpoint_id)
    return Begun(checkpoint_id, staging, file, file_metadata(rank, world_size, checkpoint_id), lock)


class PreparedSave:
    """What is left of a save when it is known what to write. The steps follow one another on some thread.

    They know nothing of the other ranks and of the engine: see `_finish` and `PendingSave`.
    """

    def __init__(self, begun: Begun, destination: Destination, stored: _Stored, rank: int) -> None:
        self._begun = begun
        self._destination = destination
        self._description = stored.description
        self._plain_states = stored.plain_states
        self._rows = stored.rows
        self._tensors = stored.tensors
        self._copied: tuple[WriterProcess, FileLayout] | None = None
        self._is_first = rank == 0

    def copy(self, background: Saves) -> None:
        """Copy what is to be written, for the writer process.

        Raises:
            CheckpointError: There is too little host memory, or two tensors have one name.
        """
        file = RankFile(self._begun.file, self._tensors, self._begun.metadata)
        background.memory.reserve(file.layout.ends[-1])
        background.memory.fill(file.placed())
        self._copied = background.writer, file.layout
        self._tensors = []

    def write(self) -> Any:
        """Write this rank's file and return what rank 0 needs for the manifest, as JSON.

        Raises:
            CheckpointError: The system refuses, or the writer process has ended.
        """
        path = self._begun.file
        if self._copied is None:
            written = RankFile(path, self._tensors, self._begun.metadata).write()
        else:
            writer, layout = self._copied
            written = layout.written(writer.write(path, layout.ends))
        rows = zip(self._rows, written.tensors, strict=True)
        table = [[*row, stored.checksum] for row, stored in rows]
        record = {"num_bytes": written.num_bytes, "header_checksum": written.header_checksum}
        return [path.name, record, table, self._plain_states]

    def stop(self) -> None:
        """Have `write` raise, where the writer process is at it."""
        if self._copied is not None:
            self._copied[0].kill()

    def commit(self, tables: list[Any]) -> None:
        """Make a checkpoint of the files of all ranks. Rank 0 only; if it raises, there is none.

        Args:
            tables: What `write` has returned, by rank.

        Raises:
            CheckpointError: A file is missing, a tensor not covered, or the system refuses.
        """
        assert self._description is not None, "of rank 0"
        begun = self._begun
        manifest = manifest_of(self._description, begun.checkpoint_id, tables)
        manifest.write(begun.staging.target, is_commit=begun.staging.is_in_place)
        publish(begun.staging)

    def follow_up(self) -> None:
        """Let `latest` name the checkpoint, then delete what is old. Rank 0 only; the checkpoint stays.

        Raises:
            CheckpointError: `latest` cannot be written; then nothing is deleted.
        """
        if self._destination.tag is None:
            return
        outer = Path(self._destination.path)
        point_to(outer, self._destination.tag, self._begun.checkpoint_id)
        remove_superseded(outer)
        if self._destination.keep_last is not None:
            remove_oldest(outer, self._destination.tag, self._destination.keep_last)

    def undo(self) -> None:
        """Remove what this rank has written; on rank 0 also the folder, if it was made for this save."""
        with contextlib.suppress(OSError):
            self._begun.file.unlink(missing_ok=True)
        if self._is_first:
            discard(self._begun.staging)

    def end(self) -> None:
        """Let other saves into the folder."""
        if self._begun.lock is not None:
            self._begun.lock.release()


def _finish(prepared: PreparedSave, collectives: Collectives) -> None:
    """Go on with a save here and now. Collective; in the background `PendingSave` does the same."""
    is_first = collectives.rank == 0
    try:
        try:
            tables = collectives.gather_json(agreed(collectives, prepared.write))
            agreed(collectives, lambda: prepared.commit(tables) if is_first else None)
        except CheckpointError:
            # All ranks know that nothing was committed. After any other error rank 0 may have committed
            # already, and the files stay; if it did not, the next save removes them.
            prepared.undo()
            raise
        agreed(collectives, lambda: prepared.follow_up() if is_first else None)
    finally:
        prepared.end()


def _check(destination: Destination) -> None:
    keep_last = destination.keep_last
    if destination.tag is not None:
        check_tag(destination.tag)
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1 or destination.tag is None):
        raise ConfigError(
            what=f"keep_last={keep_last!r} was given with tag={destination.tag!r}.",
            why="It is the number of checkpoints to keep under tags of one folder, the new one counted.",
            fix='Pass keep_last=1 or more, and a tag: save_checkpoint("runs", tag="step-100", keep_last=3).',
        )
    check_outer(Path(destination.path), destination.tag)


# -- writing --


def _what_to_store(parts: Parts, destination: Destination, extra: Any) -> _Stored:
    _check(destination)
    runs = list(_own_runs(parts))
    plain_states: list[dict[str, dict[str, Any]]] = [{} for _ in parts.optimizers]
    for number, optimizer in enumerate(parts.optimizers):
        _collect_state(number, optimizer, parts.collectives.rank, runs, plain_states[number])
    runs += [Run(*run) for run in averages.runs_of(parts)]
    if parts.rng_device is not None:
        state = rng.to_tensor(rng.get_state(parts.rng_device))
        runs.append(Run(rng_tensor_name(parts.collectives.rank), tuple(state.shape), 0, state))
    description = None
    if parts.collectives.rank == 0:
        runs += _buffer_runs(parts.model)
        encoded, tensors = encode_with_modules(extra, module_extra_states(parts.model))
        runs += [Run(name, tuple(t.shape), 0, t.detach().reshape(-1)) for name, t in tensors.items()]
        description = describe(parts, encoded)
        manifest_of(description, new_checkpoint_id(), [])  # what it would refuse is refused now
    rows = [[r.name, r.shape, dtype_name(r.values.dtype), r.start, r.values.numel()] for r in runs]
    return _Stored([(run.name, run.values) for run in runs], rows, plain_states, description)


def _own_runs(parts: Parts) -> Iterator[Run]:
    """Yield this rank's range of the weights: of the masters where there are any."""
    for bucket in parts.buckets:
        master = parts.masters.existing(bucket)
        source = master.weights if master is not None else bucket.param_shard
        for piece, first in own_pieces(bucket, parts.collectives.rank):
            spec = bucket.layout.params[piece.param_index]
            values = source[first : first + piece.numel]
            yield Run(model_tensor_name(spec.fqn), spec.shape, piece.param_start, values)


def _collect_state(
    number: int,
    optimizer: ShardedOptimizer,
    rank: int,
    runs: list[Run],
    plain: dict[str, dict[str, Any]],
) -> None:
    """Add this rank's range of an optimizer's state: tensors to `runs`, other values to `plain`."""
    for param in optimizer.params():
        bucket, index = optimizer.place_of(param)
        spec = bucket.layout.params[index]
        wanted = [piece for piece, _ in own_pieces(bucket, rank) if piece.param_index == index]
        is_start = any(part.param_start == 0 for part in wanted)
        for piece, weight in optimizer.slices_of(param):
            for key, value in optimizer.state.get(weight, {}).items():
                name = optim_tensor_name(number, spec.fqn, key)
                kind = full_state.describe_kind(value, piece.numel, f"The state {key!r} of {spec.fqn!r}")
                if kind[0] == "elements":
                    for part in wanted:
                        start = part.param_start - piece.param_start
                        values = value.reshape(-1)[start : start + part.numel]
                        runs.append(Run(name, spec.shape, part.param_start, values))
                elif kind[0] == "scalar" and is_start:
                    runs.append(Run(name, (), 0, value.reshape(1)))
                elif is_start:
                    plain.setdefault(spec.fqn, {})[key] = kind[1]


def _buffer_runs(model: nn.Module) -> list[Run]:
    return [
        Run(model_tensor_name(names[0]), tuple(buffer.shape), 0, buffer.detach().reshape(-1))
        for buffer, names in persistent_buffers(model)
    ]


def encode_with_modules(extra: Any, of_modules: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Encode the user's extra state, and with it what modules return from `get_extra_state`.

    Raises:
        CheckpointError: Something in it cannot be stored. See `extra.encode_extra`.
    """
    encoded, tensors = encode_extra(extra)  # first, for a message that begins where the user's own begins
    if not of_modules:
        return encoded, tensors
    encoded, tensors = encode_extra({"user": extra, "modules": of_modules})
    return {MODULES_KEY: encoded}, tensors
