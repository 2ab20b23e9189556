"""Averages of the weights under the Trainer, 2 ranks: `ZeroEMA` at every stage, Lightning's own below 3.

Oracle: the same Trainer with `DDPStrategy` and Lightning's own callback, tolerance 0: an average is computed
element by element, with the same roundings. bf16-true has no oracle with fp32 masters, so the stages are
compared with one another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn

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
    zero,
)
from tests.integrations.test_finetuning import Transfer, resumable
from zero_strategy.lightning.callbacks import EMA_KEY


class AllTrained(TinyModule):
    """Lightning averages frozen weights too, which rounds them; here there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen.requires_grad_(True)


def stock_ema(**keywords: Any) -> Any:
    return EMAWeightAveraging(decay=0.9, use_buffers=False, **keywords)


# -- ZeroEMA -------------------------------------------------------------------------------------------------


@distributed(world_size=2, timeout=120)
def test_zero_ema_equals_lightnings_ema_under_ddp_bit_for_bit() -> None:
    """Lightning's copies the average into the model when training ends, ours keeps both."""
    with subtest("ddp"):
        expected = fit(ddp(), AllTrained, callbacks=[stock_ema()])
        plain = fit(ddp(), AllTrained)
    for stage in (1, 3):
        with subtest(f"stage {stage}"):
            average = zs.ZeroEMA(decay=0.9)
            found = fit(zero(stage), AllTrained, callbacks=[average])
            assert_same_losses(found.module, expected.module)
            assert found.trainer.callback_metrics["val_loss"] == expected.trainer.callback_metrics["val_loss"]
            assert_same_weights(average.full_state_dict(), expected.weights)
            assert_same_weights(found.weights, plain.weights)  # what was trained, not the average
            assert average.ema.num_updates == 10
            seen = found.trainer.validate(found.module, loader(2), verbose=False)[0]["val_loss"]
            assert seen == float(expected.trainer.callback_metrics["val_loss"])
    with subtest("every third step, from the fourth on"):
        expected = fit(
            ddp(), AllTrained, callbacks=[stock_ema(update_every_n_steps=3, update_starting_at_step=3)]
        )
        average = zs.ZeroEMA(decay=0.9, update_every_n_steps=3, update_starting_at_step=3)
        fit(zero(3), AllTrained, callbacks=[average])
        assert_same_weights(average.full_state_dict(), expected.weights)


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
def test_zero_ema_goes_on_after_a_resume_at_another_stage(tmp_path: Path) -> None:
    with subtest("uninterrupted"):
        whole = zs.ZeroEMA(decay=0.9)
        expected = fit(zero(2), callbacks=[whole])
        wanted = whole.full_state_dict()
    for first, second in ((1, 3), (3, 2)):
        with subtest(f"stage {first}, then {second}"):
            folder = tmp_path / str(first)
            saver = ModelCheckpoint(dirpath=folder, filename="epoch", save_top_k=-1)
            settings = {"enable_checkpointing": True, "max_epochs": 1}
            fit(zero(first), callbacks=[zs.ZeroEMA(decay=0.9), saver], **settings)
            average = zs.ZeroEMA(decay=0.9)
            found = fit(zero(second), callbacks=[average], ckpt_path=folder / "epoch.ckpt")
            assert_same_weights(found.weights, expected.weights)
            assert_same_weights(average.full_state_dict(), wanted)
            assert average.ema.num_updates == 10
    with subtest("the file is a plain one for others"):
        file = torch.load(tmp_path / "3" / "epoch.ckpt", weights_only=True)
        assert set(file[EMA_KEY]["weights"]) < set(file["state_dict"])
        assert not any("EMA" in key for key in file["callbacks"])
        resumed = fit(ddp(), ckpt_path=tmp_path / "3" / "epoch.ckpt")
        assert_same_weights(resumed.weights, expected.weights)
    with subtest("evaluation of the average in a file"):
        module, average = TinyModule(), zs.ZeroEMA(decay=0.9)
        trainer = make_trainer(zero(3), callbacks=[average])
        trainer.validate(module, loader(2), ckpt_path=tmp_path / "1" / "epoch.ckpt", verbose=False)
        assert average.ema.num_updates == 5
        restored = average.ema.state_dict()["weights"]
        if rank() == 0:
            for name, value in file[EMA_KEY]["weights"].items():
                assert torch.equal(restored[name], value)
    with subtest("a file without one"):
        average = zs.ZeroEMA(decay=0.9)
        saver = ModelCheckpoint(dirpath=tmp_path, filename="without", save_top_k=-1)
        fit(ddp(), callbacks=[saver], enable_checkpointing=True, max_epochs=1)
        fit(zero(3), callbacks=[average], ckpt_path=tmp_path / "without.ckpt")
        assert average.ema.num_updates == 5


