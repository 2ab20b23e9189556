"""Every bad input is an error that says what, why and what to do, on all ranks, at the call, with no hang.

Oracle: the list of bad inputs this library promises to refuse. A launch that hangs is ended by its watchdog
after 30 seconds and fails. Where one rank alone is at fault, the others must raise its error too.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zero_strategy as zs
from tests.distributed.state_support import adamw, build, sharded, train
from tests.harness import distributed, expect_error, rank, subtest, world_size
from tests.models import Mlp
from tests.synthetic_checkpoint import edit_manifest
from zero_strategy.checkpoint.own_files import MANIFEST_NAME

WATCHDOG_S = 30.0


@contextmanager
def refused(kind: type[zs.ZeroError], *texts: str, by: int | None = None) -> Iterator[None]:
    """Require an error of three parts with these texts in it; `by`: found by that rank, raised on all."""
    start = time.monotonic()
    with expect_error(kind, texts) as info:
        yield
    assert time.monotonic() - start < 15, "an error must come at once, not by a timeout"
    error = info.value
    assert error.what and error.why and error.fix
    assert f"{error}" == f"{error.what}\n  why: {error.why}\n  fix: {error.fix}"
    if by is not None and world_size() > 1:
        assert error.what.startswith(f"[rank {by}] "), error.what


def engine_with_adamw(stage: int, seed: int = 0) -> tuple[zs.ZeroEngine, zs.ShardedOptimizer]:
    engine = sharded(build(seed=seed), stage=stage)
    return engine, engine.shard_optimizer(adamw(engine.model))


# -- config --------------------------------------------------------------------------------------------------


@distributed(world_size=2, timeout=WATCHDOG_S)
def test_a_bad_config_is_refused_on_all_ranks_also_if_one_rank_alone_has_it() -> None:
    cases: list[tuple[dict[str, Any], list[str]]] = [
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_sise": 10}},
            ["reduce_bucket_sise", "reduce_bucket_size"],
        ),
        ({"zero_optimisation": {"stage": 2}}, ["zero_optimisation", "zero_optimization"]),
        ({"zero_optimization": {"stage": 4}}, ["stage", "4"]),
        ({"zero_optimization": {"stage": "3"}}, ["stage", "'3'"]),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": -1}}, ["reduce_bucket_size", "-1"]),
        (
            {"zero_optimization": {"stage3_max_live_parameters": "1e9"}},
            ["zero_optimization.stage3_max_live_parameters = '1e9'", "should be a number"],
        ),
        (
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1},
            ["world size 2", "train_batch_size = 10", "train_micro_batch_size_per_gpu = 4", "to 8"],
        ),
        ({"bf16": {"enabled": "auto"}}, ['Still "auto": bf16.enabled', "true or false"]),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, ["two precisions", "Set one to false"]),
    ]
    for config, texts in cases:
        with subtest(f"all ranks: {config}"), refused(zs.ConfigError, *texts):
            zs.ZeroEngine(Mlp(), config)
        for at_fault in (0, 1):
            with subtest(f"rank {at_fault}: {config}"), refused(zs.ConfigError, *texts, by=at_fault):
                zs.ZeroEngine(Mlp(), config if rank() == at_fault else {"zero_optimization": {"stage": 2}})


@distributed(world_size=2, timeout=WATCHDOG_S)
def test_a_config_that_differs_between_ranks_is_refused() -> None:
    for settings in ({"stage": 2 + rank()}, {"stage": 2, "reduce_bucket_size": 1_000 + rank()}):
        with subtest(f"{settings}"), refused(zs.ConfigError, "The config differs from rank 0's", by=1):
            zs.ZeroEngine(Mlp(), zs.ZeroConfig(**settings))


# -- model ---------------------------------------------------------------------------------------------------


@distributed(world_size=2, timeout=WATCHDOG_S)
def test_a_model_that_differs_between_ranks_is_refused_on_all_ranks() -> None:
    def widened() -> nn.Module:
        return Mlp(width=16)

    def deeper() -> nn.Module:
        return Mlp(depth=4)

    def frozen() -> nn.Module:
        model = Mlp()
        model.layers[1].weight.requires_grad_(False)
        return model

    def halved() -> nn.Module:
        return Mlp().to(torch.bfloat16)

    def on_meta() -> nn.Module:
        model = Mlp()
        model.layers[1].weight = nn.Parameter(model.layers[1].weight.to("meta"))
        return model

    def renamed() -> nn.Module:
        model = Mlp()
        model.rows = model.layers
        del model.layers
        return model

    def with_buffer() -> nn.Module:
        model = Mlp()
        model.register_buffer("extra", torch.zeros(1))
        return model

    def tied() -> nn.Module:
        return Mlp(tied=True)

    for variant in (widened, deeper, frozen, halved, on_meta, renamed, with_buffer, tied):
        for at_fault in (0, 1):
            stage = 3 * at_fault  # the stage comes later
            with subtest(f"{variant.__name__} on rank {at_fault}, stage {stage}"):
                model = variant() if rank() == at_fault else Mlp()
                with refused(zs.ConfigError, "The model differs from rank 0's", "alike on every rank", by=1):
                    sharded(model, stage=stage)


@distributed(world_size=2, timeout=WATCHDOG_S)
def test_sharding_a_model_twice_is_refused() -> None:
    engine = sharded(Mlp(), stage=3)
    with refused(zs.ConfigError, "Mlp", "sharded already", by=0):
        sharded(engine.model, stage=3)


@distributed(world_size=2, timeout=WATCHDOG_S)
def test_unusual_parameters_are_refused_by_name() -> None:
    shared_storage = Mlp()
    shared_storage.layers[1].weight = nn.Parameter(shared_storage.layers[0].weight.data)
    with refused(zs.ConfigError, "layers.0.weight", "layers.1.weight", "share one storage", by=0):
        sharded(shared_storage, stage=2)
    sparse = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4))
    with refused(zs.ConfigError, "'0'", "sparse=True", by=0):
        sharded(sparse, stage=2)


# -- optimizer -----------------------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    average = self.state[param].setdefault("average", torch.zeros_like(param))
                    average.lerp_(param.grad, 0.1)
                    param.sub_(average.sign(), alpha=group["lr"])


class RowScaled(Lion):
    """Not element-wise: scales a tensor's gradient by its norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / param.grad.norm(), alpha=group["lr"])


