"""The state of an engine, taken out of it and put back: whole tensors on one rank, or a checkpoint of shards.

The part of `ZeroEngine` that has to do neither with building it nor with training. How whole tensors travel
is `full_weights`' business, what a folder looks like `save`'s and `opened`'s. It must not know hooks.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.average import Averages
from zero_strategy.bucket import Bucket
from zero_strategy.checkpoint import full_weights
from zero_strategy.checkpoint.export import DEFAULT_SHARD_SIZE_BYTES, ExportOptions
from zero_strategy.checkpoint.opened import OpenCheckpoint
from zero_strategy.checkpoint.parts import Parts
from zero_strategy.checkpoint.save import Destination, save
from zero_strategy.checkpoint.saves import IfBusy, Saves
from zero_strategy.checkpoint.sixteen_bit import save_16bit
from zero_strategy.comm.collectives import Collectives
from zero_strategy.compat import without_torch_function
from zero_strategy.config import ZeroConfig
from zero_strategy.engine_checks import gathers_unasked, not_a_parameter
from zero_strategy.intact import check_intact
from zero_strategy.lifecycle import ParamLifecycle
from zero_strategy.loss_scaler import LossScaler
from zero_strategy.optim.ownership import Ownership
from zero_strategy.optim.places import Place
from zero_strategy.optim.publish import Publisher
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer
from zero_strategy.precision import Masters


class EngineState:
    """The part of `ZeroEngine` that takes state out and puts it back; the engine assigns the attributes."""

    model: nn.Module
    config: ZeroConfig
    buckets: Sequence[Bucket]
    optimizers: list[ShardedOptimizer]
    averages: Averages
    loss_scaler: LossScaler
    _collectives: Collectives
    _places: dict[nn.Parameter, Place]
    _ownership: Ownership
    _masters: Masters
    _lifecycle: ParamLifecycle
    _publisher: Publisher
    _saves: Saves

    # -- whole values --

    def wait_for_weights(self) -> None:
        """Return when the weights of the last step are complete here, which `step()` does not wait for.

        For code that does not ask a tensor's class (C++, `torch.jit.script`, `torch.tensor(param)`), for CUDA
        graphs, and before a fork whose child reads weights; all else waits by itself.
        """
        self._publisher.wait()

    @contextmanager
    def unsharded_params(
        self, writeback: bool = False, *, params: Iterable[nn.Parameter] | None = None
    ) -> Iterator[None]:
        """Make parameters whole for a block of code. Collective, also at the end if `writeback`.

        Args:
            writeback: Keep what the block has written, rank 0's on all ranks, in the shards and the masters.
                Otherwise the block must not write: at stage 3 it would be lost.
            params: Those that the block needs, such as the adapters of a large model; the same on all ranks.
                What lies in the same buckets is whole as well. By default all.
        """
        wanted = None if params is None else [param for param in params if param in self._places]
        count = "" if wanted is None else f"{len(wanted)} parameters"
        self._begin_call("unsharded_params", count)
        with self._lifecycle.whole(wanted):
            yield
            if writeback:
                for bucket in self._buckets_of(wanted):
                    bucket.take_written()
                self._masters.take_params()

    @contextmanager
    def grads_in_place(self, params: Iterable[nn.Parameter] | None = None) -> Iterator[None]:
        """Have the averaged gradients in `param.grad`, whole, for a block of code that reads them.
        Collective.

        Args:
            params: Whose gradients; the same on all ranks. By default those of all parameters. The gradients
                of no more than what is asked for are whole at once.
        """
        wanted = list(self._places if params is None else params)
        for param in wanted:
            if param not in self._places:
                raise not_a_parameter(param)
        self._begin_call("grads_in_place", f"{len(wanted)} parameters")
        by_id = set(map(id, wanted))
        given: list[nn.Parameter] = []
        try:
            for bucket in self._buckets_of(wanted):
                given += self._give_grads(bucket, by_id)
            yield
        finally:
            with without_torch_function():
                for param in given:
                    param.grad = None

    @property
    def gathers_in_forward(self) -> bool:
        """Whether a forward gathers parameters, so that every rank must run as many of them."""
        return self.config.shards_params and not self._lifecycle.is_all_whole

    def full_grad(self, param: nn.Parameter) -> Tensor | None:
        """Return the averaged gradient of a parameter, whole. Collective.

        Args:
            param: One of the model's parameters.

        Returns:
            A copy of the parameter's shape, or None if no rank has used it since the gradients were cleared.
            In fp32 where losses are scaled, since fp16 may not hold it once the scale is taken out.

        Raises:
            ShardingError: It is not one of the model's parameters.
        """
        if param not in self._places:
            raise not_a_parameter(param)
        bucket, index = self._places[param]
        self._begin_call("full_grad")
        if bucket.grads.shard is None or not bucket.grads.has_grad[index]:
            return None
        return self._unscaled(param, bucket.views(bucket.gather_shards(bucket.grads.shard))[index].clone())

    def full_state_dict(
        self,
        dtype: torch.dtype | None = None,
        trainable_only: bool = False,
        *,
        names: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """Gather whole weights on rank 0. Collective; memory for one bucket besides the result, there only.

        Args:
            dtype: Cast floating-point parameters to this; by default they keep theirs. fp32 gives the masters
                where there are any, which are more precise than the parameters cast.
            trainable_only: Leave out frozen parameters and buffers.
            names: Only these, the same on all ranks; buckets that hold none of them are not gathered.

        Returns:
            On rank 0 CPU tensors under the very keys of `model.state_dict()`, tied names sharing one tensor;
            on other ranks {}.
        """
        self._require_all_intact("full_state_dict")
        masters = self._masters.weights_of if dtype == torch.float32 else None
        state = full_weights.gather(
            self.model,
            self._buckets_named(names),
            self._collectives,
            masters,
            dtype=dtype,
            trainable_only=trainable_only,
        )
        return state if names is None else {name: state[name] for name in state if name in names}

    def save_16bit_model(
        self,
        path: str | os.PathLike[str],
        *,
        max_shard_size_bytes: int = DEFAULT_SHARD_SIZE_BYTES,
        trainable_only: bool = False,
    ) -> None:
        """Write whole weights in 16 bits as a Hugging Face folder. Collective; memory for a bucket on rank 0.

        fp32 parameters become bf16, which has their range. The folder is what `zero-strategy consolidate`
        writes: safetensors, with the configs of a transformers model, moved into its place when it is
        complete; a folder that an earlier call wrote is replaced.

        Args:
            path: The folder; rank 0's counts.
            max_shard_size_bytes: Of one weights file; a larger tensor gets a file of its own.
            trainable_only: Leave out frozen parameters and buffers.

        Raises:
            ConfigError: At stage 3, if `stage3_gather_16bit_weights_on_model_save` is not set.
            CheckpointError: It cannot be written, or the folder holds something else; on all ranks.
        """
        gathers = any(bucket.policy.shard_params for bucket in self.buckets)
        if gathers and not self.config.zero_optimization.stage3_gather_16bit_weights_on_model_save:
            raise gathers_unasked()
        self._require_all_intact("save_16bit_model")
        options = ExportOptions(max_shard_size_bytes=max_shard_size_bytes, trainable_only=trainable_only)
        save_16bit(self.parts(), os.fspath(path), options)

    def load_full_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> full_weights.LoadResult:
        """Take over whole weights and buffers, masters included. Collective.

        Args:
            state_dict: As `model.state_dict()` has it. Rank 0's is used; other ranks may pass {}.
            strict: Refuse missing and unexpected names instead of returning them.

        Returns:
            The missing and the unexpected names: `missing_keys` are in the model only, `unexpected_keys` in
            `state_dict` only.

        Raises:
            CheckpointError: Shapes differ, or names do and `strict`. Nothing has been loaded then.
        """
        self.averages.require_out()
        self._begin_call("load_full_state_dict")
        result = full_weights.scatter(
            self.model, self.buckets, self._masters, state_dict, self._collectives, strict=strict
        )
        self._ownership.num_steps = 0
        return result

    def sync_masters_from_params(self) -> None:
        """Take over the parameters' values after something else than the optimizer has written them."""
        self.wait_for_weights()
        self._masters.take_params()

    # -- checkpoints --

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        extra: Any = None,
        *,
        tag: str | None = None,
        keep_last: int | None = None,
        weights_only: bool = False,
        trainable_only: bool = False,
        asynchronous: bool = False,
        if_busy: IfBusy = "wait",
    ) -> None:
        """Write weights, masters, optimizers and `extra` into a folder. Collective.

        With them go the states of every rank's random number generators: Python's, torch's, the device's, and
        numpy's where it is in use. A folder that was not there before is there when it is complete. A
        checkpoint that was there stays valid until the new one is complete.

        An asynchronous save returns when what it saves has been copied, into host memory that is kept for the
        next one: as much as this rank's file has bytes. A process beside this one then writes the file. What
        goes wrong there is raised by the next `optimizer.step()`, save, load or `wait_for_checkpoint()`, on
        all ranks. `close()` and the end of the program wait for the save.

        It has one keyword more than seven parameters allow: each is a choice of its own, made where the call
        stands, and an object of options would only be one more name to import for it.

        Args:
            path: The folder; with a tag the outer one, in which `path/tag` is written and then named by the
                file `path/latest`.
            extra: Nested dicts and lists of JSON values and tensors. Rank 0's is kept.
            tag: Such as "step-100".
            keep_last: Delete the oldest complete checkpoints in `path` until so many are left, the new one
                counted; None keeps all. What is damaged, or holds files that no save wrote, is not deleted.
            weights_only: Leave out optimizers, averages and random number generators.
            trainable_only: Leave out frozen parameters, as of a large model with small adapters. Buffers are
                stored, since training may change them. The checkpoint says so, and loads into a model whose
                frozen parameters are there already.
            asynchronous: Return as soon as the state has been copied.
            if_busy: What to do while an asynchronous save goes on: "wait" for it, or "refuse" this one.

        Raises:
            CheckpointError: Something cannot be written, another save goes on and this one was to be refused,
                or the one before has failed; on all ranks.
            ConfigError: The tag, `keep_last` or `if_busy` cannot be used.
        """
        options = f"{tag=}, {keep_last=}, {asynchronous=}, {if_busy=}, {weights_only=}, {trainable_only=}"
        # A path that leads to one folder under two names is refused too: such a thing is rather a mistake.
        self._require_all_intact("save_checkpoint", f"{os.path.abspath(str(path))!r}, {options}")
        self._saves.make_way(if_busy)
        parts = self.parts()
        if weights_only:
            parts = parts._replace(optimizers=[], averages=[], rng_device=None)
        if trainable_only:
            parts = parts._replace(buckets=[bucket for bucket in self.buckets if bucket.trainable])
        background = self._saves if asynchronous else None
        # Absolute: an asynchronous save ends after the script may have gone to another folder.
        destination = Destination(os.path.abspath(os.fspath(path)), tag, keep_last)
        save(parts, destination, extra, background)

    def wait_for_checkpoint(self) -> None:
        """Return when no asynchronous save goes on any more. Collective.

        Raises:
            CheckpointError: It has failed; on all ranks.
        """
        self._begin_call("wait_for_checkpoint")
        self._saves.wait()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        tag: str | None = None,
        *,
        weights_only: bool = False,
        strict: bool = True,
        rng: bool = True,
    ) -> Any:
        """Take over a checkpoint, saved at whatever world size, stage and bucket size. Collective.

        Parameters that are in other param groups than when it was saved keep their state, by name, and the
        hyper-parameters given here.

        Args:
            path: The folder that `save_checkpoint` wrote, or the outer one of several; the same on all ranks.
            tag: Of one in the outer folder; None: the one that `latest` names, else the only one there is.
            weights_only: Weights and buffers only. Masters follow; optimizers, averages, the loss scale and
                random number generators stay as they are.
            strict: Refuse weights, buffers and parameters of optimizers that are on one side only. If False
                they stay as they are, their optimizer state begins anew, and one line of the log says which;
                `open_checkpoint(path).load_all(strict=False)` returns them. Frozen parameters that were left
                out by `trainable_only` may be missing all the same.
            rng: Restore every rank's random number generators, where there are as many ranks as there were.

        Returns:
            The `extra` it was saved with.

        Raises:
            CheckpointError: It is missing, incomplete, damaged, or of another model; on all ranks.
        """
        with self.open_checkpoint(path, tag) as opened:
            return opened.load_all(weights_only=weights_only, strict=strict, rng=rng).extra

    def open_checkpoint(self, path: str | os.PathLike[str], tag: str | None = None) -> OpenCheckpoint:
        """Open a checkpoint to take it over in steps, as `load_checkpoint` does at once. Collective.

        Args:
            path: As for `load_checkpoint`.
            tag: As for `load_checkpoint`.

        Returns:
            What is to be closed at last; it is a context manager.

        Raises:
            CheckpointError: It is missing, incomplete or damaged, or another one on another rank; on all
                ranks. Or the save that went on has failed.
        """
        self.averages.require_out()
        self._begin_call("open_checkpoint")
        self._saves.wait()
        opened = OpenCheckpoint(self.parts(), os.fspath(path), tag)
        self._ownership.num_steps = 0
        return opened

    @property
    def saves(self) -> Saves:
        """The asynchronous saves; for front ends, which put off what must wait for the end of one."""
        return self._saves

    def parts(self) -> Parts:
        """Return what checkpoints and averages are made of."""
        return Parts(
            model=self.model,
            buckets=self.buckets,
            masters=self._masters,
            optimizers=self.optimizers,
            averages=self.averages.all,
            loss_scaler=self.loss_scaler,
            collectives=self._collectives,
            stage=self.config.stage,
            rng_device=self._collectives.device,
            reshard_idle=self._lifecycle.reshard_idle,
        )

    # -- helpers --

    def _buckets_of(self, params: Iterable[nn.Parameter] | None) -> list[Bucket]:
        if params is None:
            return list(self.buckets)
        held = {self._places[param].bucket for param in params}
        return [bucket for bucket in self.buckets if bucket in held]

    def _buckets_named(self, names: Collection[str] | None) -> list[Bucket]:
        if names is None:
            return list(self.buckets)
        every = self.model.named_parameters(remove_duplicate=False)
        return self._buckets_of([param for name, param in every if name in names])

    def _give_grads(self, bucket: Bucket, wanted: set[int]) -> list[nn.Parameter]:
        """Put gradients where torch has them; return whose. Collective."""
        if bucket.grads.shard is None:
            return []
        views = bucket.views(bucket.gather_shards(bucket.grads.shard))
        given = []
        for index, param in enumerate(bucket.params):
            if id(param) in wanted and bucket.grads.has_grad[index]:
                grad = self._unscaled(param, views[index]).to(views[index].dtype)
                with without_torch_function():
                    param.grad = grad.clone()
                given.append(param)
        return given

    def _unscaled(self, param: nn.Parameter, grad: Tensor) -> Tensor:
        """Return a gradient without what the loss was scaled by; in fp32 if it was."""
        if not self.loss_scaler.is_active:
            return grad
        owner = self._ownership.owner_of(param)
        return grad.float() * (1 / self.loss_scaler.scale if owner is None else owner.grad_factor)

    def _begin_call(self, name: str, arguments: str = "") -> None:
        """Find out whether all ranks make the same call, before their gathers are mixed up."""
        fix = "Make the same call with the same arguments on every rank."
        self._collectives.require_same([f"engine.{name}({arguments})"], "The call", fix=fix)
        self.wait_for_weights()

    def _require_all_intact(self, name: str, arguments: str = "") -> None:
        """Begin a call that saves: what one rank has done to its model is raised on all. Collective."""
        self._begin_call(name, arguments)
        self.averages.require_out()
        takes_grads = self._ownership.takes_gradients
        self._collectives.agree(check_intact(self.model, self._places, takes_grads=takes_grads))
        self._masters.follow_writes()
        if not takes_grads:
            self._take_rank_0s()

    def _take_rank_0s(self) -> bool:
        """Take over what others have made of the parameters: rank 0's values. Collective.

        Returns:
            Whether any rank had other values, the same on all. If so, autograd refuses graphs built on them.
        """
        changed = [bucket.take_rank_0s() for bucket in self.buckets]
        were_others = any(self._collectives.gather_json(any(changed)))
        if were_others:
            for bucket in self.buckets:
                bucket.state.note_write(is_whole=True)
        self._masters.take_params()
        return were_others

    def _require_intact(self) -> None:
        self.averages.require_out()
        self.wait_for_weights()
        error = check_intact(self.model, self._places)
        if error is not None:
            raise error