@distributed(world_size=2)
def test_zero_ema_that_cannot_work_is_refused() -> None:
    with subtest("another strategy"), expect_error(zs.ConfigError, ["DDPStrategy", "EMAWeightAveraging"]):
        fit(ddp(), callbacks=[zs.ZeroEMA()])
    with subtest("two"), expect_error(zs.ConfigError, "more than one ZeroEMA"):
        fit(zero(3), callbacks=[zs.ZeroEMA(), zs.ZeroEMA(decay=0.5)])
    with subtest("never"), expect_error(zs.ConfigError, "update_every_n_steps=0"):
        zs.ZeroEMA(update_every_n_steps=0)
    with subtest("no run yet"), expect_error(zs.ShardingError, "no average yet"):
        zs.ZeroEMA().full_state_dict()
    with subtest("decay"), expect_error(zs.ConfigError, "decay=2"):
        fit(zero(3), callbacks=[zs.ZeroEMA(decay=2)])


class FailsOnce(TinyModule):
    """Its second validation is interrupted, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.num_validations = 0

    def on_validation_epoch_start(self) -> None:
        self.num_validations += 1

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.num_validations == 3:
            raise RuntimeError("interrupted")
        super().validation_step(batch, batch_idx)


@distributed(world_size=2)
def test_an_interrupted_evaluation_leaves_no_average_in_the_weights_of_the_next_run() -> None:
    module, average = FailsOnce(), zs.ZeroEMA(decay=0.9)
    trainer = make_trainer(zero(3), callbacks=[average])
    with expect_error(RuntimeError, "interrupted"):
        trainer.fit(module, loader(), loader(2))
    with expect_error(zs.ShardingError, "This rank has failed (RuntimeError: interrupted)"):
        trainer.strategy.lightning_module_state_dict()
    module.num_validations = -10
    second = make_trainer(zero(3), callbacks=[average], max_epochs=1)
    second.fit(module, loader(), loader(2))
    expected = FailsOnce()
    expected.num_validations = -10
    reference = make_trainer(zero(3))
    reference.fit(expected, loader(), loader(2))
    third = make_trainer(zero(3), max_epochs=1)
    third.fit(expected, loader(), loader(2))
    assert_same_losses(module, expected)


# -- Lightning's own -----------------------------------------------------------------------------------------


class Normed(TinyModule):
    """With batch norm, whose statistics SWA measures anew at the end; its scheduler is one that SWA takes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(15), nn.Linear(15, 1))

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()["optimizer"]


def swa() -> Any:
    return StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=1, annealing_epochs=1)


STOCK: dict[str, tuple[Any, type[TinyModule]]] = {
    "EMA": (stock_ema, TinyModule),
    "plain average": (WeightAveraging, TinyModule),
    "SWA": (swa, Normed),
}


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
def test_lightnings_callbacks_that_write_weights_equal_ddp_below_stage_3() -> None:
    for name, (callback, module) in STOCK.items():
        with subtest(f"{name}, ddp"):
            expected = fit(ddp(), module, callbacks=[callback()], max_epochs=3)
        with subtest(f"{name}, stage 2"):
            found = fit(zero(2), module, callbacks=[callback()], max_epochs=3)
            assert_same_weights(found.weights, expected.weights)
            assert_same_losses(found.module, expected.module)
        outcomes = []
        for stage in (1, 2) if name == "SWA" else (1,):
            with subtest(f"{name}, bf16-true, stage {stage}"):
                found = fit(zero(stage), module, callbacks=[callback()], max_epochs=3, precision="bf16-true")
                outcomes.append(found)
                assert_same_weights(found.weights, outcomes[0].weights)
                masters = found.trainer.strategy.engine.full_state_dict(dtype=torch.float32)
                for key, value in found.weights.items():  # the masters have followed
                    assert torch.equal(masters[key].to(value.dtype), value), key


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
def test_lightnings_averages_resume_as_under_ddp_below_stage_3(tmp_path: Path) -> None:
    for name in ("EMA", "SWA"):
        callback, module = STOCK[name]
        for strategy in (ddp(), zero(1)):
            label = type(strategy).__name__
            with subtest(f"{name}, {label}, uninterrupted"):
                expected = fit(strategy, module, callbacks=[callback()], max_epochs=4)
            with subtest(f"{name}, {label}, resumed"):
                folder = tmp_path / name / label
                saver = ModelCheckpoint(
                    dirpath=folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True
                )
                again = zero(1) if label == "ZeroStrategy" else ddp()
                fit(again, module, callbacks=[callback(), saver], max_epochs=4, enable_checkpointing=True)
                again = zero(2) if label == "ZeroStrategy" else ddp()
                path = folder / "epoch=1.ckpt"
                found = fit(again, module, callbacks=[callback()], max_epochs=4, ckpt_path=path)
                assert_same_weights(found.weights, expected.weights)


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
def test_a_16_bit_run_with_lightnings_average_resumes_exactly_from_both_kinds(tmp_path: Path) -> None:
    """The file has the average where weights are; masters belong to the weights that were trained."""
    settings: dict[str, Any] = {"precision": "bf16-true", "max_epochs": 2, "num_batches": 3}
    with subtest("uninterrupted"):
        expected = fit(zero(2), callbacks=[stock_ema()], **settings)
    for kind, first, second in (("full", 1, 2), ("sharded", 2, 1)):
        with subtest(f"{kind}, stages {first} and {second}"):
            folder = tmp_path / kind
            callbacks = [stock_ema(), ModelCheckpoint(dirpath=folder, filename="half")]
            half = {**settings, "max_epochs": 1, "enable_checkpointing": True}
            fit(zero(first, state_dict_type=kind), callbacks=callbacks, **half)
            path = folder / "half.ckpt"
            found = fit(
                zero(second, state_dict_type=kind), callbacks=[stock_ema()], ckpt_path=path, **settings
            )
            assert_same_weights(found.trainer.strategy.engine.full_state_dict(), expected.weights)
            assert torch.equal(torch.stack(found.module.losses), torch.stack(expected.module.losses[3:]))
        with subtest(f"{kind}, evaluated without the callback"):
            module, trainer = TinyModule(), make_trainer(zero(second), precision="bf16-true")
            trainer.validate(module, loader(2), ckpt_path=path, verbose=False)
            if rank() == 0 and kind == "full":
                average = torch.load(path, weights_only=True)["state_dict"]["head.weight"]
                assert torch.equal(module.head.weight, average.bfloat16())