class FusedLAMB(Lion):
    """Refused by its name, whatever it does."""


class DistributedShampoo(Lion):
    """Refused by its name, whatever it does."""


@distributed(world_size=2, timeout=WATCHDOG_S)
def test_an_optimizer_that_is_not_elementwise_is_refused_by_name_and_reason() -> None:
    cases: list[tuple[Callable[[Any], torch.optim.Optimizer], list[str]]] = [
        (torch.optim.Adafactor, ["Adafactor", "row and column means"]),
        (torch.optim.LBFGS, ["LBFGS", "line search"]),
        (torch.optim.SparseAdam, ["SparseAdam", "sparse"]),
        (torch.optim.Muon, ["Muon", "orthogonalises"]),
        (FusedLAMB, ["FusedLAMB", "norm of the whole tensor"]),
        (DistributedShampoo, ["DistributedShampoo", "preconditioner"]),
        (RowScaled, ["RowScaled", "whole than in slices"]),
    ]
    for stage in (1, 3):
        engine = sharded(Mlp(), stage=stage)
        matrices = [p for p in engine.model.parameters() if p.dim() == 2]
        for kind, texts in cases:
            with (
                subtest(f"{texts[0]}, stage {stage}"),
                refused(zs.ConfigError, *texts, "element's own gradient", "AdamW", by=0),
            ):
                engine.shard_optimizer(kind(matrices))
        optimizer = engine.shard_optimizer(Lion(engine.model.parameters()))
        engine.model(torch.randn(2, 15)).sum().backward()
        optimizer.step()


