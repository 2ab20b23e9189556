"""save_state, load_state, save_model and get_state_dict of ZeroAccelerator, at several numbers of ranks.

Oracle: the run that was not interrupted, and files that plain Accelerate writes and reads. Tolerance 0.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, run_ranks, subtest
from tests.integrations.accelerate_support import STAGES, accelerator_of, assert_sharded, new_model, whole
from tests.models import Mlp, adamw, awkward_loss, inputs

KINDS = ("full", "sharded")


class Counter:
    """Something of the user's own that is registered for checkpointing."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Run:
    """A trained model, a frozen one, a scheduler and a counter."""

    def __init__(self, stage: int | None, kind: str = "full", **keywords: Any) -> None:
        config = keywords.pop("config", {})
        if stage is not None:
            config = {**config, "state_dict_type": kind}
        self.accelerator = accelerator_of(stage, config, **keywords)
        self.counter = Counter()
        teacher = Mlp().requires_grad_(False) if stage is not None else Mlp()
        model = new_model()
        plain = adamw(model)
        scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.9)
        accelerator = self.accelerator
        self.model, self.teacher, self.optimizer, self.scheduler = accelerator.prepare(
            model, teacher, plain, scheduler
        )
        accelerator.register_for_checkpointing(self.counter)

    def train(self, steps: range) -> list[Tensor]:
        losses = []
        for step in steps:
            with self.accelerator.accumulate(self.model):
                with torch.no_grad():
                    shift = self.teacher(inputs(0)).mean()
                loss = awkward_loss(self.model, step) + shift
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.counter.count += 1
            losses.append(loss.detach())
        return losses

    def weights(self) -> dict[str, Tensor]:
        return {**whole(self.accelerator, self.model), **whole(self.accelerator, self.teacher)}


def change(run: Run) -> None:
    """Let the run differ from what was saved in everything."""
    run.train(range(7, 9))
    if isinstance(run.accelerator, zs.accelerate.ZeroAccelerator):
        engine = run.accelerator.engine_of(run.teacher)
        with engine.unsharded_params(writeback=True), torch.no_grad():
            for param in run.teacher.parameters():
                param.add_(1.0)


def resume(stage: int, kind: str, precision: str, folder: Path) -> None:
    """Save, go on, and go on again from what was saved: in the same run, and in a fresh one."""
    config = {precision: {"enabled": "auto"}} if precision != "no" else {}
    keywords = {"config": config, "mixed_precision": precision, "gradient_accumulation_steps": 2}
    run = Run(stage, kind, **keywords)
    run.train(range(4))
    run.accelerator.save_state(str(folder))
    expected, weights = run.train(range(4, 6)), run.weights()
    change(run)
    run.accelerator.load_state(str(folder))
    assert run.counter.count == 4 and run.accelerator.step == 4
    assert all(map(torch.equal, run.train(range(4, 6)), expected))
    fresh = Run(stage, kind, **keywords)
    fresh.accelerator.load_state(str(folder))
    assert all(map(torch.equal, fresh.train(range(4, 6)), expected))
    found = fresh.weights()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert fresh.scheduler.get_last_lr() == run.scheduler.get_last_lr()
    assert_sharded(fresh.accelerator, fresh.model, stage)
    there = {path.name for path in folder.iterdir()}
    assert ("zero_model" in there, "model.safetensors" in there) == (kind == "sharded", kind == "full")


@distributed(world_size=2)
def test_a_state_is_resumed_exactly_with_a_frozen_model_beside_the_trained_one(tmp_path: Path) -> None:
    for stage, kind, precision in (
        (1, "full", "bf16"),
        (2, "sharded", "no"),
        (3, "full", "fp16"),
        (3, "sharded", "bf16"),
    ):
        with subtest(f"stage {stage}, {kind}, {precision}"):
            resume(stage, kind, precision, tmp_path / f"{stage}-{kind}-{precision}")


@pytest.mark.slow
@distributed(world_size=2, timeout=240)
def test_a_state_is_resumed_exactly_at_every_stage_in_every_precision_of_both_kinds(tmp_path: Path) -> None:
    for stage, kind, precision in itertools.product(STAGES, KINDS, ("no", "bf16", "fp16")):
        with subtest(f"stage {stage}, {kind}, {precision}"):
            resume(stage, kind, precision, tmp_path / f"{stage}-{kind}-{precision}")