class OwnAverage(EMAWeightAveraging):
    pass


@distributed(world_size=2)
def test_callbacks_that_copy_whole_weights_are_refused_at_stage_3_before_anything_is_done() -> None:
    for callback, words in {
        swa: ["StochasticWeightAveraging", "ZeroEMA"],
        stock_ema: ["EMAWeightAveraging (a WeightAveraging)", "ZeroEMA"],
        OwnAverage: ["OwnAverage (a WeightAveraging)", "ZeroEMA"],
        lambda: ModelPruning("l1_unstructured", amount=0.3): ["ModelPruning", "stage=2"],
    }.items():
        with subtest(words[0]):
            module = TinyModule()
            trainer = make_trainer(zero(3), callbacks=[callback()])
            with expect_error(zs.ConfigError, ["stage 3", *words]):
                trainer.fit(module, loader())
            with expect_error(zs.ShardingError, "no engine yet"):
                _ = trainer.strategy.engine
    with subtest("one rank"):
        own = ["EMAWeightAveraging"] if dist.get_rank() else ["Another rank"]
        with expect_error(zs.ConfigError, own):
            fit(zero(3), callbacks=[stock_ema()] if dist.get_rank() else [])


# -- with other parts ----------------------------------------------------------------------------------------


@distributed(world_size=2, timeout=120)
def test_zero_ema_goes_on_with_what_is_unfrozen_late_also_after_a_resume(tmp_path: Path) -> None:
    def tune(stage: int, **keywords: Any) -> tuple[zs.ZeroEMA, Any]:
        average = zs.ZeroEMA(decay=0.9)
        callbacks = [resumable(), average]
        callbacks += keywords.pop("savers", [])
        return average, fit(
            zero(stage, state_dict_type=keywords.pop("kind", "full")),
            Transfer,
            callbacks=callbacks,
            max_epochs=keywords.pop("max_epochs", 3),
            **keywords,
        )

    with subtest("uninterrupted"):
        average, expected = tune(3)
        wanted = average.full_state_dict()
        if rank() == 0:
            assert not torch.equal(wanted["backbone.stem.weight"], expected.weights["backbone.stem.weight"])
    for kind, first, second in (("full", 2, 3), ("sharded", 3, 1)):
        with subtest(f"{kind}, stages {first} and {second}"):
            saver = ModelCheckpoint(dirpath=tmp_path / kind, filename="{epoch}", save_top_k=-1)
            tune(first, kind=kind, savers=[saver], enable_checkpointing=True, max_epochs=2)
            average, found = tune(second, ckpt_path=tmp_path / kind / "epoch=1.ckpt")
            assert_same_weights(found.weights, expected.weights)
            assert_same_weights(average.full_state_dict(), wanted)
            assert average.ema.num_updates == 15


@distributed(world_size=2)
def test_zero_ema_averages_the_fp32_masters_of_16_bit_weights() -> None:
    for precision, dtype in (("16-true", torch.float16), ("bf16-true", torch.bfloat16)):
        outcomes = []
        for stage in (1, 3):
            with subtest(f"{precision}, stage {stage}"):
                average = zs.ZeroEMA(decay=0.9)
                strategy = zero(stage, fp16={"initial_scale_power": 4})
                fit(strategy, callbacks=[average], precision=precision, max_epochs=1)
                outcomes.append(average.full_state_dict(torch.float32))
                assert_same_weights(outcomes[-1], outcomes[0])
        if rank() == 0:
            value = outcomes[0]["head.weight"]
            assert not torch.equal(value.to(dtype).float(), value)
