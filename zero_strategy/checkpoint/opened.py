"""A checkpoint folder that all ranks have opened together, taken over in steps.

Every rank reads the ranges that it owns now, whatever the world size, stage or bucket size was that wrote
them. `load_all` is what `ZeroEngine.load_checkpoint` does; a front end that lets its user change weights on
their way in takes the steps one by one. Every method is collective. Made by the engine; the format is
`format`'s business, whether a checkpoint fits is `fits`'.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.bucket import publish_all
from zero_strategy.checkpoint import averages
from zero_strategy.checkpoint.fits import optimizers_misfit, params_misfit, saved_groups, shapes_misfit
from zero_strategy.checkpoint.format import (
    CheckpointReader,
    decode_extra,
    model_tensor_name,
    optim_tensor_name,
)
from zero_strategy.checkpoint.full_weights import (
    LoadResult,
    MorePreciseWeights,
    module_extra_states,
    names_given,
    names_in,
    require_fit,
    require_names,
    scatter,
)
from zero_strategy.checkpoint.parts import MODULES_KEY, Parts, persistent_buffers
from zero_strategy.checkpoint.stored_weights import StoredWeights, stored_names
from zero_strategy.checkpoint.tags import choose, with_others
from zero_strategy.comm.together import agreed
from zero_strategy.errors import CheckpointError
from zero_strategy.log import log_event
from zero_strategy.optim import full_state
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer


class OpenCheckpoint:
    """A checkpoint that every rank has opened, and found to be the same.

    Usage::

        with engine.open_checkpoint(path) as opened:
            weights = opened.weights()
            weights["head.bias"] = torch.zeros(10)
            opened.load_weights(weights)
            opened.load_optimizers()
    """

    def __init__(self, parts: Parts, path: str, tag: str | None = None) -> None:
        """Open a checkpoint and compare the checksums of what there is to load.

        Args:
            parts: The engine's.
            path: The folder, or the outer one of several; the same on all ranks.
            tag: Of one in the outer folder; None: the one that `latest` names.

        Raises:
            CheckpointError: It is missing, incomplete or damaged, or another one on another rank.
        """
        self._parts = parts
        collectives = parts.collectives
        # Rank 0 chooses: another rank may see an older `latest`, where a file system keeps copies.
        chosen = agreed(collectives, lambda: choose(path, tag) if collectives.rank == 0 else None)
        chosen = collectives.broadcast_json(chosen)
        if chosen != tag:
            log_event(f"{path}: {chosen!r} is loaded.")
        path = self._path = os.path.join(path, chosen) if chosen else path
        # Rank 0 looks into every file; the others check those they read from.
        self._reader = agreed(collectives, lambda: CheckpointReader(path, check_files=collectives.rank == 0))
        self._is_verified = False
        self._extra: Any = None
        try:
            _check_same(collectives.gather_json([path, self._reader.manifest.checkpoint_id]))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- runtime --

    def load_all(self) -> Any:
        """Take over everything and return the user's extra state. See `ZeroEngine.load_checkpoint`."""
        parts, manifest = self._parts, self._reader.manifest
        misfit = params_misfit(parts, manifest, self._path)
        if misfit is None and parts.optimizers:
            misfit = optimizers_misfit(parts, manifest, by_position=False)
        parts.collectives.agree(misfit)
        if manifest.optimizers and not parts.optimizers:
            log_event(
                f"{self._path} holds the state of {len(manifest.optimizers)} optimizers, and this engine "
                f"has none: only weights are loaded. To go on training, call shard_optimizer() before "
                f"load_checkpoint()."
            )
        self.load_weights(self.weights(), strict=False)
        if parts.optimizers:
            self.load_optimizers()
        self.load_averages()
        return self.extra()

    def weights(self) -> StoredWeights:
        """Return the weights by name, to look at and to change before `load_weights`."""
        return StoredWeights(self._reader, self._both_extras()["modules"])

    def load_weights(self, weights: Mapping[str, Any], *, strict: bool = True) -> LoadResult:
        """Take over weights, buffers and masters.

        Args:
            weights: What `weights()` returned; what was changed in it, or any other mapping of whole tensors,
                counts as rank 0 has it.
            strict: Refuse missing and unexpected names instead of returning them.

        Raises:
            CheckpointError: Shapes differ, or names do and `strict`, or what is stored is damaged.
        """
        parts, is_first = self._parts, self._parts.collectives.rank == 0
        stored = weights.untouched if isinstance(weights, StoredWeights) else {}
        names = agreed(parts.collectives, lambda: names_given(weights) if is_first else [])
        stored, names = parts.collectives.broadcast_json([stored, names])
        own = names_in(parts.model)
        result = LoadResult([n for n in own if n not in names], [n for n in names if n not in own])
        if strict:
            require_names(result, so_far="Nothing was loaded.")
        parts.collectives.agree(shapes_misfit(own, stored, self._reader.manifest))
        changed = agreed(parts.collectives, lambda: _changed(parts, weights, stored) if is_first else {})
        self._verify()
        sources = _sources_of(own, stored)
        with torch.no_grad():
            agreed(parts.collectives, lambda: _read_params(parts, self._reader, sources))
            agreed(parts.collectives, lambda: _read_buffers(parts, self._reader, sources))
        publish_all(parts.buckets)
        precise = MorePreciseWeights(changed, _master_reader(self._reader))
        scatter(parts.model, parts.buckets, parts.masters, precise, parts.collectives)
        parts.reshard_idle()
        return result

    def load_optimizers(self) -> None:
        """Take over the optimizers' states and hyper-parameters, by name or else by position; the loss scale.

        Raises:
            CheckpointError: They are others than those saved.
        """
        parts = self._parts
        parts.collectives.agree(optimizers_misfit(parts, self._reader.manifest, by_position=True))
        self._verify()
        with torch.no_grad():
            agreed(parts.collectives, lambda: _read_optimizers(parts, self._reader))
        if self._reader.manifest.loss_scaler is not None:
            parts.loss_scaler.load_state_dict(self._reader.manifest.loss_scaler)

    def load_averages(self) -> None:
        """Take over the averages of the weights; those that were not saved begin anew."""
        self._verify()
        with torch.no_grad():
            agreed(self._parts.collectives, lambda: averages.read_into(self._parts, self._reader))

    def extra(self) -> Any:
        """Return the user's extra state."""
        return self._both_extras()["user"]

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    # -- helpers --

    def _verify(self) -> None:
        """Compare checksums, of all that may be loaded, before anything is overwritten.

        Later is too late: a range read for another layout has none.
        """
        if self._is_verified:
            return
        collectives = self._parts.collectives
        kinds = ["model/", "extra/"]
        kinds += ["optim/"] if self._parts.optimizers else []
        kinds += ["average/"] if self._parts.averages else []
        agreed(
            collectives,
            lambda: _verify_share(self._reader, tuple(kinds), collectives.rank, collectives.world_size),
        )
        self._is_verified = True

    def _both_extras(self) -> dict[str, Any]:
        """Read the user's extra state and that of modules."""
        if self._extra is None:
            encoded = self._reader.manifest.extra
            with_modules = isinstance(encoded, dict) and MODULES_KEY in encoded
            content = encoded[MODULES_KEY] if with_modules else encoded  # type: ignore[index, call-overload]
            decoded = agreed(self._parts.collectives, lambda: decode_extra(content, self._reader.read_tensor))
            self._extra = decoded if with_modules else {"user": decoded, "modules": {}}
        extras: dict[str, Any] = self._extra
        return extras