def save_part(folder: str, kind: str) -> None:
    run = Run(3, kind, gradient_accumulation_steps=2)
    run.train(range(4))
    run.accelerator.save_state(folder)
    torch.save(run.weights(), f"{folder}/expected.pt")


def load_part(folder: str, kind: str, stage: int) -> list[bool]:
    run = Run(stage, kind, gradient_accumulation_steps=2)
    change(run)
    run.accelerator.load_state(folder)
    assert run.accelerator.step == 4 and run.counter.count == 4
    expected, found = torch.load(f"{folder}/expected.pt"), run.weights()
    assert rank() or all(torch.equal(found[name], expected[name]) for name in expected)
    losses = run.train(range(4, 6))
    assert len(losses) == 2
    return [bool(torch.isfinite(loss)) for loss in losses]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_loaded_at_other_numbers_of_ranks_and_stages(kind: str, tmp_path: Path) -> None:
    run_ranks(save_part, 2, {"folder": str(tmp_path), "kind": kind})
    for num_ranks, stage in ((3, 2), (1, 1)):
        found = run_ranks(load_part, num_ranks, {"folder": str(tmp_path), "kind": kind, "stage": stage})
        assert all(map(all, found))


@distributed(world_size=2)
def test_plain_accelerate_reads_what_was_saved_and_the_other_way_round(tmp_path: Path) -> None:
    ddp = Run(None)
    ddp.train(range(3))
    ddp.accelerator.save_state(str(tmp_path / "ddp"))
    ddp.accelerator.wait_for_everyone()
    expected = ddp.train(range(3, 6))
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            run = Run(stage)
            run.accelerator.load_state(str(tmp_path / "ddp"))
            run.accelerator.save_state(str(tmp_path / f"{stage}"))
            assert all(map(torch.equal, run.train(range(3, 6)), expected))
            back = Run(None)
            back.accelerator.load_state(str(tmp_path / f"{stage}"))
            assert all(map(torch.equal, back.train(range(3, 6)), expected))


@distributed(world_size=2)
def test_hooks_of_the_user_see_whole_models_and_may_write_and_load_them_themselves(tmp_path: Path) -> None:
    def save_hook(models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str) -> None:
        if rank() == 0:
            for number, model in enumerate(models):
                torch.save(model.state_dict(), Path(folder, f"mine-{number}.pt"))
                seen.append(sorted(weights[0]) == sorted(model.state_dict()))
                weights.pop(0)
        else:
            weights.clear()

    def load_hook(models: list[nn.Module], folder: str) -> None:
        while models:
            model = models.pop()
            model.load_state_dict(torch.load(Path(folder, f"mine-{len(models)}.pt")))

    seen: list[bool] = []
    for stage in (2, 3):
        with subtest(f"stage {stage}"):
            run = Run(stage, "sharded")
            for register, hook in (
                (run.accelerator.register_save_state_pre_hook, save_hook),
                (run.accelerator.register_load_state_pre_hook, load_hook),
            ):
                register(hook)
            run.train(range(2))
            folder = tmp_path / str(stage)
            run.accelerator.save_state(str(folder))
            assert not list(folder.glob("*.safetensors")) and len(list(folder.glob("mine-*.pt"))) == 2
            expected = run.train(range(2, 4))
            change(run)
            run.accelerator.load_state(str(folder))
            assert all(map(torch.equal, run.train(range(2, 4)), expected))
    assert seen == [True] * (4 if rank() == 0 else 0)


@distributed(world_size=2)
def test_automatic_names_are_counted_and_the_latest_is_loaded(tmp_path: Path) -> None:
    for stage, kind in ((2, "full"), (3, "sharded")):
        with subtest(f"stage {stage}, {kind}"):
            folder = tmp_path / kind
            naming = ProjectConfiguration(
                project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2
            )
            run = Run(stage, kind, project_config=naming)
            for _ in range(3):
                run.train(range(1))
                run.accelerator.save_state()
            expected = run.weights()
            run.train(range(2))
            run.accelerator.load_state()
            found = run.weights()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
                "checkpoint_1",
                "checkpoint_2",
            ]
    with expect_error(zs.CheckpointError, "no folder"):
        Run(2).accelerator.load_state()


