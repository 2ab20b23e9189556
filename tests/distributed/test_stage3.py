"""Stage 3: parameters are whole only around use, and whatever a user's code does in between stays right or says so.

Oracles: for numbers, naive data parallelism in the same processes, tolerance 0 unless said; for the order of gathers, the
list of events on the engine's buckets, written out. "+a" is the start of a gather of unit a, "-a" its resharding.
"""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.models import Awkward, Mlp, MoeModel, Routes, batches, loss_of, param_groups
from tests.reference import (
    Naive,
    Plain,
    Recipe,
    Zero,
    adamw,
    assert_same_bits,
    compare,
    grid,
    train,
    train_ddp,
    train_with,
)

ROUTES = Recipe(build=lambda _: Routes())


def inputs(step: int = 0, size: int = 4, width: int = 15) -> Tensor:
    """This rank's inputs of a step."""
    return torch.randn(size, width, generator=torch.Generator().manual_seed(100 * step + rank()))


def route_loss(model: nn.Module, step: int, route: str = "abc") -> Tensor:
    """A quadratic loss by a route."""
    return model(inputs(step), route).pow(2).mean()


class Recorder(logging.Handler):
    """Notes every gather and resharding of an engine's buckets, and every log record of level warning."""

    def __init__(self, engine: zs.ZeroEngine) -> None:
        super().__init__(logging.WARNING)
        self.events: list[str] = []
        self.warnings: list[str] = []
        self._whole: set[str] = set()
        self.most_whole: set[str] = set()
        for bucket in engine.buckets:
            unit = bucket.name.split(".")[-2] if bucket.name.startswith("units") else "root"
            for sign, method in (("+", "start_unshard"), ("-", "reshard"), ("!", "drop_gather")):
                setattr(bucket, method, partial(self._call, sign + unit, getattr(bucket, method)))
        logging.getLogger().addHandler(self)

    def _call(self, event: str, method: Callable[..., Any], *args: Any) -> Any:
        self.events.append(event)
        if event[0] == "+":
            self._whole.add(event[1:])
        else:
            self._whole.discard(event[1:])
        self.most_whole = max(self.most_whole, self._whole, key=len).copy()
        return method(*args)

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())

    def take(self) -> list[str]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events


def assert_nothing_whole(engine: zs.ZeroEngine) -> None:
    """Require that no sharded bucket is whole or on its way."""
    assert engine.ledger.memory["unsharded"] == 0
    assert not any(bucket.is_whole for bucket in engine.buckets if bucket.policy.shard_params)


# -- when parameters are whole -------------------------------------------------------------------------------


@distributed(world_size=2)
def test_units_are_gathered_for_their_forward_and_their_backward_and_released_after() -> None:
    zero = Zero(ROUTES, stage=3, stage3_prefetch_bucket_size=0)
    recorder = Recorder(zero.engine)
    for step in range(3):
        zero.backward(route_loss(zero.model, step))
        forward = ["+root", "+a", "-a", "+b", "-b", "+c", "-c"]
        assert recorder.take() == [*forward, "+c", "-c", "+b", "-b", "+a", "-a", "-root"]
        assert_nothing_whole(zero.engine)
        zero.step()
        assert recorder.take() == []
    zero.close()


@distributed(world_size=2)
def test_prefetch_starts_the_next_gather_of_the_last_iteration_one_unit_ahead() -> None:
    zero = Zero(ROUTES, stage=3)
    recorder = Recorder(zero.engine)
    zero.backward(route_loss(zero.model, 0))
    recorder.take()
    for step in range(2):
        zero.backward(route_loss(zero.model, step))
        forward = ["+root", "+a", "+b", "-a", "+c", "-b", "-c"]
        assert recorder.take() == [*forward, "+c", "+b", "-c", "+a", "-b", "-a", "-root"]
        assert_nothing_whole(zero.engine)
    assert len(recorder.most_whole) == 3, "two units and the root"
    zero.close()


@distributed(world_size=2)
def test_prefetch_skips_a_bucket_that_is_larger_than_its_allowance() -> None:
    zero = Zero(ROUTES, stage=3, stage3_prefetch_bucket_size=100)
    recorder = Recorder(zero.engine)
    for step in range(3):
        recorder.take()
        zero.backward(route_loss(zero.model, step))
    assert recorder.take()[:6] == ["+root", "+a", "-a", "+b", "-b", "+c"]
    zero.close()


