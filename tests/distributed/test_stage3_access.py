"""Stage 3: looking at weights, changing them, errors on the way, and strays that touch what is not there.

Oracles: naive data parallelism in the same processes, tolerance 0: whatever happens in between, training
goes on as if it had not. Every stray must raise an error that names the parameter and what to do, on every
rank, before any number is wrong.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.models import Mlp, Routes, awkward_loss, inputs, route_loss, sgd, square_loss
from tests.recorder import Recorder, assert_nothing_whole
from tests.reference import Naive, Recipe, Zero, grid

ROUTES = Recipe(build=lambda _: Routes())


# -- looking and operating -----------------------------------------------------------------------------------


@distributed(world_size=2)
def test_unsharded_params_nest_and_leave_everything_as_it_was() -> None:
    """Before any training and between steps, also around forwards, also with an error inside."""
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
        assert recorder.take()[:4] == ["+root", "+a", "+b", "-a"], f"prefetch is lost in micro-batch {step}"
    zero.close()


@distributed(world_size=2)
def test_only_what_is_asked_for_is_gathered_and_written_back() -> None:
    zero = Zero(ROUTES, stage=3)
    zero.backward(route_loss(zero.model, 0))
    zero.step()
    before = zero.engine.full_state_dict()
    wanted = [param for name, param in zero.model.named_parameters() if name.startswith("units.a.")]
    recorder = Recorder(zero.engine)
    with zero.engine.unsharded_params(writeback=True, params=wanted), torch.no_grad():
        assert recorder.take() == ["+a"]
        with zero.engine.unsharded_params():
            assert sorted(recorder.take()) == ["+b", "+c", "+root"]
        # What the inner block has gathered, and nothing else.
        assert sorted(recorder.take()) == ["-b", "-c", "-root"]
        wanted[0].add_(1)
    assert_nothing_whole(zero.engine)
    after = zero.engine.full_state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    first = next(name for name, param in zero.model.named_parameters() if param is wanted[0])
    assert rank() or moved == {first}
    zero.close()


@distributed(world_size=2)
@grid(stage=(0, 1, 2, 3))
def test_gradients_in_place_are_the_whole_averaged_ones_and_gone_afterwards(stage: int) -> None:
    zero = Zero(ROUTES, stage=stage)
    zero.backward(route_loss(zero.model, 0))
    wanted = {name: zero.engine.full_grad(param) for name, param in zero.model.named_parameters()}
    assert any(grad is not None for grad in wanted.values())
    some = [zero.model.get_parameter(next(name for name in wanted if name.startswith("units.a.")))]
    for params in (None, some):
        with zero.engine.grads_in_place(params):
            for name, param in zero.model.named_parameters():
                expected = wanted[name] if params is None or param is some[0] else None
                assert (param.grad is None) == (expected is None), name
                assert expected is None or torch.equal(param.grad, expected), name
        assert all(param.grad is None for param in zero.model.parameters())
    zero.step()
    zero.close()


@distributed(world_size=2)
@grid(stage=(0, 1, 2, 3), bf16=(False, True))
def test_writeback_takes_rank_0s_values_into_shards_and_masters(stage: int, bf16: bool) -> None:
    zero = Zero(Recipe(optimizer=partial(sgd, lr=0.0)), stage=stage, bf16=bf16)
    for step in range(2):
        with zero.engine.unsharded_params(writeback=True), torch.no_grad():
            for index, param in enumerate(zero.model.parameters()):
                param.fill_(index + step + 10 * rank())
        # A step of nothing writes the masters back, so a master that was left behind would show.
        zero.backward(awkward_loss(zero.model, 0))
        zero.step()
        with zero.engine.unsharded_params():
            for index, param in enumerate(zero.model.parameters()):
                assert torch.equal(param, torch.full_like(param, index + step)), zero.engine.buckets
    zero.close()


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
@grid(where=("forward", "forward, by Ctrl-C", "backward", "no_sync backward"))
def test_training_goes_on_after_an_error_on_all_ranks(where: str) -> None:
    """The step with the error is not done; what follows equals a training that never had it."""
    naive, zero = Naive(ROUTES), Zero(ROUTES, stage=3, reduce_bucket_size=300)
    for step in range(4):
        if step in (0, 2):
            error = KeyboardInterrupt if where == "forward, by Ctrl-C" else ZeroDivisionError
            failing = partial(raise_now, error) if "forward" in where else Failing.apply
            handle = zero.model.units["b"][0].register_forward_hook(lambda m, a, out, f=failing: f(out))
            with expect_error(error):
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


def raise_now(error: type[BaseException], x: Tensor) -> Tensor:
    """Raise in the forward."""
    raise error


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
    "state_dict": lambda zero: zero.model.state_dict(),
    "save of the state_dict": lambda zero: torch.save(zero.model.state_dict(keep_vars=True), io.BytesIO()),
    "cast": lambda zero: zero.model.to(torch.bfloat16),
    "apply": lambda zero: zero.model.apply(
        lambda m: nn.init.zeros_(m.weight) if isinstance(m, nn.Linear) else None
    ),
}


@distributed(world_size=2)
def test_a_stray_read_or_write_raises_and_names_the_parameter() -> None:
    """Nothing of it may leave a trace: training goes on and equals one that had no strays."""
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


@distributed(world_size=2)
@grid(stage=(0, 1, 2, 3))
def test_a_deep_copy_is_a_plain_model_below_stage_3_and_refused_at_stage_3(stage: int) -> None:
    zero = Zero(ROUTES, stage=stage)
    if stage == 3:
        with expect_error(zs.ShardingError, "sharded"):
            copy.deepcopy(zero.model)
    else:
        twin = copy.deepcopy(zero.model)
        square_loss(twin, 0).backward()  # on this rank alone
        assert all(param.grad is not None for param in twin.parameters())
        assert all(grad is None for grad in zero.grads().values())
        assert torch.equal(twin(inputs()), zero.model(inputs()))
    zero.backward(route_loss(zero.model, 0))
    zero.step()
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
    """Inside a forward."""
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


class OwnWeights(nn.Module):
    """Returns views of its own parameters, as positional tables do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(24.0).reshape(6, 4))

    def forward(self, length: int) -> dict[str, torch.Tensor]:
        return {"rows": self.table[:length].unsqueeze(0), "transposed": self.table.t()}


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(OwnWeights() for _ in range(2))

    def forward(self, length: int) -> torch.Tensor:
        parts = [table(length) for table in self.tables]
        return sum((p["rows"].square().sum() + p["transposed"].sum() for p in parts), torch.zeros(()))


