"""What a user is told when a Trainer's run cannot work, and runs that look as if they could not.

Oracle: each of 2 ranks over gloo raises the package's own error, with the names and numbers the user has to
change; where a run works, Lightning's `DDPStrategy`, tolerance 0. A hang is ended by the harness.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.integrations.lightning_support import (
    TinyModule,
    assert_same_losses,
    assert_same_weights,
    ddp,
    fit,
    loader,
    make_trainer,
    whole_weights,
    zero,
)
from tests.recorder import logged

SHORT: dict[str, Any] = {"num_batches": 2, "max_epochs": 1}


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return loader(2)


@distributed(world_size=2)
def test_batch_numbers_that_the_loader_or_the_trainer_does_not_have_are_refused_with_both(
    tmp_path: Path,
) -> None:
    """The loader gives 3 a rank; times 2 ranks, times accumulate_grad_batches."""
    path = tmp_path / f"ds_config_{rank()}.json"
    path.write_text(json.dumps({"train_batch_size": 12}))
    with subtest("a file"), expect_error(zs.ConfigError, ["train_batch_size = 12", "with 6", "2 ranks"]):
        fit(zero(2, config=str(path)), **SHORT)
    for stage in (1, 3):
        texts = ["train_micro_batch_size_per_gpu = 7", "with 3", "training loader"]
        with subtest(f"stage {stage}"), expect_error(zs.ConfigError, texts):
            fit(zero(stage, train_micro_batch_size_per_gpu=7), **SHORT)
    with (
        subtest("a datamodule"),
        expect_error(zs.ConfigError, ["train_micro_batch_size_per_gpu = 7", "with 3"]),
    ):
        make_trainer(zero(3, train_micro_batch_size_per_gpu=7)).fit(TinyModule(), datamodule=Data())
    right = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3}
    with subtest("the right ones"):
        assert fit(zero(3, **right), accumulate_grad_batches=2, **SHORT).trainer.global_step == 1
    with subtest("auto"):
        auto = dict.fromkeys([*right, "gradient_accumulation_steps"], "auto")
        assert fit(zero(3, **auto), accumulate_grad_batches=2, **SHORT).trainer.global_step == 1


@distributed(world_size=2)
def test_bucket_sizes_left_to_a_front_end_are_the_defaults_and_said_so() -> None:
    """A Trainer knows no hidden size to derive them from."""
    with logged() as lines:
        names = [
            "reduce_bucket_size",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
        ]
        for stage in (1, 3):
            with subtest(f"stage {stage}"):
                found = fit(zs.ZeroStrategy(stage=stage, **dict.fromkeys(names, "auto")), **SHORT)
                expected = fit(zs.ZeroStrategy(stage=stage), **SHORT)
                given, default = (
                    run.trainer.strategy.engine.config.zero_optimization for run in (found, expected)
                )
                assert [getattr(given, name) for name in names] == [getattr(default, name) for name in names]
                assert_same_weights(found.weights, expected.weights)
        with subtest("said"):
            text = "\n".join(lines)
            assert all(
                f'zero_optimization.{name} is "auto": Lightning derives no value' in text for name in names
            )
            assert "the default counts: 8000000" in text


@distributed(world_size=2)
def test_mistaken_options_are_answered_with_the_right_ones() -> None:
    with (
        subtest("an unknown one"),
        expect_error(zs.ConfigError, ["reduce_bucket_sise", "reduce_bucket_size?"]),
    ):
        zs.ZeroStrategy(stage=2, reduce_bucket_sise=1)
    texts = ["DDPStrategy and FSDPStrategy", "leave it out", "stage=3 for FULL_SHARD"]
    with subtest("two strategies at once"), expect_error(zs.ConfigError, texts):
        zs.ZeroStrategy(stage=2, find_unused_parameters=True, sharding_strategy="FULL_SHARD")


# -- optimizers ----------------------------------------------------------------------------------------------


class WithOptimizer(TinyModule):
    """Builds the optimizer that a test names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        trainable = [param for param in self.parameters() if param.requires_grad]
        foreign = nn.Linear(3, 3).parameters()
        return {
            "LBFGS": lambda: torch.optim.LBFGS(trainable),
            "Adafactor": lambda: torch.optim.Adafactor(trainable),
            "foreign": lambda: torch.optim.AdamW(foreign),
            "some foreign": lambda: torch.optim.AdamW([*trainable, *foreign]),
            "frozen": lambda: torch.optim.AdamW(self.parameters()),
        }[self.kind]()


@distributed(world_size=2)
def test_optimizers_that_cannot_run_on_shards_are_refused_on_all_ranks_by_name() -> None:
    texts = {
        "LBFGS": ["LBFGS", "several backwards per step", "AdamW"],
        "Adafactor": ["Adafactor", "row and column means", "AdamW"],
        "foreign": ["does not have: number 0, of shape (3, 3)"],
        "some foreign": ["does not have: number", "of shape (3, 3)"],
        "frozen": ["frozen parameter 'frozen.weight'", "requires_grad=True"],
    }
    for kind, contains in texts.items():
        for stage in (1, 3):
            with subtest(f"{kind}, stage {stage}"), expect_error(zs.ConfigError, contains):
                fit(zero(stage), lambda kind=kind: WithOptimizer(kind), **SHORT)