@distributed(world_size=2)
def test_a_folder_holds_the_last_state_alone_of_whatever_kind_there_was_one_before(tmp_path: Path) -> None:
    whole_files = {"model.safetensors", "model_1.safetensors", "optimizer.bin"}
    saves: list[tuple[int, str, str, bool, set[str]]] = [
        (2, "full", "fp16", True, {*whole_files, "zero_strategy.bin"}),  # which has the loss scale
        (3, "sharded", "no", True, {"zero_model", "zero_model_1"}),
        (1, "full", "no", False, {"pytorch_model.bin", "pytorch_model_1.bin", "optimizer.bin"}),
    ]
    for number, (stage, kind, precision, is_safe, expected) in enumerate(saves):
        with subtest(f"{number}: {kind}, {precision}, safe_serialization={is_safe}"):
            keywords = {"config": {"fp16": {"enabled": "auto"}}, "mixed_precision": precision}
            run = Run(stage, kind, **(keywords if precision == "fp16" else {}))
            run.train(range(number, number + 2))
            run.accelerator.save_state(str(tmp_path), safe_serialization=is_safe)
            found = {path.name for path in tmp_path.iterdir()}
            assert {n for n in found if n.startswith(("model", "pytorch", "optim", "zero"))} == expected
            other = Run(stage, kind, **(keywords if precision == "fp16" else {}))
            other.accelerator.load_state(str(tmp_path))
            weights, loaded = run.weights(), other.weights()
            assert all(torch.equal(loaded[name], weights[name]) for name in weights)
            assert other.counter.count == 2
    with subtest("a sharded state of fewer models, then something that is not ours"):
        folder = tmp_path / "sharded"
        Run(2, "sharded").accelerator.save_state(str(folder))
        accelerator = accelerator_of(2, {"state_dict_type": "sharded"})
        model = new_model()
        model, _ = accelerator.prepare(model, adamw(model))
        accelerator.register_for_checkpointing(Counter())  # as the first had one
        accelerator.save_state(str(folder))
        accelerator.load_state(str(folder))
        assert not (folder / "zero_model_1").exists()
        accelerator.wait_for_everyone()
        if rank() == 0:
            (folder / "zero_model" / "notes.txt").write_text("mine")
        with expect_error(zs.CheckpointError, ["notes.txt", "Move it"]):
            Run(2, "full").accelerator.save_state(str(folder))
        assert (folder / "zero_model" / "notes.txt").read_text() == "mine"


@distributed(world_size=2)
def test_whole_weights_are_on_rank_0_alone_and_save_model_writes_them(tmp_path: Path) -> None:
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            accelerator = accelerator_of(stage)
            model = new_model()
            names = list(model.state_dict())
            model, optimizer = accelerator.prepare(model, adamw(model))
            accelerator.backward(awkward_loss(model, 0))
            optimizer.step()
            state = accelerator.get_state_dict(model)
            assert list(state) == (names if rank() == 0 else [])
            folder = tmp_path / str(stage)
            accelerator.save_model(model, str(folder), max_shard_size="2KB")
            accelerator.wait_for_everyone()
            stored = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
            assert (folder / "model.safetensors.index.json").exists()
            tied = {"head.weight", "embed.weight"}
            assert len(stored.keys() & tied) == 1 and stored.keys() | tied == set(names)
            assert rank() or all(torch.equal(stored[name], state[name]) for name in stored)
            with expect_error(zs.ConfigError, "has no engine"):
                accelerator.engine_of(Mlp())


@distributed(world_size=2)
def test_states_that_do_not_fit_are_refused_on_all_ranks(tmp_path: Path) -> None:
    for kind in KINDS:
        run = Run(2, kind)
        run.train(range(1))
        run.accelerator.save_state(str(tmp_path / kind))
        with subtest(f"another model, {kind}"):
            accelerator = accelerator_of(2, {"state_dict_type": kind})
            model = Mlp(width=4)
            model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
            with expect_error(zs.CheckpointError):
                accelerator.load_state(str(tmp_path / kind))
        with subtest(f"one model less, {kind}"):
            accelerator = accelerator_of(2, {"state_dict_type": kind})
            model = new_model()
            prepared = accelerator.prepare(model, Mlp(), Mlp(), adamw(model))
            with expect_error(zs.CheckpointError, ["prepare" if kind == "full" else "2 models, and 3"]):
                accelerator.load_state(str(tmp_path / kind))
            del prepared
    with subtest("an unknown kind"), expect_error(zs.ConfigError, "state_dict_type='whole'"):
        zs.accelerate.ZeroPlugin(2, state_dict_type="whole")