@distributed(world_size=2)
def test_a_changed_route_drops_the_plan_quietly_and_is_recorded_anew() -> None:
    """Case B006: routes change from step to step, with an evaluation in between; nothing is said, nothing stays behind."""
    routes = ["abc", "ac", "cba", "cba", "abc", "b", "abc", "ac", "cba", "abc", "abc", "abc"]
    naive, zero = Naive(ROUTES), Zero(ROUTES, stage=3)
    recorder = Recorder(zero.engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step, route in enumerate(routes):
            for way in (naive, zero):
                with torch.no_grad():
                    way.model(inputs(step), routes[-step])
                way.backward(route_loss(way.model, step, route))
            for name, wanted in naive.grads().items():
                grad = zero.grads()[name]
                assert (grad is None) == (wanted is None)
                assert grad is None or torch.equal(grad, wanted), (step, route, name)
            for way in (naive, zero):
                way.step()
            assert_nothing_whole(zero.engine)
    assert recorder.warnings == []
    recorder.take()
    zero.backward(route_loss(zero.model, 0))
    assert recorder.take()[:4] == ["+root", "+a", "+b", "-a"], "after three equal steps the plan holds again"
    zero.close()


@distributed(world_size=2)
def test_forwards_without_gradients_leave_nothing_whole_and_do_not_disturb_training() -> None:
    """A loop that generates: growing inputs, `no_grad` and `inference_mode`, between training steps."""
    naive, zero = Naive(ROUTES), Zero(ROUTES, stage=3)
    for step in range(3):
        for mode in (torch.no_grad, torch.inference_mode):
            for size in range(1, 5):
                with mode():
                    outputs = [way.model(inputs(step, size)) for way in (naive, zero)]
                assert torch.equal(*outputs)
                assert_nothing_whole(zero.engine)
        for way in (naive, zero):
            way.backward(route_loss(way.model, step))
            way.step()
    weights = zero.weights()
    for name, wanted in naive.weights().items() if rank() == 0 else ():
        assert torch.equal(weights[name], wanted)
    zero.close()


@distributed(world_size=2)
def test_parameters_are_no_inference_tensors_after_inference_mode() -> None:
    with torch.inference_mode():
        zero_outside = Zero(ROUTES, stage=3)
    for zero in (zero_outside, Zero(ROUTES, stage=3)):
        with torch.inference_mode():
            zero.model(inputs())
            with zero.engine.unsharded_params():
                pass
        assert not any(param.is_inference() for param in zero.model.parameters())
        with zero.engine.unsharded_params():
            assert not any(param.is_inference() for param in zero.model.parameters())
        zero.backward(route_loss(zero.model, 0))
        zero.step()
        zero.close()


@distributed(world_size=2)
def test_a_forward_without_a_backward_leaves_the_next_iteration_right() -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        model(inputs(step + 50))  # an evaluation that forgot no_grad
        return route_loss(model, step)

    compare(ROUTES, loss, stage=3)
    zero = Zero(ROUTES, stage=3)
    zero.model(inputs())
    zero.step()
    assert_nothing_whole(zero.engine)
    zero.close()


@distributed(world_size=2)
def test_a_leaf_module_is_one_unit() -> None:
    recipe = Recipe(build=lambda _: nn.Sequential(Routes(), nn.Linear(3, 3)))
    zero = Zero(recipe, stage=3, leaf_module={"names": ["0"]})
    assert {bucket.name.split(".float32")[0] for bucket in zero.engine.buckets} == {"0", "root"}
    compare(
        recipe, lambda model, step: model(inputs(step)).pow(2).mean(), stage=3, leaf_module={"names": ["0"]}
    )
    zero.close()


# -- whatever is called --------------------------------------------------------------------------------------


class Encoder(Routes):
    """A model with methods of its own."""

    def encode(self, x: Tensor) -> Tensor:
        for unit in self.units.values():
            x = unit(x)
        return x

    def score(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x)) + self.head(x)


