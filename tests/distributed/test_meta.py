"""Models that are built on the meta device: filled while they are sharded, and equal to the plain build.

Oracle: the same class built on the CPU with the same seed, as plain torch builds it. Tolerance 0: the same
random numbers are drawn in the same order. Every rank has a seed of its own, so that a value that is not rank
0's shows. That nothing whole is held on the way is shown by test_meta_memory.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_strategy as zs
from tests.distributed.test_bad_input import refused
from tests.harness import distributed, rank, subtest
from tests.models import VOCAB, WIDTH, batches, loss_of, sgd
from tests.recorder import logged
from tests.reference import Recipe, Zero, assert_same_bits, train_with
from zero_strategy.engine import ZeroEngine

SMALL = {"reduce_bucket_size": 400, "stage3_param_persistence_threshold": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0, **SMALL},
    "stage 1": {"stage": 1, **SMALL},
    "stage 2": {"stage": 2, "reduce_bucket_size": 1_000_000},
    "stage 2, bf16": {"stage": 2, "bf16": {"enabled": True}, **SMALL},
    "stage 3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "stage 3, small buckets": {"stage": 3, **SMALL},
    "stage 3, small ones persistent": {"stage": 3, "stage3_param_persistence_threshold": 20},
    "stage 3, all persistent": {"stage": 3},
    "stage 3, bf16": {"stage": 3, "bf16": {"enabled": True}, **SMALL},
}


class Layer(nn.Module):
    """Children, then tensors of its own: a frozen one, a buffer that is not saved, one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)  # fills its child's bias as well
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.scale = nn.Parameter(torch.empty(WIDTH), requires_grad=False)
        self.gain = nn.Parameter(torch.empty(()))
        self.register_buffer("shift", torch.empty(WIDTH), persistent=False)
        self.register_buffer("order", torch.empty(3, dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        self.gain.data.fill_(0.5)
        self.shift = torch.rand(WIDTH)  # assigned, not written
        self.order.copy_(torch.randperm(3))
        nn.init.zeros_(self.down.bias)  # of a child

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        y = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x + self.gain * self.down(torch.tanh(self.up(y))) * self.scale + self.shift * self.order.sum()


class Grown(nn.Module):
    """Tied embeddings, layers, a shared module, a root with tensors of its own, three dtypes."""

    def __init__(self, recompute: str | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.again = self.shared
        self.wide = nn.Linear(WIDTH, 3, dtype=torch.float64)
        self.narrow = nn.Linear(WIDTH, 3, dtype=torch.bfloat16)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.empty(7, 15))
        self.register_buffer("table", torch.empty(3, dtype=torch.complex64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.unused)
        self.table.copy_(torch.randn(3, dtype=torch.complex64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.shared(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        x = self.again(x)
        extra = self.wide(x.double()).sum().float() + self.narrow(x.bfloat16()).sum().float()
        return self.head(x) + extra * self.table.abs().sum()


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        model = build()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model


def seeded(of_rank: int) -> None:
    torch.manual_seed(100 + of_rank)


def plain(build: Callable[[], nn.Module] = Grown, of_rank: int = 0) -> nn.Module:
    seeded(of_rank)
    return build()


def grow(settings: dict[str, Any], build: Callable[[], nn.Module] = Grown, **keywords: Any) -> zs.ZeroEngine:
    """Shard a model built on meta, each rank with a seed of its own."""
    model = on_meta(build)
    seeded(rank())
    return ZeroEngine(model, zs.ZeroConfig(**settings), **keywords)


def assert_values(engine: zs.ZeroEngine, expected: nn.Module) -> None:
    """Compare every parameter and buffer on every rank, saved or not."""
    with engine.unsharded_params():
        found = dict([*engine.model.named_parameters(), *engine.model.named_buffers()])
        wanted = dict([*expected.named_parameters(), *expected.named_buffers()])
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            assert found[name].requires_grad == value.requires_grad, name
            assert torch.equal(found[name].data, value.data.to(found[name].dtype)), name


# -- equal to the plain build --


@distributed(world_size=3, timeout=120)
def test_a_model_built_on_meta_equals_the_plain_build_bit_for_bit() -> None:
    for name, settings in SETTINGS.items():
        with subtest(name):
            expected = plain()
            plain(of_rank=rank())
            drawn = torch.rand(1)
            engine = grow(settings)
            assert torch.equal(torch.rand(1), drawn), "more or fewer random numbers than a plain build"
            assert_values(engine, expected)
            # Masters as well: the values before they were rounded.
            weights = engine.full_state_dict(dtype=torch.float32)
            for key, value in expected.named_parameters():
                if rank() == 0 and value.requires_grad:
                    assert torch.equal(weights[key], value.float()), key
            engine.close()


@pytest.mark.slow  # the tests under Lightning train, too
@distributed(world_size=2, timeout=120)
def test_a_model_built_on_meta_trains_as_the_plain_build() -> None:
    def loss_at(model: Any, step: int) -> Tensor:
        tokens, targets = batches(step + 1, rank())[step]
        return loss_of(model(tokens), targets)

    recipe = Recipe(build=Grown)
    for name in ("stage 2", "stage 3, small ones persistent"):
        with subtest(name):
            traces = []
            for device in ("cpu", "meta"):
                with torch.device(device):
                    model = recipe.model()
                way = Zero.__new__(Zero)
                way.model = way.module = model
                way.engine = ZeroEngine(model, zs.ZeroConfig(**SETTINGS[name]))
                way.optimizer = way.engine.shard_optimizer(recipe.optimizer(model))
                traces.append(train_with(way, loss_at))
                way.close()
            assert_same_bits(*traces)


@distributed(world_size=2)
def test_objects_hooks_and_attributes_stay_what_they_were() -> None:
    class Marked(nn.Parameter):
        pass

    model = on_meta(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    model[0].weight = Marked(model[0].weight.data)
    model[0].weight.mark = "kept"
    seen: list[int] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda param: seen.append(1))
    model[0].weight.register_hook(lambda grad: seen.append(2))
    params = list(model.parameters())
    # An optimizer of before knows the same objects.
    users = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ZeroEngine(model, zs.ZeroConfig(stage=3, **SMALL))
    assert all(param is before for param, before in zip(model.parameters(), params, strict=True))
    assert isinstance(model[0].weight, Marked) and model[0].weight.mark == "kept"
    optimizer = engine.shard_optimizer(users)
    before = engine.full_state_dict()
    engine.backward(model(torch.ones(2, 6)).square().sum())
    assert sorted(seen) == [1, 2]
    optimizer.step()
    after = engine.full_state_dict()
    assert all(not torch.equal(after[name], before[name]) for name in before)


@distributed(world_size=2)
def test_an_lstm_built_on_meta_runs_although_it_keeps_weak_references_to_its_weights() -> None:
    build = lambda: nn.LSTM(6, 5, num_layers=2)  # noqa: E731
    for stage in (2, 3):
        expected = plain(build)
        engine = grow({"stage": stage, **SMALL}, build)
        assert_values(engine, expected)
        x = torch.randn(3, 2, 6)
        assert torch.equal(engine.model(x)[0], expected(x)[0])


@distributed(world_size=2)
def test_an_engine_built_inside_a_meta_device_context_has_real_shards() -> None:
    expected = plain()
    with torch.device("meta"):
        model = Grown()
        seeded(rank())
        engine = ZeroEngine(model, zs.ZeroConfig(stage=3, **SMALL))
    assert_values(engine, expected)


@distributed(world_size=2)
def test_a_plain_attribute_follows_its_buffer_or_is_named_in_the_log() -> None:
    class Aliased(nn.Linear):
        def __init__(self) -> None:
            self.ready = False
            super().__init__(3, 3)
            self.register_buffer("angle", torch.empty(3))
            self.alias, self.lost = self.angle, torch.empty(2)
            self.ready = True

        def reset_parameters(self) -> None:
            super().reset_parameters()
            if self.ready:
                self.angle.fill_(2)

    with logged() as lines:
        engine = grow({"stage": 3, **SMALL}, lambda: nn.Sequential(Aliased()))
        layer = engine.model[0]
        assert layer.alias is layer.angle and layer.alias.tolist() == [2, 2, 2]
        named = [line for line in lines if "Still on the meta device" in line]
        assert len(named) == 1 and "'0.lost'." in named[0] and "alias" not in named[0]


# -- what has values keeps them --


@distributed(world_size=2)
def test_what_is_not_on_meta_keeps_its_values() -> None:
    for stage in (1, 3):
        with subtest(f"stage {stage}"):
            loaded = plain()
            model = on_meta(Grown)
            # A whole layer, one of two parameters of a module, a buffer of a module that fills another.
            model.layers[0] = plain().layers[0]
            model.shared.bias = nn.Parameter(torch.full((WIDTH,), 2.0))
            model.layers[1].order = torch.tensor([2, 2, 2])
            seeded(rank())
            engine = ZeroEngine(model, zs.ZeroConfig(stage=stage, **SMALL))
            with engine.unsharded_params():
                for name, value in model.layers[0].state_dict().items():
                    assert torch.equal(value, loaded.layers[0].state_dict()[name]), name
                assert torch.equal(model.shared.bias, torch.full((WIDTH,), 2.0))
                assert model.layers[1].order.tolist() == [2, 2, 2]
                assert not model.shared.weight.isnan().any() and model.shared.weight.std() > 0.05
                assert model.head.weight is model.embed.weight


@distributed(world_size=2)
def test_weights_are_loaded_into_a_model_that_never_was_whole(tmp_path: Path) -> None:
    for stage in (1, 3):
        with subtest(f"stage {stage}"):
            source = ZeroEngine(plain(of_rank=7), zs.ZeroConfig(stage=2))
            weights = source.full_state_dict()
            source.save_checkpoint(tmp_path / str(stage))
            source.close()
            engine = grow({"stage": stage, **SMALL})
            engine.load_full_state_dict(weights)
            assert_same(engine.full_state_dict(), weights)
            engine = grow({"stage": stage, **SMALL})
            engine.load_checkpoint(tmp_path / str(stage))
            assert_same(engine.full_state_dict(), weights)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# -- initialisation of the user's own --


@distributed(world_size=2)
def test_param_init_fn_is_called_once_for_each_module_on_meta_children_first() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
            self.gain = nn.Parameter(torch.empty(4))
            self.head = nn.Linear(4, 2)

    def init(module: nn.Module) -> None:
        called.append(module)
        for param in module.parameters(recurse=False):
            torch.nn.init.normal_(param)

    for stage in (1, 3):
        with subtest(f"stage {stage}"):
            called: list[nn.Module] = []
            expected = Bare()
            seeded(0)
            expected.apply(init)
            called.clear()
            engine = grow({"stage": stage, **SMALL}, Bare, param_init_fn=init)
            model = engine.model
            assert called == [model.block[0], model.block[2], model.head, model]
            assert_values(engine, expected)


@distributed(world_size=2)
def test_an_initialiser_may_index_the_rows_of_a_weight() -> None:
    """huggingface/transformers#43783: zeroing the padding row under sharded construction."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            module.weight.normal_()
            module.weight[module.padding_idx].zero_()

    build = lambda: nn.Sequential(nn.Embedding(9, 5, padding_idx=3), nn.Embedding(9, 5, padding_idx=8))  # noqa: E731
    engine = grow({"stage": 3, **SMALL}, build, param_init_fn=init)
    with engine.unsharded_params():
        for embedding in engine.model:
            zero = embedding.weight.abs().sum(dim=1) == 0
            assert zero.nonzero().flatten().tolist() == [embedding.padding_idx]


@distributed(world_size=2)
def test_a_model_can_be_called_before_it_has_an_optimizer() -> None:
    """huggingface/trl#6403: reference scores before training, of a model that is sharded already."""
    tokens, targets = batches(1, 0)[0]
    for stage in (1, 2, 3):
        with subtest(f"stage {stage}"):
            expected = plain()
            engine = grow({"stage": stage, **SMALL})
            with torch.no_grad():
                scores = engine.model(tokens)
                assert torch.equal(scores, expected(tokens))
            optimizer = engine.shard_optimizer(sgd(engine.model))
            users = sgd(expected)
            for model, step in ((engine.model, optimizer), (expected, users)):
                loss_of(model(tokens), targets).backward()
                step.step()
            # The unit's outputs, and so the gradients of both ranks, are those of the plain model.
            assert_values(engine, expected)


# -- bad input --


class Helpless(nn.Module):
    """Fills what it is told to; the rest of what it owns is left as it is."""

    def __init__(self, *filled: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.filled = filled
        self.weight = nn.Parameter(torch.empty(5, 3))
        self.register_buffer("table", torch.empty(4, dtype=dtype), persistent=False)

    def reset_parameters(self) -> None:
        for name in self.filled:
            getattr(self, name).data.fill_(1)


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(3))


class Breaks(nn.Linear):
    """Fails when it is filled, on the ranks it was given."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        super().__init__(5, 5)

    def reset_parameters(self) -> None:
        if rank() in self.ranks and not self.weight.is_meta:
            raise NotImplementedError  # without a word
        super().reset_parameters()


class Reaches(nn.Module):
    """Initialises its submodules as well as what it owns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.gain = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        for layer in self.layers:
            nn.init.normal_(layer.weight)


@distributed(world_size=2)
def test_modules_that_cannot_be_filled_are_all_named_and_refused() -> None:
    build = lambda: nn.Sequential(*[NoReset() for _ in range(7)], nn.Linear(3, 3))  # noqa: E731
    for stage in (1, 3):
        texts = ["7 modules", "'0' (NoReset: gain, bias)", "'4' (NoReset", "and 2 more", "param_init_fn"]
        with subtest(f"stage {stage}"), refused(zs.ConfigError, *texts, "reset_parameters", by=0):
            grow({"stage": stage, **SMALL}, build)
        with subtest("on one rank"), refused(zs.ConfigError, "1 modules", "'0'", by=1):
            grow({"stage": stage}, lambda: nn.Sequential(NoReset() if rank() else NamedReset()))
    with subtest("not a function"), refused(zs.ConfigError, "param_init_fn", "str", by=0):
        grow({"stage": 3}, build, param_init_fn="normal")
    with subtest("shards on meta"), refused(zs.ConfigError, "device='meta'", by=1):
        grow({"stage": 3}, device="meta" if rank() else None)


class NamedReset(NoReset):
    def reset_parameters(self) -> None:
        """Fill nothing; never called in these tests."""


@distributed(world_size=2)
def test_what_is_left_unfilled_is_refused_by_name_whatever_its_dtype() -> None:
    kinds = [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.complex64,
        torch.int64,
        torch.uint8,
        torch.bool,
    ]
    for dtype in kinds:
        with subtest(f"{dtype}"), refused(zs.ConfigError, "'1.table'", "Helpless", "garbage", by=0):
            grow(
                {"stage": 3},
                lambda dtype=dtype: nn.Sequential(nn.Linear(2, 2), Helpless("weight", dtype=dtype)),
            )
        with subtest(f"{dtype} is filled"):
            grow({"stage": 3}, lambda dtype=dtype: Helpless("weight", "table", dtype=dtype))
    for stage in (1, 3):
        with subtest("a parameter"), refused(zs.ConfigError, "'weight'", "garbage", by=0):
            grow({"stage": stage, **SMALL}, lambda: Helpless("table"))
        with subtest("in part"), refused(zs.ConfigError, "'weight', 'bias'", "garbage", by=0):
            fill = lambda module: [param[1:].fill_(0) for param in module.parameters()]  # noqa: E731
            grow({"stage": stage, **SMALL}, lambda: nn.Linear(3, 3), param_init_fn=fill)


@distributed(world_size=2)
def test_an_initialiser_that_fails_on_one_rank_is_an_error_on_all() -> None:
    for stage in (1, 3):
        for ranks in ((0,), (1,), (0, 1)):
            build = lambda ranks=ranks: nn.Sequential(nn.Linear(5, 5), Breaks(ranks), nn.Linear(5, 5))  # noqa: E731
            texts = ["'1' (Breaks)", "failed: NotImplementedError"]
            with subtest(f"stage {stage}, {ranks}"), refused(zs.ConfigError, *texts, by=ranks[0]):
                grow({"stage": stage, **SMALL}, build)


@distributed(world_size=2)
def test_an_initialiser_that_reaches_into_other_units_is_refused_where_they_are_sharded() -> None:
    for stage in (1, 2):
        with subtest(f"stage {stage}"):
            expected = plain(Reaches)
            assert_values(grow({"stage": stage, **SMALL}, Reaches), expected)
    with refused(zs.ConfigError, "the root", "'layers.0.weight'", "param_init_fn", by=0):
        grow({"stage": 3, **SMALL}, Reaches)
    model = on_meta(Reaches)
    model.layers[1] = nn.Linear(5, 5)
    with refused(zs.ConfigError, "overwrote 'layers.1.weight'", by=0):
        ZeroEngine(model, zs.ZeroConfig(stage=1, **SMALL))