@distributed(world_size=2, timeout=WATCHDOG_S)
def test_foreign_frozen_and_claimed_parameters_are_refused_on_all_ranks() -> None:
    stranger = nn.Parameter(torch.ones(3, 5))
    for stage in (0, 3):
        engine = sharded(build(), stage=stage)
        trainable = [p for p in engine.model.parameters() if p.requires_grad]
        frozen = engine.model.blocks[0].scale
        cases = [
            (stranger, ["(3, 5)", "does not have", "never be reduced"]),
            (frozen, ["frozen parameter 'blocks.0.scale'", "requires_grad=True"]),
        ]
        for at_fault in (None, 0, 1):
            for wrong, texts in cases:
                with subtest(f"stage {stage}, rank {at_fault}, {texts[0]}"):
                    params = [*trainable, wrong] if at_fault in (None, rank()) else trainable
                    with refused(zs.ConfigError, *texts, by=at_fault or 0):
                        engine.shard_optimizer(torch.optim.AdamW(params))
        optimizer = engine.shard_optimizer(torch.optim.AdamW(trainable[:3]))
        with refused(zs.ConfigError, "belongs to an optimizer", "each parameter to one optimizer", by=0):
            engine.shard_optimizer(torch.optim.AdamW(trainable[2:]))
        with refused(zs.ConfigError, "(3, 5)"):
            optimizer.add_param_group({"params": [stranger]})


@distributed(world_size=2, timeout=WATCHDOG_S)
def test_optimizers_that_differ_between_ranks_are_refused() -> None:
    def make(variant: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        if variant == "class":
            return torch.optim.SGD(params, lr=1e-3)
        if variant == "order":
            return torch.optim.AdamW(params[::-1], lr=1e-3)
        if variant == "fewer":
            return torch.optim.AdamW(params[1:], lr=1e-3)
        if variant == "groups":
            return torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:]}], lr=1e-3)
        return torch.optim.AdamW(params, lr=1e-2 if variant == "lr" else 1e-3)

    for stage in (0, 3):
        engine = sharded(Mlp(), stage=stage)
        params = list(engine.model.parameters())
        for variant in ("class", "order", "fewer", "groups", "lr"):
            for at_fault in (0, 1):
                with subtest(f"{variant} on rank {at_fault}, stage {stage}"):
                    optimizer = make(variant if rank() == at_fault else "usual", params)
                    with refused(zs.ConfigError, "The optimizer differs from rank 0's", by=1):
                        engine.shard_optimizer(optimizer)
        optimizer = engine.shard_optimizer(make("usual", params))
        engine.model(torch.randn(2, 15)).sum().backward()
        optimizer.step()


# -- use -----------------------------------------------------------------------------------------------------


@distributed(world_size=2, timeout=WATCHDOG_S)
def test_reading_or_writing_sharded_parameters_is_refused_and_training_goes_on() -> None:
    engine, optimizer = engine_with_adamw(3)
    before = engine.full_state_dict()
    weight = engine.model.shared.weight
    actions: dict[str, Callable[[], Any]] = {
        "state_dict": lambda: engine.model.state_dict(),
        "add_": lambda: weight.add_(1),
        "data.copy_": lambda: weight.data.copy_(torch.ones(15, 15)),
        "init": lambda: nn.init.zeros_(weight),
        "sum": lambda: weight.sum(),
        "torch.save": lambda: torch.save(weight, os.devnull),
    }
    for name, action in actions.items():
        with (
            subtest(name),
            torch.no_grad(),
            refused(zs.ShardingError, "is sharded at this moment", "unsharded_params"),
        ):
            action()
    for key, value in engine.full_state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, before[key]), key
    train(engine.model, optimizer, 1)


@distributed(world_size=2, timeout=WATCHDOG_S)
def test_a_parameter_of_another_model_has_no_gradient_here() -> None:
    engine, _ = engine_with_adamw(2)
    with refused(zs.ShardingError, "no parameter of the sharded model", "model.parameters()"):
        engine.full_grad(nn.Parameter(torch.ones(2)))


@distributed(world_size=2, timeout=WATCHDOG_S)
def test_ranks_that_do_not_step_alike_are_told_so_by_the_next_backward_and_a_load_mends_it() -> None:
    """Where a step sends nothing no rank would wait for another, and the weights be of several steps."""
    for stage in (0, 3):
        with subtest(f"stage {stage}"):
            engine = sharded(Mlp(2, 7), stage=stage)
            optimizer = engine.shard_optimizer(torch.optim.Adam(engine.model.parameters()))
            inputs = torch.randn(4, 7)
            before = engine.full_state_dict()
            engine.backward(engine.model(inputs).sum())
            if rank() == 0:
                optimizer.step()
            optimizer.zero_grad()
            with refused(zs.ShardingError, "step() a different number of times: 1 on rank 0, 0 on rank 1"):
                engine.backward(engine.model(inputs).sum())
            engine.load_full_state_dict(before)
            engine.backward(engine.model(inputs).sum())
            optimizer.step()
            engine.close()