@distributed(world_size=2)
def test_modules_and_methods_called_on_their_own_gather_what_they_need() -> None:
    """Case B039."""
    recipe = Recipe(build=lambda _: Encoder())
    calls: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "a unit": lambda model, x: model.units["b"](x),
        "a part of a unit": lambda model, x: model.units["b"][0](x),
        "a module of the root": lambda model, x: model.head(x),
        "a method that calls units": lambda model, x: model.encode(x),
        "a method that calls units and the root": lambda model, x: model.score(x),
        "a method, then forward": lambda model, x: model(model.encode(x)),
    }
    for name, call in calls.items():
        with subtest(name):
            compare(recipe, lambda model, step, call=call: call(model, inputs(step)).pow(2).mean(), stage=3)  # type: ignore[misc]


@distributed(world_size=2)
def test_a_forward_scope_keeps_the_root_whole_across_a_method() -> None:
    zero = Zero(Recipe(build=lambda _: Encoder()), stage=3, stage3_prefetch_bucket_size=0)
    recorder = Recorder(zero.engine)
    with zero.engine.forward_scope():
        loss = zero.model.score(inputs()).pow(2).mean()
    zero.backward(loss)
    events = recorder.take()
    assert events.count("+root") == 1 and events[0] == "+root" and events[-1] == "-root"
    zero.close()


@dataclass
class Record:
    hidden: Tensor
    note: str = "dataclass"


class Pair(NamedTuple):
    hidden: Tensor
    nothing: None = None


class Output(OrderedDict[str, Any]):
    """A mapping with attributes, as the outputs of transformers are."""

    @property
    def hidden(self) -> Tensor:
        return self["hidden"]


class Slotted:
    __slots__ = ("device", "hidden")

    def __init__(self, hidden: Tensor) -> None:
        self.hidden, self.device = hidden, hidden.device


class Cache:
    """An object of a class nobody knows, the tensor two levels down."""

    def __init__(self, hidden: Tensor) -> None:
        self.layers = [{"keys": (hidden, None)}]

    @property
    def hidden(self) -> Tensor:
        return self.layers[0]["keys"][0]


WRAPPERS: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": Record,
    "named tuple": Pair,
    "mapping": lambda x: Output(hidden=x, text="text", nothing=None),
    "slots": Slotted,
    "cache": Cache,
}