class NoParameters(TinyModule):
    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).requires_grad_()

    def configure_optimizers(self) -> None:
        return None


class OnlyFrozen(NoParameters):
    def __init__(self) -> None:
        TinyModule.__init__(self)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return TinyModule.forward(self, x)


@distributed(world_size=2)
def test_modules_without_anything_to_train_run_at_every_stage() -> None:
    for cls in (NoParameters, OnlyFrozen):
        for stage in (1, 2, 3):
            with subtest(f"{cls.__name__}, stage {stage}"):
                found = fit(zero(stage), cls, **SHORT)
                assert found.trainer.current_epoch == 1 and len(found.module.losses) == 2
                assert_same_weights(found.weights, cls().state_dict())


class CastsItself(TinyModule):
    """Parameters in bf16, and a forward that casts what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16()).float()


@distributed(world_size=2)
def test_what_the_trainer_does_with_clipping_and_with_batches_is_said_beside_the_config() -> None:
    with logged() as lines:
        with subtest("clipping"):
            fit(zero(2), gradient_clip_val=0.5, **SHORT)
            assert any(
                "The Trainer clips gradients by norm (gradient_clip_val=0.5)" in line for line in lines
            )
        with subtest("a module in bf16 and a Trainer in fp32"):
            found = fit(zero(3), CastsItself, **SHORT)
            assert found.module.first.weight.dtype == torch.bfloat16 and len(found.module.losses) == 2
            assert any("pass precision=" in line and "CastsItself" in line for line in lines)
        with subtest("nothing to say"):
            lines.clear()
            fit(zero(3), **SHORT)
            assert not any("precision=" in line or "clips" in line for line in lines)


# -- what is done to a module that is sharded already --------------------------------------------------------


class Touches(TinyModule):
    """Does something to itself when training starts."""

    def __init__(self, touch: Any) -> None:
        super().__init__()
        self.touch = touch

    def on_train_start(self) -> None:
        self.touch(self)


@distributed(world_size=2)
def test_what_would_lose_shards_is_refused_by_name() -> None:
    at_stage_3 = {
        "half": (lambda module: module.half(), ["half was called on parameter 'first.weight'"]),
        "to": (lambda module: module.to(torch.float64), ["to was called on parameter 'first.weight'"]),
        "deepcopy": (lambda module: copy.deepcopy(module.blocks[1]), ["deep-copied"]),
        "state_dict": (
            lambda module: module.trainer.model.state_dict(),
            ["by state_dict()", "engine.full_state_dict()", "the engine is `trainer.strategy.engine`"],
        ),
    }
    for name, (touch, contains) in at_stage_3.items():
        with subtest(f"{name}, stage 3"), expect_error(zs.ShardingError, contains):
            fit(zero(3), lambda touch=touch: Touches(touch), **SHORT)
    for stage in (1, 2):
        texts = ["'first.weight' was bound to other memory", "model.to(dtype)"]
        with subtest(f"there and back, stage {stage}"), expect_error(zs.ShardingError, texts):
            fit(zero(stage), lambda: Touches(lambda module: module.half().float()), **SHORT)
        with subtest(f"looked at, stage {stage}"):
            look = Touches(lambda module: (copy.deepcopy(module.blocks), module.trainer.model.state_dict()))
            assert fit(zero(stage), lambda look=look: look, **SHORT).trainer.global_step == 2


@distributed(world_size=2)
def test_pickles_and_copies_of_what_leads_to_process_groups_are_refused_readably() -> None:
    actions: dict[str, Any] = {
        "pickled module": pickle.dumps,
        "saved module": lambda module: torch.save(module, io.BytesIO()),
        "pickled strategy": lambda module: pickle.dumps(module.trainer.strategy),
        "copied strategy": lambda module: copy.deepcopy(module.trainer.strategy),
        "pickled engine": lambda module: pickle.dumps(module.trainer.strategy.engine),
    }
    for stage in (1, 3):
        for name, action in actions.items():
            with subtest(f"{name}, stage {stage}"), expect_error(zs.ShardingError, ["copied"]) as info:
                fit(zero(stage), lambda action=action: Touches(action), **SHORT)
            assert info.value.fix
    outcome = fit(zero(1), **SHORT)
    outcome.trainer.strategy.engine.close()
    module = copy.copy(outcome.module)
    module.trainer = None
    assert torch.equal(pickle.loads(pickle.dumps(module)).first.weight, outcome.module.first.weight)


@distributed(world_size=2)
def test_validate_inside_inference_mode_leaves_a_module_that_trains_as_under_ddp() -> None:
    """The engine is built by `validate`: nothing in it may be an inference tensor."""
    expected = None
    for name, strategy in {
        "ddp": ddp(),
        **{f"stage {stage}": zero(stage) for stage in (1, 2, 3)},
    }.items():
        with subtest(name):
            module, trainer = TinyModule(), make_trainer(strategy, max_epochs=1)
            with torch.inference_mode():
                trainer.validate(module, loader(2), verbose=False)
            trainer.fit(module, loader(2), loader(1))
            expected = expected or (module, whole_weights(trainer))
            assert_same_losses(module, expected[0])
            assert_same_weights(whole_weights(trainer), expected[1])