@distributed(world_size=2, timeout=WATCHDOG_S)
def test_bounds_that_are_none_are_refused() -> None:
    engine = sharded(Mlp(2, 7), stage=2)
    optimizer = engine.shard_optimizer(torch.optim.Adam(engine.model.parameters()))
    engine.backward(engine.model(torch.randn(4, 7)).sum())
    for bound in (-1.0, float("nan")):
        with refused(zs.ConfigError, "norm of", str(bound)):
            optimizer.clip_grad_norm_(bound)
        with refused(zs.ConfigError, "value of", str(bound)):
            optimizer.clip_grad_value_(bound)
    optimizer.clip_grad_norm_(float("inf"))
    optimizer.step()
    engine.close()


@distributed(world_size=2, timeout=WATCHDOG_S)
def test_a_rank_that_stops_early_ends_the_other_by_the_group_timeout_with_an_explanation() -> None:
    seconds = 2
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), dist.group.WORLD)
    for stage in (3,):
        engine, optimizer = engine_with_adamw(stage)
        train(engine.model, optimizer, 1)
        start = time.monotonic()
        if rank() == 0:
            with expect_error(
                zs.ShardingError, ["did not finish", "different numbers of batches", "timeout"]
            ):
                train(engine.model, optimizer, 1)
            assert time.monotonic() - start < seconds + 7
        else:
            time.sleep(seconds + 1)  # out of batches, busy with something else


# -- checkpoints ---------------------------------------------------------------------------------------------


def _rank_file(folder: Path, number: int) -> Path:
    return next(folder.glob(f"rank-{number:05d}-*"))


def _flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no manifest": (lambda f: (f / MANIFEST_NAME).unlink(), ["incomplete", MANIFEST_NAME]),
    "no json": (lambda f: (f / MANIFEST_NAME).write_text("{"), ["not JSON"]),
    "foreign manifest": (lambda f: (f / MANIFEST_NAME).write_text("{}"), ["another program"]),
    "missing file": (lambda f: _rank_file(f, 1).unlink(), ["rank-00001", "missing"]),
    "truncated file": (lambda f: os.truncate(_rank_file(f, 1), 500), ["rank-00001", "500 bytes"]),
    "foreign file": (
        lambda f: _rank_file(f, 1).write_bytes(b"x" * _rank_file(f, 1).stat().st_size),
        ["rank-00001"],
    ),
    "damaged value": (lambda f: _flip_last_byte(_rank_file(f, 1)), ["rank-00001", "checksum"]),
    "newer version": (lambda f: edit_manifest(f, lambda d: d.update(version=99)), ["99", "Upgrade"]),
    "lost tensor": (
        lambda f: edit_manifest(f, lambda d: d["tensors"].pop("model/shared.weight")),
        ["shared.weight"],
    ),
    "other digit": (
        lambda f: (f / MANIFEST_NAME).write_text(
            (f / MANIFEST_NAME).read_text().replace('"lr": 0.', '"lr": 1.')
        ),
        [MANIFEST_NAME, "last line"],
    ),
    "emptied": (lambda f: [path.unlink() for path in f.iterdir()], ["incomplete"]),
}


@distributed(world_size=2, timeout=60)
def test_a_damaged_checkpoint_is_refused_on_all_ranks_and_left_as_it_is(tmp_path: Path) -> None:
    engine, optimizer = engine_with_adamw(3)
    train(engine.model, optimizer, 1)
    weights = engine.full_state_dict()
    other = sharded(build(seed=5), stage=1, reduce_bucket_size=100)  # reads other ranges than were written
    other.shard_optimizer(adamw(other.model))
    for name, (damage, texts) in DAMAGE.items():
        with subtest(name):
            folder = tmp_path / name.replace(" ", "-")
            engine.save_checkpoint(folder, extra={"tail": torch.arange(100)})
            dist.barrier()
            if rank() == 0:
                damage(folder)
            dist.barrier()
            before = {path.name: path.read_bytes() for path in folder.iterdir()}
            for reader in (engine, other):
                with refused(zs.CheckpointError, *texts, "[rank "):
                    reader.load_checkpoint(folder)
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    for path, texts in ((tmp_path / "nowhere", ["does not exist"]), (Path(__file__), ["is a file"])):
        with subtest(path.name), refused(zs.CheckpointError, *texts, "save_checkpoint", by=0):
            engine.load_checkpoint(path)
    after = engine.full_state_dict()
    assert all(torch.equal(v, after[k]) for k, v in weights.items() if isinstance(v, torch.Tensor))
    train(engine.model, optimizer, 1)