def _changed(parts: Parts, weights: Mapping[str, Any], stored: Mapping[str, str]) -> dict[str, Any]:
    """Return the weights that are not to be read from the files; raise if one does not fit."""
    changed = {name: weights[name] for name in weights if name not in stored}
    require_fit(names_in(parts.model), module_extra_states(parts.model).keys(), changed)
    return changed


def _master_reader(reader: CheckpointReader) -> Callable[[str], Tensor | None]:
    """Return what reads the master of a weight, under any of its names, if one is stored.

    A look at a weight is no change, and must not round its master.
    """
    stored = stored_names(reader.manifest)

    def master_of(name: str) -> Tensor | None:
        fqn = stored.get(name)
        if fqn not in reader.manifest.params:
            return None
        entry = model_tensor_name(fqn)
        return reader.read_tensor(entry) if reader.entry(entry).dtype == "float32" else None

    return master_of


def _sources_of(own: Mapping[str, Any], stored: Mapping[str, str]) -> dict[str, str]:
    """Return, for every name of the model's tensors, the name in the checkpoint to read; ties share one."""
    chosen: dict[int, str] = {}
    for name, value in own.items():
        if name in stored:
            chosen.setdefault(id(value), stored[name])
    return {name: chosen[id(value)] for name, value in own.items() if id(value) in chosen}