class Wrapping(nn.Module):
    """Units that return their tensor inside something else."""

    def __init__(self, wrapper: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.units = nn.ModuleList(Wrapped(wrapper) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        for unit in self.units:
            out = unit(x)
            x = x + out.hidden
        return [{"x": (x, None, "text")}]


class Wrapped(nn.Linear):
    def __init__(self, wrapper: Callable[[Tensor], Any]) -> None:
        super().__init__(15, 15)
        self.wrapper = wrapper

    def forward(self, x: Tensor) -> Any:
        return self.wrapper(torch.tanh(super().forward(x)))


@distributed(world_size=2)
def test_outputs_of_any_class_are_searched_for_tensors() -> None:
    """Case B082."""
    for name, wrapper in WRAPPERS.items():
        with subtest(name), warnings.catch_warnings():
            warnings.simplefilter("error")
            recipe = Recipe(build=lambda _, wrapper=wrapper: Wrapping(wrapper))  # type: ignore[misc]
            compare(recipe, lambda model, step: model(inputs(step))[0]["x"][0].pow(2).mean(), stage=3)


class Hidden(nn.Module):
    """Units whose output is a function that closes over the tensor: nothing can find it there."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Closing(15, 15) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = x + unit(x)()
        return x


class Closing(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        out = torch.tanh(super().forward(x))
        return lambda: out


@distributed(world_size=2)
def test_an_output_that_cannot_be_searched_gives_right_gradients_or_an_error_never_wrong_ones() -> None:
    recipe = Recipe(build=lambda _: Hidden())
    loss: Callable[[nn.Module, int], Tensor] = lambda model, step: model(inputs(step)).pow(2).mean()  # noqa: E731
    reference = train_with(Naive(recipe), loss)
    try:
        trace = train_with(Zero(recipe, stage=3), loss)
    except RuntimeError:
        return
    assert_same_bits(trace, reference)


class SideChannel(nn.Module):
    """Every unit leaves an auxiliary loss on itself, as mixtures of experts do for balance."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Leaving(15, 15) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = x + unit(x)
        return x


class Leaving(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(super().forward(x))
        self.auxiliary = (self.weight * x.mean()).pow(2).sum() + out.pow(4).mean()
        return out


@distributed(world_size=2)
def test_a_loss_left_on_a_module_counts_with_that_of_its_output() -> None:
    def loss(model: SideChannel, step: int) -> Tensor:
        out = model(inputs(step))
        return out.pow(2).mean() + sum(unit.auxiliary for unit in model.units)

    compare(Recipe(build=lambda _: SideChannel()), loss, stage=3)


class Aliased(nn.Module):
    """A module used twice in one forward, with another between."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(15, 15) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 0, 0, 1):
            x = x + torch.tanh(self.units[index](x))
        return x


@distributed(world_size=2)
@grid(prefetch=(0, 50_000_000), size=(100, 25_000_000))
def test_a_unit_used_several_times_in_one_forward_equals_naive_data_parallelism(
    prefetch: int, size: int
) -> None:
    settings = {"stage3_prefetch_bucket_size": prefetch, "reduce_bucket_size": size}
    recipe = Recipe(build=lambda _: Aliased())
    compare(recipe, lambda model, step: model(inputs(step)).pow(2).mean(), stage=3, **settings)


# -- graphs --------------------------------------------------------------------------------------------------


@distributed(world_size=2)
@grid(stage=(0, 1, 2, 3))
def test_several_forwards_before_one_backward_equal_naive_data_parallelism(stage: int) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        outs = [model(inputs(10 * step + i), route) for i, route in enumerate(("abc", "cb", "abc"))]
        return torch.stack([out.pow(2).mean() for out in outs]).sum()

    compare(ROUTES, loss, stage=stage, reduce_bucket_size=300)


@distributed(world_size=2)
@grid(stage=(0, 1, 2, 3))
def test_a_retained_graph_can_be_walked_twice(stage: int) -> None:
    """Each walk adds its mean: to rounding. Nothing is written in between, which torch would refuse."""
    naive, zero = Naive(ROUTES), Zero(ROUTES, stage=stage)
    for step in range(2):
        for way in (naive, zero):
            loss = route_loss(way.model, step)
            loss.backward(retain_graph=True)
            way.backward(loss)
        for name, wanted in naive.grads().items():
            grad = zero.grads()[name]
            assert grad is not None and wanted is not None
            torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-8)
        for way in (naive, zero):
            way.step()
    zero.close()


@distributed(world_size=2)
@grid(stage=(0, 1, 2, 3))
def test_a_graph_kept_over_a_step_is_refused_as_by_torch(stage: int) -> None:
    """A backward through weights that a step has changed would use the new values: torch raises, so does every stage."""
    zero = Zero(ROUTES, stage=stage)
    loss = route_loss(zero.model, 0)
    loss.backward(retain_graph=True)
    zero.step()
    with expect_error(RuntimeError, "modified by an inplace operation"):
        loss.backward()
    zero.model.zero_grad()
    zero.close()


@distributed(world_size=2)
@grid(stage=(0, 1, 2, 3))
def test_a_gradient_penalty_inside_unsharded_params_equals_naive_data_parallelism(stage: int) -> None:
    """The graph of a gradient has no module's output in it, so at stage 3 the weights are kept whole around it."""
    naive, zero = Naive(ROUTES), Zero(ROUTES, stage=stage)
    for way in (naive, zero):
        x = inputs().requires_grad_()
        if isinstance(way, Zero):
            with way.engine.unsharded_params():
                penalized_backward(way, x)
        else:
            penalized_backward(way, x)
    for name, wanted in naive.grads().items():
        grad = zero.grads()[name]
        assert (grad is None) == (wanted is None)
        assert grad is None or torch.equal(grad, wanted), name
    zero.close()


def penalized_backward(way: Plain, x: Tensor) -> None:
    """Backward through the norm of the gradient with respect to the input."""
    out = way.model(x)
    (slope,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
    way.backward(out.mean() + slope.pow(2).mean())


@distributed(world_size=2)
@grid(stage=(0, 1, 2, 3))
def test_autograd_grad_of_the_input_does_not_touch_the_gradients(stage: int) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        x = inputs(step + 20).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x)
        return (model(inputs(step)) * slope.mean()).pow(2).mean()

    compare(ROUTES, loss, stage=stage)


# -- experts -------------------------------------------------------------------------------------------------


def moe_loss(choices: Callable[[], list[int]], model: nn.Module, step: int) -> Tensor:
    """A quadratic loss with the rows routed by hand."""
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + rank()))
    return model(x, torch.tensor(choices())).pow(2).mean()


CHOICES: dict[str, Callable[[], list[int]]] = {
    "experts 0 and 1 on rank 0, 2 on rank 1": lambda: [0, 1, 0, 1] if rank() == 0 else [2, 2, 2, 2],
    "no tokens on rank 1": lambda: [0, 1, 2, 1] if rank() == 0 else [-1, -1, -1, -1],
    "no tokens anywhere": lambda: [-1, -1, -1, -1],
}


@distributed(world_size=2, timeout=25)
@pytest.mark.parametrize("case", CHOICES)
def test_experts_without_tokens_hang_nobody_and_do_not_move(case: str) -> None:
    """Case B009; AdamW with weight decay would show an expert that was given a gradient of zeros."""
    for recompute in (None, "non-reentrant"):
        with subtest(f"recompute={recompute}"):
            recipe = Recipe(build=partial(MoeModel, 15), recompute=recompute, optimizer=adamw)
            compare(recipe, partial(moe_loss, CHOICES[case]), num_steps=5, stage=3)
            before = recipe.model().state_dict()["moes.0.experts.3.weight"]
            trace = train_with(Zero(recipe, stage=3), partial(moe_loss, CHOICES[case]))
            assert rank() != 0 or torch.equal(trace.weights[-1]["moes.0.experts.3.weight"], before)


# -- looking and operating -----------------------------------------------------------------------------------


@distributed(world_size=2)
def test_unsharded_params_nest_and_leave_everything_as_it_was() -> None:
    """Case B085: before any training and between steps, also around forwards, also with an error inside."""
    naive, zero = Naive(ROUTES), Zero(ROUTES, stage=3)
    for step in range(4):
        with zero.engine.unsharded_params():
            with zero.engine.unsharded_params(), torch.no_grad():
                assert torch.equal(zero.model(inputs(step)), naive.model(inputs(step)))
            for name, wanted in naive.weights().items():
                assert torch.equal(zero.model.get_parameter(name), wanted)
        assert_nothing_whole(zero.engine)
        with expect_error(ZeroDivisionError), zero.engine.unsharded_params():
            raise ZeroDivisionError
        assert_nothing_whole(zero.engine)
        for way in (naive, zero):
            way.backward(route_loss(way.model, step))
            way.step()
    recorder = Recorder(zero.engine)
    zero.backward(route_loss(zero.model, 0))
    recorder.take()
    with zero.engine.unsharded_params():
        pass
    recorder.take()
    for step in range(2):
        zero.backward(route_loss(zero.model, step))
        assert recorder.take()[:4] == ["+root", "+a", "+b", "-a"], f"prefetch is lost in iteration {step}"
    zero.close()


@distributed(world_size=2)
@grid(stage=(0, 1, 2, 3), bf16=(False, True))
def test_writeback_takes_rank_0s_values_into_shards_and_masters(stage: int, bf16: bool) -> None:
    zero = Zero(Recipe(optimizer=partial(torch_sgd, lr=0.0)), stage=stage, bf16=bf16)
    for step in range(2):
        with zero.engine.unsharded_params(writeback=True), torch.no_grad():
            for index, param in enumerate(zero.model.parameters()):
                param.fill_(index + step + 10 * rank())
        # A step of nothing writes the masters back, so a master that was left behind would show.
        tokens, targets = batches(1, rank())[0]
        zero.backward(loss_of(zero.model(tokens), targets))
        zero.step()
        with zero.engine.unsharded_params():
            for index, param in enumerate(zero.model.parameters()):
                assert torch.equal(param, torch.full_like(param, index + step)), zero.engine.buckets
    zero.close()


def torch_sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """SGD over all that trains."""
    return torch.optim.SGD(param_groups(model, lr), lr=lr)


@distributed(world_size=2)
def test_what_is_written_without_writeback_is_gone() -> None:
    zero = Zero(ROUTES, stage=3)
    before = zero.weights()
    with zero.engine.unsharded_params(), torch.no_grad():
        for param in zero.model.parameters():
            param.zero_()
    assert all(torch.equal(value, before[name]) for name, value in zero.weights().items())
    zero.close()


@distributed(world_size=2)
@grid(where=("forward", "backward", "no_sync backward"))
def test_training_goes_on_after_an_error_on_all_ranks(where: str) -> None:
    """The step with the error is not done; what follows equals a training that never had it."""
    naive, zero = Naive(ROUTES), Zero(ROUTES, stage=3, reduce_bucket_size=300)
    for step in range(4):
        if step in (0, 2):
            failing = Failing.apply if where != "forward" else raise_now
            handle = zero.model.units["b"][0].register_forward_hook(lambda m, a, out, f=failing: f(out))
            with expect_error(ZeroDivisionError):
                if where == "no_sync backward":
                    with zero.no_sync():
                        zero.backward(route_loss(zero.model, step))
                else:
                    zero.backward(route_loss(zero.model, step))
            handle.remove()
            zero.model.zero_grad()
        for way in (naive, zero):
            way.backward(route_loss(way.model, step))
            way.step()
        assert_nothing_whole(zero.engine)
    weights = zero.weights()
    for name, wanted in naive.weights().items() if rank() == 0 else ():
        assert torch.equal(weights[name], wanted), name
    zero.close()


class Failing(torch.autograd.Function):
    """Raises in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ZeroDivisionError


def raise_now(x: Tensor) -> Tensor:
    """Raise in the forward."""
    raise ZeroDivisionError


# -- strays --------------------------------------------------------------------------------------------------

NAME = "units.a.0.weight"


def in_place(action: Callable[[nn.Parameter], Any]) -> Callable[[Zero], Any]:
    """Make a stray of an action on one sharded parameter."""
    return lambda zero: action(zero.model.get_parameter(NAME))


STRAYS: dict[str, Callable[[Zero], Any]] = {
    "read: sum": in_place(lambda p: p.sum()),
    "read: item": in_place(lambda p: p[0, 0].item()),
    "read: broadcast": in_place(lambda p: torch.ones(15, 15) + p),
    "read: F.linear": in_place(lambda p: nn.functional.linear(torch.ones(1, 15), p)),
    "read: through .data": in_place(lambda p: p.data.norm()),
    "read: detach": in_place(lambda p: p.detach()),
    "read: numpy": in_place(lambda p: p.detach().numpy()),
    "read: clone": in_place(lambda p: p.clone()),
    "read: equal": in_place(lambda p: torch.equal(p, torch.ones(15, 15))),
    "write: fill_": in_place(lambda p: p.data.fill_(0.0)),
    "write: zero_": in_place(lambda p: p.data.zero_()),
    "write: copy_": in_place(lambda p: p.data.copy_(torch.ones(15, 15))),
    "write: init": in_place(lambda p: nn.init.normal_(p)),
    "write: add_": in_place(lambda p: p.data.add_(1.0)),
    "write: indexing": in_place(lambda p: p.data.__setitem__(0, 1.0)),
    "save": in_place(lambda p: torch.save(p, io.BytesIO())),
    "deepcopy of the parameter": in_place(copy.deepcopy),
    "deepcopy of the model": lambda zero: copy.deepcopy(zero.model),
    "state_dict": lambda zero: zero.model.state_dict(),
    "save of the state_dict": lambda zero: torch.save(zero.model.state_dict(keep_vars=True), io.BytesIO()),
    "cast": lambda zero: zero.model.to(torch.bfloat16),
    "apply": lambda zero: zero.model.apply(
        lambda m: nn.init.zeros_(m.weight) if isinstance(m, nn.Linear) else None
    ),
}


@distributed(world_size=2)
def test_a_stray_read_or_write_raises_and_names_the_parameter() -> None:
    """Case B079. Nothing of it may leave a trace: training goes on and equals one that had no strays."""
    zero, naive = Zero(ROUTES, stage=3), Naive(ROUTES)
    before = zero.weights()
    for name, stray in STRAYS.items():
        with subtest(name), expect_error(zs.ShardingError, [NAME, "sharded", "engine.unsharded_params"]):
            stray(zero)
    assert all(torch.equal(value, before[name]) for name, value in zero.weights().items())
    with subtest("deepcopy of the engine"), expect_error(zs.ShardingError, "deep-copied"):
        copy.deepcopy(zero.engine)
    with subtest("load_state_dict"), expect_error(RuntimeError, [NAME, "load_full_state_dict"]):
        zero.model.load_state_dict(naive.model.state_dict())
    for way in (naive, zero):
        way.backward(route_loss(way.model, 0))
        way.step()
    weights = zero.weights()
    for name, wanted in naive.weights().items() if rank() == 0 else ():
        assert torch.equal(weights[name], wanted), name
    zero.close()


class Reaching(nn.Module):
    """A parent that uses the weight of a child without calling it."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.units = nn.ModuleDict(
            {"a": nn.Sequential(nn.Linear(15, 15)), "b": nn.Sequential(nn.Linear(15, 15))}
        )
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        x = self.units["b"](x)
        return self.use(x, self.units["a"][0].weight)


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "added": lambda x, weight: x + weight[0],
    "multiplied": lambda x, weight: x * weight.sum(),
    "matrix product": nn.functional.linear,
    "compared": lambda x, weight: torch.where(weight[0] > 0, x, -x),
}