@distributed(world_size=2, timeout=WATCHDOG_S)
def test_loading_other_folders_on_different_ranks_is_refused(tmp_path: Path) -> None:
    engine, _ = engine_with_adamw(2)
    before = engine.full_state_dict()
    for name in ("one", "two"):
        engine.save_checkpoint(tmp_path / name)
    with refused(zs.CheckpointError, "one", "two", "another save", "same path on every rank"):
        engine.load_checkpoint(tmp_path / ("one" if rank() == 0 else "two"))
    for at_fault in (0, 1):
        with subtest(f"rank {at_fault}"), refused(zs.CheckpointError, "does not exist", by=at_fault):
            engine.load_checkpoint(tmp_path / ("nowhere" if rank() == at_fault else "one"))
    after = engine.full_state_dict()
    assert all(torch.equal(v, after[k]) for k, v in before.items() if isinstance(v, torch.Tensor))


@distributed(world_size=2, timeout=WATCHDOG_S)
def test_saving_into_other_folders_on_different_ranks_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    engine, _ = engine_with_adamw(2)
    engine.save_checkpoint(tmp_path / "one", extra={"number": 1})
    for exists in (False, True):
        with subtest(f"the other folder exists: {exists}"):
            if exists and rank() == 0:
                (tmp_path / "two").mkdir()
            dist.barrier()
            with refused(zs.ConfigError, "one'", "two'", "same arguments on every rank"):
                engine.save_checkpoint(tmp_path / ("one" if rank() == 0 else "two"))
            dist.barrier()
            assert not exists or list((tmp_path / "two").iterdir()) == []
            assert len(list((tmp_path / "one").iterdir())) == 3
    assert engine.load_checkpoint(tmp_path / "one") == {"number": 1}


@distributed(world_size=2, timeout=WATCHDOG_S)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    engine, optimizer = engine_with_adamw(3)
    train(engine.model, optimizer, 1)
    engine.save_checkpoint(tmp_path / "c")

    def other_model() -> zs.ZeroEngine:
        return sharded(Mlp(), stage=2)

    def other_shape() -> zs.ZeroEngine:
        model = build()
        model.unused = nn.Parameter(torch.randn(7, 16))
        return sharded(model, stage=2)

    def other_params() -> zs.ZeroEngine:
        result = sharded(build(), stage=2)
        trainable = [p for p in result.model.parameters() if p.requires_grad]
        result.shard_optimizer(torch.optim.AdamW(trainable[1:]))
        return result

    def two_optimizers() -> zs.ZeroEngine:
        result = sharded(build(), stage=2)
        trainable = [p for p in result.model.parameters() if p.requires_grad]
        result.shard_optimizer(torch.optim.AdamW(trainable[:2]))
        result.shard_optimizer(torch.optim.AdamW(trainable[2:]))
        return result

    cases: list[tuple[Callable[[], zs.ZeroEngine], list[str]]] = [
        (other_model, ["another model", "layers.0.weight"]),
        (other_shape, ["'unused'", "(7, 15)", "(7, 16)"]),
        (other_params, ["param groups", "1 ('unused') there only", "strict=False"]),
        (two_optimizers, ["1 optimizers", "has 2"]),
    ]
    for make, texts in cases:
        with subtest(make.__name__):
            other = make()
            before = other.full_state_dict()
            with refused(zs.CheckpointError, *texts, "Nothing was loaded", by=0):
                other.load_checkpoint(tmp_path / "c")
            after = other.full_state_dict()
            assert all(torch.equal(v, after[k]) for k, v in before.items() if isinstance(v, torch.Tensor))