# -- checks --


def _check_same(paths_and_ids: list[list[str]]) -> None:
    """Raise on all ranks if they have opened different checkpoints."""
    for rank, (other, checkpoint_id) in enumerate(paths_and_ids):
        if checkpoint_id != paths_and_ids[0][1]:
            raise CheckpointError(
                what=f"Rank 0 loads {paths_and_ids[0][0]} and rank {rank} loads {other}, another save.",
                why="Every rank reads its part of the weights, so all must read the same checkpoint.",
                fix="Pass the same path on every rank. Nothing was loaded.",
            )


def _verify_share(reader: CheckpointReader, kinds: tuple[str, ...], rank: int, world_size: int) -> None:
    """Compare the checksums of this rank's share of the checkpoint: pieces that lie next to one another."""
    entries = [entry for name, entry in reader.manifest.tensors.items() if name.startswith(kinds)]
    pieces = [(entry, piece) for entry in entries for piece in entry.pieces]
    pieces.sort(key=lambda pair: (pair[1].file, pair[1].key))
    share = slice(rank * len(pieces) // world_size, (rank + 1) * len(pieces) // world_size)
    try:
        for entry, piece in pieces[share]:
            reader.verify_piece(entry, piece)
    except CheckpointError as error:
        raise with_others(error, reader.folder) from error


# -- reading --


def _read_params(parts: Parts, reader: CheckpointReader, sources: Mapping[str, str]) -> None:
    """Read this rank's ranges of the parameters; `sources` maps their names to names in the checkpoint."""
    for bucket in parts.buckets:
        master = parts.masters.existing(bucket)
        for piece in bucket.slices:
            source = sources.get(bucket.layout.params[piece.param_index].fqn)
            if source is None:
                continue
            values = reader.read(
                model_tensor_name(source), piece.param_start, piece.param_start + piece.numel
            )
            bucket.param_shard[piece.shard_start : piece.shard_start + piece.numel].copy_(values)
            if master is not None:
                master.weights[piece.shard_start : piece.shard_start + piece.numel].copy_(values)


def _read_buffers(parts: Parts, reader: CheckpointReader, sources: Mapping[str, str]) -> None:
    for buffer, names in persistent_buffers(parts.model):
        if names[0] in sources:
            buffer.data.copy_(reader.read_tensor(model_tensor_name(sources[names[0]])))


def _read_optimizers(parts: Parts, reader: CheckpointReader) -> None:
    keys: dict[tuple[int, str], list[str]] = {}
    for name in reader.manifest.tensors:
        if name.startswith("optim/"):
            _, position, rest = name.split("/", 2)
            fqn, _, key = rest.rpartition("/")
            keys.setdefault((int(position), fqn), []).append(key)
    for number, (optimizer, record) in enumerate(
        zip(parts.optimizers, reader.manifest.optimizers, strict=True)
    ):
        full_state.load_groups(optimizer, [dict(group) for group in record.param_groups])
        optimizer.state.clear()
        for group, fqns in zip(optimizer.param_groups, saved_groups(record), strict=True):
            for param, fqn in zip(group["params"], fqns, strict=True):
                for key in keys.get((number, fqn), ()):
                    _read_state(optimizer, param, group, reader, optim_tensor_name(number, fqn, key))
                for _, weight in optimizer.slices_of(param):
                    optimizer.state[weight].update(copy.deepcopy(record.plain_state.get(fqn, {})))


def _read_state(
    optimizer: ShardedOptimizer,
    param: nn.Parameter,
    group: dict[str, Any],
    reader: CheckpointReader,
    name: str,
) -> None:
    """Read one tensor of a parameter's state into this rank's slices of it."""
    key = name.rpartition("/")[2]
    is_shared = reader.entry(name).shape == ()
    # State follows the dtype of what is optimized where that has changed since it was saved.
    saved_dtype = reader.entry(model_tensor_name(name.split("/", 2)[2].rpartition("/")[0])).torch_dtype
    for piece, weight in optimizer.slices_of(param):
        if is_shared:
            value = full_state.shared_value(reader.read_tensor(name), group, weight)
        else:
            value = reader.read(name, piece.param_start, piece.param_start + piece.numel).to(weight.device)
            if weight.dtype != saved_dtype and value.is_floating_point():
                value = value.to(weight.dtype)
        optimizer.state[weight][key] = value