@distributed(world_size=2)
def test_a_module_may_return_views_of_its_own_weights() -> None:
    plain, sharded = TwoTables(), TwoTables()
    engine = zs.ZeroEngine(sharded, zs.ZeroConfig(stage=3, stage3_param_persistence_threshold=0))
    with torch.no_grad():
        assert torch.equal(sharded(3), plain(3))
    plain(3).backward()
    sharded(3).backward()
    for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        grad = engine.full_grad(ours)
        assert grad is not None and theirs.grad is not None
        assert torch.equal(grad, theirs.grad)


class Writing(nn.Module):
    """Writes weights of its own in its forward: one that is trained, and a codebook that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 15).view(3, 5))
        self.code = nn.Parameter(torch.ones(7), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.5, 0.5)
            self.code.mul_(0.9).add_(0.3)
        return x @ self.weight.T * self.code.sum()


@distributed(world_size=2)
def test_what_a_module_writes_into_its_own_weights_is_kept_at_stage_3_as_below() -> None:
    kept = []
    for stage in (1, 3):
        model = nn.Sequential(nn.Linear(5, 5), Writing(), nn.Linear(3, 5), Writing())
        for index, param in enumerate(model.parameters()):
            param.data.uniform_(-1, 1, generator=torch.Generator().manual_seed(index))
        engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=stage, stage3_param_persistence_threshold=0))
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = engine.shard_optimizer(torch.optim.SGD(trained, lr=0.01))
        for _ in range(3):
            engine.backward(model(torch.ones(2, 5)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        kept.append(engine.full_state_dict())
        if stage == 3:
            with expect_error(zs.ShardingError, [".data", "1.weight"]):
                model[1].weight.data = torch.zeros(3, 5)
    assert all(torch.equal(value, kept[1][name]) for name, value in kept[0].items())
    if rank() == 0:
        assert not torch.equal(kept[0]["1.code"], torch.ones(7))


@distributed(world_size=2)
def test_ranks_that_evaluate_different_modules_are_told() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model.forward = lambda x: model["ab"[rank()]](x)  # type: ignore[method-assign]
    zs.ZeroEngine(model, zs.ZeroConfig(stage=3, stage3_param_persistence_threshold=0))
    texts = ["Ranks have parted", "'a.float32#0' on rank 0", "'b.float32#0' on rank 1"]
    with torch.no_grad(), expect_error(zs.ShardingError, contains=texts):
        model(torch.ones(2, 4))


@distributed(world_size=2)
@grid(stage=[1, 2, 3], change=["cast", "half", "move", "rebind", "add", "replace", "grad"])
def test_what_is_done_behind_the_engines_back_is_told(stage: int, change: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=stage, stage3_param_persistence_threshold=0))
    optimizer = engine.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    changes: dict[str, Callable[[], Any]] = {
        "cast": model.bfloat16,
        "half": model.half,
        "move": lambda: model.to("meta"),
        "rebind": lambda: setattr(model[0].weight, "data", torch.zeros(4, 4)),
        "add": lambda: model.append(nn.Linear(4, 4)),
        "replace": lambda: model.__setitem__(1, nn.Linear(4, 4)),
        "grad": lambda: setattr(model[0].weight, "grad", torch.ones(4, 4)),
    }
    touches_shards = change in ("cast", "half", "move", "rebind")
    if stage == 3 and touches_shards:  # told at once
        with expect_error(zs.ShardingError, contains="weight"):
            changes[change]()
    else:
        changes[change]()
        for call in (optimizer.step, engine.full_state_dict):
            with expect_error(zs.ShardingError, contains="weight"):
                call()
    engine.close()


@distributed(world_size=2)
def test_hooks_of_users_may_read_the_weights_of_their_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    seen = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(module.weight.sum().item()))
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model.append(normed)
    zs.ZeroEngine(model, zs.ZeroConfig(stage=3, stage3_param_persistence_threshold=0))
    model(torch.ones(2, 4)).sum().backward()
    assert len(seen) == 1 and seen[0] == seen[0]


@distributed(world_size=2)
def test_two_sharded_parameters_are_equal_if_they_are_one() -> None:
    """Lightning's finetuning callbacks ask so which parameters an optimizer has already."""
    zero = Zero(Recipe(build=lambda _: Mlp()), stage=3)
    first, second = zero.model.layers[0].weight, zero.model.layers[1].weight
    assert torch.equal(first, first) and not torch.equal(first, second)
    assert not torch.equal(first, zero.model.layers[1].bias)
    with expect_error(zs.ShardingError, "layers.0.weight"):
        torch.equal(first, torch.ones(15, 15))
    zero.close()
