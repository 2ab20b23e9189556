"""The composition root: builds the parts of the engine, owns them, and forwards to them. It has no algorithm.

Read it to find which part does what; read the part to find out how. What takes state out and puts it back is
`EngineState`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy import root_methods
from zero_strategy.average import Averages
from zero_strategy.bucket_set import BucketSet
from zero_strategy.bucketing import check_model, describe_model
from zero_strategy.checkpoint.saves import Saves
from zero_strategy.comm.collectives import Collectives
from zero_strategy.comm.ledger import Ledger
from zero_strategy.comm.topology import Topology
from zero_strategy.compat import without_torch_function
from zero_strategy.config import ZeroConfig
from zero_strategy.engine_checks import (
    agreed_config,
    check_adapters_have_values,
    check_not_placed_by_others,
    check_not_sharded,
    check_not_wrapped,
    loss_of_other_weights,
    run_backward,
    step_at_rest,
)
from zero_strategy.engine_state import EngineState
from zero_strategy.errors import ShardingError
from zero_strategy.lifecycle import ParamLifecycle
from zero_strategy.live_buckets import LiveLimits
from zero_strategy.log import log_once
from zero_strategy.loss_scaler import LossScaler
from zero_strategy.materialize import Adoption, InitFn, check_first_values, shard_device
from zero_strategy.module_buffers import BufferBroadcaster
from zero_strategy.optim import full_state
from zero_strategy.optim.elementwise import check_elementwise
from zero_strategy.optim.ownership import Ownership
from zero_strategy.optim.places import check_params
from zero_strategy.optim.publish import Publisher
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer, StepSettings
from zero_strategy.optim.step_gradients import GradPart, StepGradients, Wanted
from zero_strategy.passes import BackwardPass, ForwardPass
from zero_strategy.precision import Masters
from zero_strategy.reducer import Doings, GradReducer
from zero_strategy.report import write_report


class ZeroEngine(EngineState):
    """Shards a model in place and trains it; the caller goes on using the model.

    Attributes:
        model: The module that was given.
        config: The resolved config.
        ledger: Bytes held and bytes sent.
        optimizers: What `shard_optimizer` has returned, in order.
        loss_scaler: Scales losses where trained parameters are in fp16; elsewhere its scale is 1.
        buckets: The buckets, in order of registration.
        averages: This rank's part of every `ShardedEMA`.
        module_buffers: Keeps the model's buffers equal.
        watch, stop: For front ends: ends all ranks when one fails; ends them together after a backward.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ZeroConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        device: torch.device | str | None = None,
        param_init_fn: InitFn | None = None,
        loss_scaler: LossScaler | None = None,
    ) -> None:
        """Shard a model. Collective: every rank must call it, with a model of the same structure.

        Rank 0's weights and buffers are everybody's afterwards. The model's own storages are let go of bucket
        by bucket. What is on the meta device gets memory and first values in the same rhythm, so that a model
        need never be whole anywhere: see [Note: First values] in materialize.py.

        Args:
            model: Any module whose parameters are on one device, or on meta. It is changed in place.
            config: A config, or what `ZeroConfig.load` reads.
            device: Where the shards live; by default where the parameters are.
            param_init_fn: Fills a module's own parameters and buffers in place. Called for each module that
                owns some on meta, children first; by default its `reset_parameters()` is.
            loss_scaler: Another engine's, where losses reach both models; by default one of its own.

        Raises:
            ConfigError: The model or the config cannot be honoured; on all ranks.
        """
        where = shard_device(model, device)
        topology = Topology(where)
        with topology.closed_if_refused():
            self.model = model
            self.ledger = Ledger()
            self._collectives = Collectives(topology, self.ledger)
            self.watch, self.stop = topology.watch, self._collectives.stop
            self._collectives.agree(
                check_not_sharded(model)
                or check_not_placed_by_others(model)
                or check_model(model)
                or check_adapters_have_values(model, param_init_fn)
                or check_first_values(model, param_init_fn, device)
            )
            self.config = agreed_config(config, self._collectives)
            self._collectives.require_same(describe_model(model), "The model")
            log_once(self.config.describe())

            self._bucket_set = BucketSet(model, self.config, self._collectives, device=where)
            self.buckets = self._bucket_set.buckets
            self._places = self._bucket_set.places
            self._masters = Masters(self.config)
            self._adopt(Adoption(model, self._bucket_set.planned(), where, param_init_fn))
            self.averages = Averages(self._masters)
            self._saves = Saves(self._collectives)
            self._ownership = Ownership(self._places)
            self.optimizers = self._ownership.optimizers
            self.loss_scaler = loss_scaler or LossScaler(self.config.fp16, is_active=False)
            self._listen_to_passes()
            self._finish_construction()

    def _listen_to_passes(self) -> None:
        """Make what does its work while forwards and backwards run; who listens first is called first."""
        zero = self.config.zero_optimization
        self._backward = BackwardPass()
        self._forward = ForwardPass(self.model, self._backward)
        self._reducer = GradReducer(
            self.buckets,
            self._collectives,
            self._backward,
            overlap=zero.overlap_comm,
            accumulate_whole=self.config.accumulate_whole_gradients,
            doings=lambda: Doings(self._lifecycle.order_digest(), self._ownership.num_steps),
            is_scaled=self._is_scaled_backward,
        )
        self.module_buffers = BufferBroadcaster(
            self.model, self._collectives, lambda: self._reducer.is_syncing
        )
        self.module_buffers.broadcast_all()
        if self.config.broadcast_buffers:
            buffers = self.module_buffers
            self._forward.listen(on_begin=buffers.before_forward, on_end=buffers.after_forward)
        self._lifecycle = ParamLifecycle(
            [(bucket, plan) for bucket, plan in self._bucket_set.planned() if bucket.policy.shard_params],
            self._forward,
            self._backward,
            limits=LiveLimits.of(zero),
            on_passed=self._reducer.on_passed,
            require_same_order=lambda order: self._collectives.require_same(
                order, "The order in which modules ran"
            ),
        )
        self._publisher = Publisher(self.model, self._places, self.config)
        self._forward.listen(on_begin=self._publisher.before_root_forward)

    def _adopt(self, adoption: Adoption) -> None:
        self.ledger.watch(self._bucket_set.memory)
        self.ledger.watch(self._masters.memory)
        for bucket, unrounded in adoption.run(self._collectives):
            if bucket.trainable:
                self._masters.keep(bucket, unrounded)

    def _finish_construction(self) -> None:
        root_methods.install(self)
        self._bucket_set.listen(self._reducer.exchange)
        self._bucket_set.listen(self._lifecycle.exchange)
        self._bucket_set.listen(self.averages.exchange)
        self.ledger.watch(self._ownership.memory)
        self.ledger.watch(self.averages.memory)
        self.ledger.watch(self._saves.memory_use)
        self.ledger.watch(self._collectives.memory)
        self._backward.listen(on_end=self._on_backward_end, on_abort=self.ledger.note_backward)
        if self._bucket_set.trains_fp16():
            self.loss_scaler.activate()
        self.loss_scaler.listen(self._multiply_grads)
        self.ledger.report_with(self._report)
        self.ledger.reset()

    def shard_optimizer(self, optimizer: Optimizer) -> ShardedOptimizer:
        """Make an optimizer update this rank's slices only.

        Args:
            optimizer: Any element-wise optimizer over parameters of the model; may be called once per
                optimizer, each over its own parameters.

        Returns:
            The optimizer to use from now on.

        Raises:
            ConfigError: It is not element-wise, or holds parameters that are not the model's or not
                trainable.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._collectives.agree(
            check_not_wrapped(optimizer)
            or check_elementwise(optimizer)
            or check_params(params, self._places, self._ownership.is_claimed)
        )
        self._collectives.require_same(
            full_state.describe_optimizer(optimizer, self._places), "The optimizer"
        )
        self.wake()
        settings = StepSettings(
            before_step=self._before_step,
            is_syncing=lambda: self._reducer.is_syncing,
            is_claimed=self._ownership.is_claimed,
            make_trainable=self._make_trainable,
            after_step=self._after_step,
            scaler=self.loss_scaler,
            publisher=self._publisher,
            config=self.config,
        )
        sharded = ShardedOptimizer(optimizer, self._places, self._masters, self._collectives, settings)
        self.optimizers.append(sharded)
        return sharded

    def forget_optimizers(self) -> None:
        """Forget all optimizers and their state, to train anew with others; weights and masters stay."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
        self.optimizers.clear()

    # -- runtime --

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute and reduce gradients: `loss.backward()`, of a scaled loss in fp16, with errors explained.

        Below stage 3 the loss may depend on no parameter on this rank while it does on others.

        Args:
            loss: What to differentiate.
            **kwargs: As for `Tensor.backward`.

        Raises:
            ShardingError: A weight was needed that is sharded at that moment; or ranks have trained apart
                since `rest`, so that the loss is one of weights that are gone.
        """
        if self.wake():
            raise loss_of_other_weights()
        before = self._backward.num_ended
        run_backward(self.loss_scaler.scale_loss(loss), **kwargs)
        if self._backward.num_ended == before:
            self._backward.end_unseen()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards accumulate and do not end the accumulation window."""
        return self._reducer.syncing(False)

    def sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards end the accumulation window, also inside `no_sync`."""
        return self._reducer.syncing(True)

    def forward_scope(self) -> AbstractContextManager[None]:
        """Return a context that counts as a forward of the root, for methods that are not `forward`."""
        return self._forward.scope()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the whole model; if not `set_to_none`, leave zeros, as torch does."""
        if self.is_resting:
            type(self.model).zero_grad(self.model, set_to_none)
            return
        self._backward.check()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)
        for bucket in self.buckets:
            bucket.grads.clear(keep_zeros=not set_to_none)
        with without_torch_function():  # which late parameters would answer through, one by one
            for param in self.model.parameters():
                if param.grad is not None:
                    param.grad = None

    def _before_step(self) -> None:
        self._backward.check()
        if self.is_resting:
            raise step_at_rest()
        if not self._reducer.is_syncing:
            raise ShardingError(
                what="step() was called inside no_sync().",
                why="The accumulation window has not ended: gradients are not all reduced.",
                fix="Run the last backward of the window, and the step, outside of no_sync().",
            )
        self._require_intact()
        self._saves.look()
        self.module_buffers.broadcast_due()
        self._lifecycle.reshard_idle()
        self._masters.follow_writes()
        self.ledger.begin_step()

    def _after_step(self) -> None:
        self.ledger.end_step()
        self._ownership.note_step()

    def _on_backward_end(self) -> None:
        self.ledger.note_backward()
        self.loss_scaler.note_backward_end()
        if self._reducer.took_unscaled and self._reducer.reduces_now():
            raise self.loss_scaler.unscaled_error()
        if not self.optimizers and self._backward.num_ended == 1:
            log_once(
                "Gradients have been reduced in two backwards, and the engine has no optimizer. To train: "
                "optimizer = engine.shard_optimizer(optimizer), and step what it returns."
            )

    def _is_scaled_backward(self) -> bool | None:
        return self.loss_scaler.is_scaled_backward() if self.loss_scaler.is_active else None

    def _multiply_grads(self, factor: float) -> None:
        for bucket in self.buckets:
            bucket.grads.multiply(factor)

    # -- queries --

    def holds(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether these are the engine's parameters, all of them and no others, and still in its memory."""
        if self.is_resting and any(bucket.find_unbound() is not None for bucket in self.buckets):
            return False  # whoever has trained it meanwhile has moved it
        return {id(p) for p in params} == {id(p) for bucket in self.buckets for p in bucket.params}

    def grad_parts(self, params: Iterable[nn.Parameter]) -> tuple[list[GradPart], list[nn.Parameter]]:
        """Return the reduced gradients of some parameters, optimizer by optimizer. See `clip_given`.

        Returns:
            The gradients, and those of the parameters that are not this engine's.
        """
        owned, others = self._ownership.split(params)
        parts = []
        for optimizer, wanted in owned:
            grads = None if optimizer is None else optimizer.gradients
            parts.append(GradPart(grads or self._without_optimizer(wanted), wanted))
        return parts, others

    def _without_optimizer(self, wanted: Wanted) -> StepGradients:
        return StepGradients(
            lambda: iter(wanted.items()),
            self._collectives,
            self.loss_scaler,
            is_syncing=lambda: self._reducer.is_syncing,
            checks_overflow=False,
        )

    @property
    def is_resting(self) -> bool:
        """Whether gradients are left to others. See `rest`."""
        return not self._ownership.takes_gradients

    @property
    def collectives(self) -> Collectives:
        """What the ranks of this engine talk to one another with."""
        return self._collectives

    # -- end --

    def rest(self) -> None:
        """Let anybody train the model until `wake`; for front ends, at the end of a run.

        Another strategy, or a plain optimizer, finds the gradients where autograd puts them. State can be
        saved as ever, and gives all ranks rank 0's values. Where parameters are sharded nobody else could use
        them, and nothing changes.
        """
        if self.is_resting or any(bucket.policy.shard_params for bucket in self.buckets):
            return
        if self.watch.failure is None:
            self.wait_for_weights()
        self._forward.close()
        self._reducer.close()
        self._ownership.takes_gradients = False

    def wake(self) -> bool:
        """Train the model again, from the values that rank 0's parameters have now. Collective.

        Returns:
            Whether any rank had other values until now. False for an engine that is awake.
        """
        if not self.is_resting:
            return False
        self._begin_call("wake")
        self._ownership.takes_gradients, self._ownership.num_steps = True, 0
        self._forward.open()
        self._reducer.reopen()
        return self._take_rank_0s()

    def close(self) -> None:
        """Take everything off the model that the engine has put on it, and give the process groups back.

        To be called on all ranks. At stage 3 the parameters stay sharded: take what you need before. A save
        that goes on is waited for.

        Raises:
            CheckpointError: That save has failed.
        """
        try:
            self._saves.close()
        finally:
            self._close()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ShardingError(
            what="A ZeroEngine was deep-copied.",
            why="It holds process groups and is tied to one model.",
            fix="Build another engine for the copy of the model; copy the model before it is sharded.",
        )

    # -- helpers --

    def _close(self) -> None:
        self._ownership.close()
        root_methods.remove(self.model)
        self._forward.close()
        self._lifecycle.close()
        self._reducer.close()
        self.loss_scaler.unlisten(self._multiply_grads)
        try:
            self._publisher.close()
        finally:
            self._collectives.close()

    def _report(self) -> str:
        return write_report(
            self.ledger,
            self.buckets,
            self.optimizers,
            world_size=self._collectives.world_size,
            config=self.config,
        )

    def _make_trainable(self, params: Sequence[nn.Parameter]) -> None:
        self._backward.check()
        self.wait_for_weights()
        self._lifecycle.reshard_idle()
        self._bucket_set.make_trainable(params)
        if self._bucket_set.trains_fp16():
            self.loss_scaler.activate()
