"""What `ZeroAccelerator` does between a loss and a step: backward, accumulation, clipping, unscaling.

A part of its class. Gradients are in shards, so everything that would look at `param.grad` goes through the
engines; what Accelerate decides (when a window ends, by what a loss is divided) stays Accelerate's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from zero_strategy.accelerate.optimizer import ZeroOptimizer
from zero_strategy.clip_given import clip_norm_of, clip_value_of
from zero_strategy.engine import ZeroEngine
from zero_strategy.engine_checks import run_backward
from zero_strategy.errors import ConfigError
from zero_strategy.front_ends.engines import find_engine
from zero_strategy.front_ends.grad_scaler import unscale_once
from zero_strategy.log import log_once
from zero_strategy.loss_scaler import LossScaler


class GradientMethods(Accelerator):  # type: ignore[misc]
    """The part of `ZeroAccelerator` that has to do with gradients."""

    _loss_scaler: LossScaler | None  # of fp16 parameters: one for all models, since a loss may reach several

    def living_engines(self) -> list[ZeroEngine]:
        """Return the engines of the models that were prepared and still exist, in that order."""
        raise NotImplementedError

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute and reduce gradients of the loss over the number of micro-batches.

        Args:
            loss: What to differentiate.
            **kwargs: As for `Tensor.backward`.

        Raises:
            ShardingError: A weight was needed that is sharded at that moment.
        """
        loss = loss / self.gradient_accumulation_steps
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        training = [engine for engine in self.living_engines() if engine.optimizers]
        if len(training) == 1:  # it may be that this rank's loss reaches no parameter, and others' do
            training[0].backward(loss, **kwargs)
        else:
            scaled = loss if self._loss_scaler is None else self._loss_scaler.scale_loss(loss)
            run_backward(scaled, **kwargs)

    # -- accumulation --

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate: backwards in here end no accumulation window of this model."""
        engine = engine_of(model)
        with nullcontext() if engine is None else engine.no_sync():
            yield

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Let backwards in here end the accumulation window of this model, also inside `no_sync`."""
        engine = engine_of(model)
        with nullcontext() if engine is None else engine.sync():
            yield

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Run a block in which all ranks have as many batches.

        Raises:
            ConfigError: They need not, since `even_batches` is false.
        """
        is_even = self.even_batches if even_batches is None else even_batches
        if not is_even and self.num_processes > 1:
            raise ConfigError(
                what="join_uneven_inputs was entered with even_batches=False.",
                why="A rank that has run out of batches would have to shadow the reductions of the others, "
                "and at stage 3 their gathers; DDP's Join does so for DDP only.",
                fix="Leave even_batches=True (the default), which gives every rank as many.",
            )
        yield

    # -- clipping --

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Scale the gradients of the given parameters down to a norm. Collective.

        Args:
            parameters: Of any models; the norm is that of all of them together.
            max_norm: The bound; `inf` only measures. So does a call inside an accumulation window.
            norm_type: The p of the p-norm.

        Returns:
            [] fp32, the norm before clipping, over all ranks.
        """
        params: Any = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._is_boundary():
            self._unscale_for(params)
            return clip_norm_of(self.living_engines(), params, float(max_norm), float(norm_type))
        norm = clip_norm_of(self.living_engines(), params, math.inf, float(norm_type))
        return norm if self.scaler is None else norm / self.scaler.get_scale()

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp the averaged gradients of the given parameters; inside an accumulation window, nothing."""
        params: Any = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._is_boundary():
            self._unscale_for(params)
            clip_value_of(self.living_engines(), params, float(clip_value))

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by Accelerate's loss scale, once a step. Collective.

        The loss scale of fp16 parameters is the engine's, which takes it out in the step.

        Args:
            optimizer: One or several that were prepared; None for all.
        """
        if self.scaler is None:
            return
        several = isinstance(optimizer, list | tuple)
        for wrapper in self._optimizers if optimizer is None else optimizer if several else [optimizer]:
            unscale_once(self.scaler, wrapper.optimizer if isinstance(wrapper, ZeroOptimizer) else wrapper)

    def _unscale_for(self, params: list[nn.Parameter]) -> None:
        """Unscale what holds one of these parameters, and leave other optimizers' gradients alone."""
        wanted = set(map(id, params))
        self.unscale_gradients(
            [
                wrapper
                for wrapper in self._optimizers
                if any(id(param) in wanted for group in wrapper.param_groups for param in group["params"])
            ]
        )

    def _is_boundary(self) -> bool:
        if not self.sync_gradients:
            log_once("Clipping inside an accumulation window does nothing: gradients are still being added.")
        return bool(self.sync_gradients)


def engine_of(model: Any) -> ZeroEngine | None:
    """Return the engine of a model, compiled or not; None for anything else."""
    inside = getattr(model, "_orig_mod", model)
    return find_engine(inside) if isinstance(inside, nn.Module) else None


@contextmanager
def gathered_parameters(
    engines: Iterable[ZeroEngine], params: Any, modifier_rank: int | None, enabled: bool
) -> Iterator[None]:
    """Make the models whole that have one of these parameters. See `rebinding`.

    Args:
        engines: All there are.
        params: One or several parameters; all of their model are made whole.
        modifier_rank: Whose changes are kept: None for nobody's, or 0.
        enabled: Whether to do anything.

    Raises:
        ConfigError: Another rank than 0 is to change them.
    """
    if modifier_rank not in (None, 0):
        raise ConfigError(
            what=f"GatheredParameters was given modifier_rank={modifier_rank}.",
            why="What rank 0 has written is kept.",
            fix="Pass modifier_rank=0, or None to look only.",
        )
    wanted = {id(param) for param in ([params] if isinstance(params, torch.Tensor) else list(params))}
    with ExitStack() as stack:
        for engine in engines:
            if enabled and any(id(param) in wanted for param in engine.model.parameters()):
                stack.enter_context(engine.unsharded_params(writeback=modifier_rank is not None))
        yield
