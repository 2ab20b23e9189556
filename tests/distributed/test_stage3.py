"""Stage 3: parameters are whole only around use, whatever the user's code calls and returns.

Oracles: for numbers, naive data parallelism in the same processes, tolerance 0 unless said; for the order
of gathers, the list of events on the engine's buckets, written out. "+a" is the start of a gather of unit
a, "-a" its resharding.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, rank, subtest
from tests.models import Routes, inputs, route_loss, square_loss
from tests.recorder import Recorder, assert_nothing_whole
from tests.reference import (
    Naive,
    Recipe,
    Zero,
    assert_same_bits,
    compare,
    grid,
    train_with,
)

ROUTES = Recipe(build=lambda _: Routes())


# -- when parameters are whole -------------------------------------------------------------------------------


@distributed(world_size=2)
def test_units_are_gathered_for_their_forward_and_their_backward_and_resharded_after() -> None:
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
def test_prefetch_starts_the_next_gather_of_the_last_pass_one_unit_ahead() -> None:
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
    """Routes change, with an evaluation in between; nothing is said, nothing stays behind."""
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
    zero = Zero(ROUTES, stage=3)
    with torch.inference_mode():
        zero.model(inputs())
        with zero.engine.unsharded_params():
            assert not any(param.is_inference() for param in zero.model.parameters())
    with zero.engine.unsharded_params():
        assert not any(param.is_inference() for param in zero.model.parameters())
    zero.backward(route_loss(zero.model, 0))
    zero.step()
    zero.close()


@distributed(world_size=2)
def test_a_forward_without_a_backward_leaves_the_next_micro_batch_right() -> None:
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
    compare(recipe, square_loss, stage=3, leaf_module={"names": ["0"]})
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
    assert_right_or_refused(recipe, square_loss)


class Leaving(nn.Module):
    """A unit with a gate that leaves a loss for balance on itself, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(15, 4)
        self.inner = nn.Linear(15, 15)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        self.auxiliary = scores.mean(0).pow(2).sum()
        out = torch.tanh(self.inner(x)) * scores.max(-1, keepdim=True).values
        self.late = (self.inner.weight * x.mean()).pow(2).sum()
        return out


class SideChannel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Leaving() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = x + unit(x)
        return x


@distributed(world_size=2)
def test_a_loss_left_on_a_module_counts_with_that_of_its_output() -> None:
    def loss(model: SideChannel, step: int) -> Tensor:
        return model(inputs(step)).pow(2).mean() + sum(unit.auxiliary for unit in model.units)

    compare(Recipe(build=lambda _: SideChannel()), loss, stage=3)


@distributed(world_size=2)
def test_a_loss_of_a_weight_left_on_a_module_is_right_or_refused_never_wrong() -> None:
    """The weight is used after the output was made, so it is needed before the output's backward."""

    def loss(model: SideChannel, step: int) -> Tensor:
        return model(inputs(step)).pow(2).mean() + sum(unit.late for unit in model.units)

    assert_right_or_refused(Recipe(build=lambda _: SideChannel()), loss)


def assert_right_or_refused(recipe: Recipe, loss: Callable[[Any, int], Tensor]) -> None:
    """Require right numbers, or a refusal to use a weight that is not there."""
    reference = train_with(Naive(recipe), loss)
    try:
        trace = train_with(Zero(recipe, stage=3), loss)
    except zs.ShardingError as error:
        assert "unsharded_params" in error.fix
        return
    assert_same_bits(trace, reference)


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
    compare(recipe, square_loss, stage=3, **settings)
