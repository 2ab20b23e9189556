"""A checkpoint folder that all ranks have opened together, taken over in steps.

Every rank reads the ranges that it owns now, whatever the world size, stage or bucket size was that wrote
them. `load_all` is what `ZeroEngine.load_checkpoint` does; a front end that lets its user change weights on
their way in takes the steps one by one. Every method is collective. Made by the engine; the format is
`format`'s business, whether a checkpoint fits is `fits`', and where what is read goes is `reading`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_strategy.bucket import publish_all
from zero_strategy.checkpoint import averages
from zero_strategy.checkpoint.comparing import pieces_to_compare
from zero_strategy.checkpoint.extra import decode_extra, parts_of_extra
from zero_strategy.checkpoint.fits import (
    OptimizerMatch,
    left_out_here,
    match_optimizers,
    params_misfit,
    shapes_misfit,
)
from zero_strategy.checkpoint.format import CheckpointReader
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
from zero_strategy.checkpoint.parts import Parts
from zero_strategy.checkpoint.reading import read_buffers, read_optimizers, read_params
from zero_strategy.checkpoint.records import model_tensor_name, rng_tensor_name
from zero_strategy.checkpoint.rng import can_go_on, from_tensor, set_state
from zero_strategy.checkpoint.stored_weights import StoredWeights, stored_names
from zero_strategy.checkpoint.tags import choose, with_others
from zero_strategy.comm.together import agreed
from zero_strategy.errors import CheckpointError
from zero_strategy.log import log_event
from zero_strategy.optim import full_state

_WEIGHTS = ("model/", "extra/")  # kinds of tensors: what a load of weights alone needs


class Loaded(NamedTuple):
    """What came of a load: the user's extra state, and what did not match."""

    extra: Any
    missing_keys: list[str]  # weights and buffers of the model that are not in the checkpoint: as they were
    unexpected_keys: list[str]  # the other way round
    begun_anew: list[str]  # parameters in an optimizer whose state the checkpoint does not have


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
        self._kinds: tuple[str, ...] = (*_WEIGHTS, "rng/")
        self._kinds += ("optim/",) if parts.optimizers else ()
        self._kinds += ("average/",) if parts.averages else ()
        self._is_verified = False
        self._extra: Any = None
        self._rng: dict[str, Any] | None = None  # of this rank
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

    def load_all(self, *, weights_only: bool = False, strict: bool = True, rng: bool = True) -> Loaded:
        """Take over everything. See `ZeroEngine.load_checkpoint`.

        Args:
            weights_only: Leave optimizers, averages and random number generators as they are.
            strict: Refuse names that are on one side only instead of returning them.
            rng: Also restore this rank's random number generators.

        Returns:
            The user's extra state and what did not match, which is also in the log, in one line.

        Raises:
            CheckpointError: What is stored does not fit, or is damaged. Nothing was loaded then, unless a
                file could be read when its checksums were compared and cannot any more, or a module refuses
                its own extra state.
        """
        parts, manifest = self._parts, self._reader.manifest
        parts.collectives.require_same([f"{weights_only=}, {strict=}, {rng=}"], "The load")
        if weights_only:
            self._kinds = _WEIGHTS
        parts.collectives.agree(params_misfit(parts, manifest, self._path) if strict else None)
        matches = []
        if parts.optimizers and not weights_only:
            matches = self._match_optimizers(by_position=False, strict=strict)
        if manifest.optimizers and not parts.optimizers and not weights_only:
            log_event(
                f"{self._path} holds the state of {len(manifest.optimizers)} optimizers, and this engine "
                f"has none: only weights are loaded. To go on training, call shard_optimizer() before "
                f"load_checkpoint()."
            )
        self._check_rest(matches)
        restores_rng = rng and not weights_only and self._read_rng() is not None
        found = self.load_weights(self.weights(), strict=strict)
        if matches:
            self._take_optimizers(matches)
        if not weights_only:
            self.load_averages()
            if restores_rng:
                self.load_rng()
        anew = [fqn for match in matches for fqn in match.anew]
        loaded = Loaded(self.extra(), *found, anew)
        self._report(loaded)
        return loaded

    def weights(self) -> StoredWeights:
        """Return the weights by name, to look at and to change before `load_weights`."""
        return StoredWeights(self._reader, self._both_extras()["modules"])

    def whole_weights(self) -> dict[str, Any]:
        """Return the weights by name as whole tensors, read by rank 0 and sent to all. Collective.

        For who needs a plain dict of them on every rank; `load_weights` does not.

        Returns:
            CPU tensors in the model's dtypes, and what modules keep beside parameters and buffers.
        """
        collectives, manifest = self._parts.collectives, self._reader.manifest
        weights, is_first = self.weights(), collectives.rank == 0
        found: dict[str, Any] = agreed(collectives, lambda: dict(weights) if is_first else {})
        for name, stored in stored_names(manifest).items():
            record = manifest.params.get(stored) or manifest.buffers[stored]
            whole = torch.empty(record.shape, dtype=record.torch_dtype, device=collectives.device)
            if is_first:
                whole.copy_(found[name])
            collectives.broadcast(whole.view(-1))
            found[name] = whole.cpu()
        found.update(self._both_extras()["modules"])
        return found

    def load_weights(self, weights: Mapping[str, Any], *, strict: bool = True) -> LoadResult:
        """Take over weights, buffers and masters.

        Args:
            weights: What `weights()` returned; what was changed in it, or any other mapping of whole tensors,
                counts as rank 0 has it.
            strict: Refuse missing and unexpected names instead of returning them. Frozen parameters that were
                left out on purpose may be missing all the same.

        Raises:
            CheckpointError: Shapes differ, or names do and `strict`, or what is stored is damaged.
        """
        parts, is_first = self._parts, self._parts.collectives.rank == 0
        stored = weights.untouched if isinstance(weights, StoredWeights) else {}
        names = agreed(parts.collectives, lambda: names_given(weights) if is_first else [])
        stored, names = parts.collectives.broadcast_json([stored, names])
        own, given = names_in(parts.model), set(names)
        result = LoadResult([n for n in own if n not in given], [n for n in names if n not in own])
        if strict:
            may_lack = left_out_here(parts, self._reader.manifest)
            missing = [name for name in result.missing_keys if name not in may_lack]
            require_names(result._replace(missing_keys=missing))
        parts.collectives.agree(shapes_misfit(own, stored, self._reader.manifest))
        changed = agreed(parts.collectives, lambda: _changed(parts, weights, stored) if is_first else {})
        self._verify()
        sources = _sources_of(own, stored)
        with torch.no_grad():
            agreed(parts.collectives, lambda: read_params(parts, self._reader, sources))
            agreed(parts.collectives, lambda: read_buffers(parts, self._reader, sources))
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
        matches = self._match_optimizers(by_position=True, strict=True)
        self._check_rest(matches)
        self._verify()
        self._take_optimizers(matches)

    def load_averages(self) -> None:
        """Take over the averages of the weights; those that were not saved begin anew."""
        self._verify()
        with torch.no_grad():
            agreed(self._parts.collectives, lambda: averages.read_into(self._parts, self._reader))

    def load_rng(self) -> dict[str, Any] | None:
        """Restore this rank's random number generators, if as many ranks as there are have stored theirs.

        Returns:
            The state that was restored (see `rng.get_state`), or None.
        """
        state, device = self._read_rng(), self._parts.rng_device
        if state is not None and device is not None:
            agreed(self._parts.collectives, lambda: set_state(state, device))
        return state

    def extra(self) -> Any:
        """Return the user's extra state."""
        return self._both_extras()["user"]

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    # -- helpers --

    def _check_rest(self, matches: Sequence[OptimizerMatch]) -> None:
        """Check what is taken over after the weights, so that nothing is if something of it cannot be."""
        parts, scale = self._parts, self._reader.manifest.loss_scaler

        def check() -> None:
            for optimizer, match in zip(parts.optimizers, matches, strict=False):
                full_state.check_groups(optimizer, match.groups or [])
            if matches and scale is not None:
                parts.loss_scaler.check_state(scale)

        agreed(parts.collectives, check)

    def _read_rng(self) -> dict[str, Any] | None:
        """Return the state of this rank's generators, if there is one of every rank; read once."""
        collectives, manifest = self._parts.collectives, self._reader.manifest
        are_stored = rng_tensor_name(0) in manifest.tensors and self._parts.rng_device is not None
        if self._rng is not None or not are_stored:
            return self._rng
        if can_go_on(self._path, manifest.world_size, collectives.world_size):
            self._verify()
            name = rng_tensor_name(collectives.rank)
            self._rng = agreed(collectives, lambda: from_tensor(self._reader.read(name)))
        return self._rng

    def _match_optimizers(self, *, by_position: bool, strict: bool) -> list[OptimizerMatch]:
        parts, manifest = self._parts, self._reader.manifest
        return agreed(
            parts.collectives,
            lambda: match_optimizers(parts, manifest, by_position=by_position, strict=strict),
        )

    def _take_optimizers(self, matches: list[OptimizerMatch]) -> None:
        parts = self._parts
        with torch.no_grad():
            agreed(parts.collectives, lambda: read_optimizers(parts, self._reader, matches))
        if self._reader.manifest.loss_scaler is not None:
            parts.loss_scaler.load_state_dict(self._reader.manifest.loss_scaler)
        for number, match in enumerate(matches):
            if match.groups is None:
                log_event(
                    f"The parameters of optimizer {number} are in other param groups than in {self._path}: "
                    f"their state is taken by name, the hyper-parameters (lr, ...) are those given here."
                )

    def _report(self, loaded: Loaded) -> None:
        """Say in one line what was not loaded."""
        left_out = left_out_here(self._parts, self._reader.manifest)
        missing = [name for name in loaded.missing_keys if name not in left_out]
        said = [
            f"{len(names)} {what} (first: {', '.join(names[:3])})"
            for names, what in (
                (missing, "weights of the model are not in it and stay as they are"),
                (loaded.unexpected_keys, "names in it are not the model's"),
                (loaded.begun_anew, "parameters begin with new optimizer state"),
                (sorted(left_out), "frozen parameters were left out of it and stay as they are"),
            )
            if names
        ]
        if said:
            log_event(f"Of the checkpoint {self._path}: {'; '.join(said)}.")

    def _verify(self) -> None:
        """Compare checksums, of all that may be loaded, before anything is overwritten.

        Later is too late: a range read for another layout has none.
        """
        if self._is_verified:
            return
        agreed(self._parts.collectives, self._verify_share)
        self._is_verified = True

    def _verify_share(self) -> None:
        try:
            for entry, piece in pieces_to_compare(self._parts, self._reader.manifest, self._kinds):
                self._reader.verify_piece(entry, piece)
        except CheckpointError as error:
            raise with_others(error, self._reader.folder) from error

    def _both_extras(self) -> dict[str, Any]:
        """Read the user's extra state and that of modules."""
        if self._extra is None:
            user, modules = parts_of_extra(self._reader.manifest.extra)
            read = self._reader.read_tensor
            self._extra = agreed(
                self._parts.collectives,
                lambda: {"user": decode_extra(user, read), "modules": decode_extra(modules, read)},
            )
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
