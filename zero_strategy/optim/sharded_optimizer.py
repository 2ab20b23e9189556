"""The user's optimizer, run on this rank's slices.

Param groups hold the user's parameters, as ever: schedulers write to them, callbacks read them. Only inside
`step()` the user's own class finds this rank's slices there and updates those (slice_step.py). So any
element-wise optimizer works, with its own state, and a slice without a gradient is skipped as a parameter
without one would be.

Invariant: no method but `step` assigns to `self`. Lightning's wrapper runs them with itself as `self`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.bucket import Bucket
from zero_strategy.comm.collectives import Collectives
from zero_strategy.comm.ledger import MemoryUse
from zero_strategy.config import ZeroConfig
from zero_strategy.errors import ConfigError
from zero_strategy.layout import ShardSlice
from zero_strategy.loss_scaler import LossScaler
from zero_strategy.optim import full_state
from zero_strategy.optim.places import Place, SliceState, check_params
from zero_strategy.optim.publish import Publisher
from zero_strategy.optim.slice_step import SliceStep
from zero_strategy.optim.step_gradients import StepGradients
from zero_strategy.precision import Masters


@dataclass
class StepSettings:
    """What the engine decides about a step.

    Attributes:
        before_step: Called when a step begins; lets go of whole parameters that are about to be outdated.
        after_step: Called when it has ended.
        is_claimed: Whether an optimizer of the engine holds a parameter already.
        make_trainable: Gives parameters that were frozen so far a place for gradients; collective.
        is_syncing: Whether an accumulation window ends here; inside `no_sync` there is nothing to clip yet.
        scaler: Says what gradients are to be divided by.
        publisher: Makes the whole parameters agree.
        config: Resolved; its `gradient_clipping` counts if nobody has clipped since the last step.
    """

    before_step: Callable[[], None]
    is_syncing: Callable[[], bool]
    is_claimed: Callable[[nn.Parameter], bool]
    make_trainable: Callable[[Sequence[nn.Parameter]], None]
    after_step: Callable[[], None]
    scaler: LossScaler
    publisher: Publisher
    config: ZeroConfig


@dataclass
class _Run:
    """The part of the optimizer that changes, apart from its state and param groups."""

    collectives: Collectives
    settings: StepSettings
    places: dict[nn.Parameter, Place]
    masters: Masters
    grads: StepGradients
    update: SliceStep
    step_was_skipped: bool = False


class ShardedOptimizer(Optimizer):
    """A `torch.optim.Optimizer` that updates what this rank owns and makes the parameters agree.

    Shares `param_groups`, `state` and `defaults` with the user's optimizer; `state` is keyed by slices. The
    list of groups may be replaced, as Lightning's finetuning callbacks do when they resume.
    """

    def __init__(
        self,
        inner: Optimizer,
        places: dict[nn.Parameter, Place],
        masters: Masters,
        collectives: Collectives,
        settings: StepSettings,
    ) -> None:
        """Wrap an optimizer that `check_elementwise` and `check_params` have passed.

        Args:
            inner: The user's optimizer.
            places: Where each parameter of the engine lies.
            masters: Gives the master weights of a bucket.
            collectives: For norms and for publishing.
            settings: What the engine decides.
        """
        self._inner = inner
        grads = StepGradients(
            self._params_of,
            collectives,
            settings.scaler,
            is_syncing=settings.is_syncing,
            checks_overflow=settings.config.bf16.check_grad_overflow,
        )
        update = SliceStep(
            inner,
            places,
            masters,
            settings.publisher,
            sub_group_numel=settings.config.zero_optimization.sub_group_size,
        )
        self._run = _Run(collectives, settings, places, masters, grads, update)
        groups = inner.param_groups
        super().__init__(groups, inner.defaults)
        inner.param_groups = groups  # the very list that others may hold, which torch has begun anew
        self.state = inner.state
        self.defaults = inner.defaults
        self._slice_state()

    # -- runtime --

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights from the reduced gradients.

        Args:
            closure: Computes the loss and its gradients; called first, as by any torch optimizer.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        run = self._run
        run.settings.before_step()
        max_norm = run.settings.config.gradient_clipping
        if max_norm and not run.grads.was_clipped:
            self.clip_grad_norm_(max_norm)
        run.step_was_skipped = run.grads.must_skip()
        try:
            if not run.step_was_skipped:
                run.update.run(self.param_groups, self.buckets, run.grads.factor)
            run.grads.end_step(run.step_was_skipped)
        finally:
            run.settings.after_step()
        return loss

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients of this optimizer so that their global norm is at most `max_norm`. Collective.

        Args:
            max_norm: The bound; `inf` only measures.
            norm_type: The p of the p-norm.
            error_if_nonfinite: Leave the gradients alone and raise if the norm is NaN or infinite, as torch's
                own `clip_grad_norm_` does when asked to.

        Returns:
            [] fp32, the norm *before* clipping, over all ranks, each element counted once. What the gradients
            were multiplied by is `clip_coefficient`.

        Raises:
            ShardingError: The norm is not finite, and `error_if_nonfinite`; on all ranks.
        """
        norm = self._run.grads.clip_norm(
            float(max_norm), float(norm_type), error_if_nonfinite=error_if_nonfinite
        )
        return norm.to(self.buckets[0].flat.device) if self.buckets else norm

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every element of the averaged gradients to [-clip_value, clip_value]."""
        self._run.grads.clip_value(clip_value)

    def unscale_grads(self, inverse_scale: float) -> bool:
        """Multiply the gradients, and tell whether one is infinite or NaN. Collective.

        For a scaler of another library, which scales losses itself and skips the step, by not calling it, if
        the answer is yes: torch's `GradScaler` made to work on shards.

        Args:
            inverse_scale: 1 / the scale.

        Returns:
            The same on all ranks.

        Raises:
            ShardingError: The engine scales losses itself.
        """
        run = self._run
        run.step_was_skipped = run.grads.unscale(inverse_scale)
        return run.step_was_skipped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this optimizer's parameters.

        Args:
            set_to_none: As in torch: if False, zeros stay where there were gradients, and a parameter that is
                not used in the next step is stepped with those (weight decay, momentum).
        """
        for bucket, wanted in self._params_of():
            bucket.grads.clear(wanted, keep_zeros=not set_to_none)
        self._run.grads.forget()

    # -- state --

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's own format, whole tensors by parameter index. Collective.

        Returns:
            On rank 0 everything, on the CPU; elsewhere the param groups and an empty `state`.
        """
        return full_state.gather(self, self._run.collectives)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state in torch's own format, such as plain AdamW's. Collective.

        Args:
            state_dict: Rank 0's is used; the other ranks may pass the same, or anything.

        Raises:
            CheckpointError: It belongs to other param groups or parameters.
        """
        full_state.scatter(self, state_dict, self._run.collectives)

    def slice_states(self) -> Iterator[SliceState]:
        """Yield this rank's state, slice by slice."""
        for param in self.params():
            fqn = self._run.places[param].fqn
            for piece, weight in self.slices_of(param):
                for key, value in self.state.get(weight, {}).items():
                    yield SliceState(fqn, piece, key, value)

    def slices_of(self, param: nn.Parameter) -> list[tuple[ShardSlice, Tensor]]:
        """Return this rank's slices of a parameter, each with its master weights."""
        bucket, index = self._run.places[param]
        return self._run.masters.of(bucket).slices_of(index)

    def place_of(self, param: nn.Parameter) -> Place:
        """Return where one of the optimizer's parameters lies."""
        return self._run.places[param]

    # -- queries --

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer; by this name Lightning's LearningRateMonitor looks through a wrapper."""
        return self._inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups, those of the user's optimizer; may be replaced by others. Collective then.

        Frozen parameters in the new groups get a place for gradients and state as well: groups are replaced
        to resume, and those parameters were trained when they were saved.
        """
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        params = [param for group in groups for param in group["params"]]
        if params:
            error = check_params(params, self._run.places, self._is_claimed_elsewhere, may_be_frozen=True)
            self._run.collectives.agree(error)
            self._take(params)
        self._inner.param_groups = groups

    @property
    def clip_coefficient(self) -> float:
        """What the last clipping by norm multiplied the gradients by; 1.0 if it left them alone."""
        return self._run.grads.clip_coefficient

    @property
    def gradients(self) -> StepGradients:
        """The reduced gradients, on their way into the next step."""
        return self._run.grads

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last `step()` was not applied because of an overflow; then a scheduler should wait."""
        return self._run.step_was_skipped

    @property
    def grad_factor(self) -> float:
        """What gradients are yet to be multiplied by: clipping, and the reciprocal of the loss scale."""
        return self._run.grads.factor

    @property
    def user_class(self) -> str:
        """The name of the user's optimizer class."""
        return type(self._inner).__name__

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets that hold a parameter of this optimizer."""
        return list(dict.fromkeys(self._run.places[param].bucket for param in self.params()))

    def params(self) -> Iterator[nn.Parameter]:
        """Yield the user's parameters, in the order of the param groups."""
        for group in self.param_groups:
            yield from group["params"]

    def memory(self) -> MemoryUse:
        """Return the bytes of the optimizer's state; step counters and the like apart, as `scalars`."""
        use = MemoryUse()
        # By the state alone: within a step the param groups hold slices.
        for value in (value for state in self.state.values() for value in state.values()):
            if isinstance(value, Tensor):
                nbytes = value.nbytes
                if value.dim():
                    use.optimizer += nbytes
                else:
                    use.scalars += nbytes
        return use

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the same engine, as for any torch optimizer. Collective.

        Raises:
            ConfigError: One of them is not the engine's, or is frozen.
        """
        params = param_group["params"]
        param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
        error = check_params(param_group["params"], self._run.places, self._run.settings.is_claimed)
        self._run.collectives.agree(error)
        super().add_param_group(param_group)
        try:
            self._take(param_group["params"])
        except ConfigError:  # ranks give different parameters
            self.param_groups.pop()
            raise

    # -- helpers --

    def _take(self, params: Sequence[nn.Parameter]) -> None:
        """Make sure that parameters of this optimizer have a place for gradients, and masters."""
        self._run.settings.make_trainable(params)
        for param in params:
            self._run.masters.of(self._run.places[param].bucket)

    def _is_claimed_elsewhere(self, param: nn.Parameter) -> bool:
        return self._run.settings.is_claimed(param) and not any(param is own for own in self.params())

    def _slice_state(self) -> None:
        """Cut state that the optimizer has already (it was stepped before it was sharded) into slices."""
        for param in self.params():
            whole = self.state.pop(param, None)
            for piece, weight in self.slices_of(param) if whole else []:
                self.state[weight] = {
                    key: full_state.in_dtype_of(weight, key, full_state.cut(value, param.numel(), piece))
                    for key, value in whole.items()
                }

    def _params_of(self) -> Iterator[tuple[Bucket, set[int]]]:
        wanted: dict[Bucket, set[int]] = {}
        for param in self.params():
            place = self._run.places[param]
            wanted.setdefault(place.bucket, set()).add(place.param_index)
        yield from wanted.items()