@distributed(world_size=2)
def test_a_parent_that_uses_a_sharded_weight_directly_gets_an_error_with_its_name() -> None:
    """Case B079, inside a forward."""
    for name, use in USES.items():
        with subtest(name):
            zero = Zero(Recipe(build=lambda _, use=use: Reaching(use)), stage=3)  # type: ignore[misc]
            with expect_error(zs.ShardingError, NAME):
                zero.model(inputs())
            zero.engine.zero_grad()
            assert zero.model.units["b"](inputs()).shape == (4, 15)
            zero.close()


@distributed(world_size=2)
def test_questions_about_shape_and_kind_are_answered_while_sharded() -> None:
    zero, plain = Zero(ROUTES, stage=3), ROUTES.model()
    for (name, param), wanted in zip(zero.model.named_parameters(), plain.parameters(), strict=True):
        assert param.shape == wanted.shape and param.numel() == wanted.numel() and param.dtype == wanted.dtype
        assert param.dim() == wanted.dim() and param.size(0) == wanted.size(0) and len(param) == len(wanted)
        assert param.device == wanted.device and param.is_leaf and param.requires_grad and param.grad is None
        assert isinstance(param, nn.Parameter) and param in {param: name} and name in repr(param)
        assert param.stride() == wanted.stride() or not param.is_contiguous()
    assert sum(p.numel() for p in zero.model.parameters()) == sum(p.numel() for p in plain.parameters())
    assert str(zero.model) == str(plain)
    assert list(zero.model.state_dict(keep_vars=True)) == list(plain.state_dict())
    zero.close()


# -- with torch.compile --------------------------------------------------------------------------------------


@pytest.mark.slow
@distributed(world_size=2, timeout=200)
@grid(stage=(1, 3))
def test_blocks_compiled_one_by_one_equal_eager_ones(stage: int) -> None:
    """Case B032: hooks stay outside the graphs, and a block is compiled at most twice (with and without gradients)."""
    counts: dict[str, int] = {}

    def counting(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        counts["graphs"] = counts.get("graphs", 0) + 1
        return graph.forward

    naive = Naive(Recipe(build=lambda _: Mlp(4)))
    zero = Zero(Recipe(build=lambda _: Mlp(4)), stage=stage)
    for layer in zero.model.layers:
        layer.forward = torch.compile(layer.forward, backend=counting)
    for step in range(6):
        for way in (naive, zero):
            way.backward(way.model(inputs(step)).pow(2).mean())
        for name, wanted in naive.grads().items():
            grad = zero.grads()[name]
            assert grad is not None and wanted is not None and torch.equal(grad, wanted), name
        for way in (naive, zero):
            way.step()
    assert 1 <= counts["graphs"] <= 8
    zero.close()


@distributed(world_size=2)
def test_stage_3_of_the_awkward_model_equals_ddp_with_reentrant_checkpointing() -> None:
    """DDP's own re-entrant support wants a static graph without unused parameters, so non-reentrant DDP is the oracle."""
    recipe = Recipe(num_steps=4, build=lambda recompute: Awkward(recompute))
    reference = train_ddp(recipe)
    reentrant = Recipe(num_steps=4, build=lambda _: Awkward("reentrant"))
    zero = Zero(reentrant, stage=3, reduce_bucket_size=200)
    assert_same_bits(train(zero, reentrant), reference)
