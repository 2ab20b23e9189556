"""How a Trainer's run ends before its time: an exception, SIGTERM, Ctrl-C or a dead process on one rank.

Oracle: the exception that a rank was made to raise, and for stops with a checkpoint the weights of an
uninterrupted run after as many steps. Tolerance: 0 for weights; all ranks end within 20 seconds.
"""

from __future__ import annotations

import os
import signal
import socket
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from tests.harness import distributed, rank, subtest
from tests.integrations.lightning_support import TinyModule, fit, loader, make_trainer, zero
from tests.launching import TORCHRUN, Ended, assert_all_ended, run_script


class Stopped(TinyModule):
    """A module that sends this process a signal in the second step, on rank 1 only."""

    def __init__(self, number: int, ranks: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.number, self.ranks = number, ranks

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if len(self.losses) == 1 and rank() in self.ranks:
            os.kill(os.getpid(), self.number)
        return super().training_step(batch, batch_idx)


@distributed(world_size=2)
def test_a_signal_to_any_rank_stops_all_after_one_step_and_callbacks_save(tmp_path: Path) -> None:
    expected = fit(zero(3), max_steps=2, max_epochs=None)
    cases: list[tuple[int, tuple[int, ...], int, type[BaseException], int]] = [
        (signal.SIGTERM, (1,), 3, SIGTERMException, 128 + signal.SIGTERM),
        (signal.SIGTERM, (0, 1), 1, SIGTERMException, 128 + signal.SIGTERM),
        (signal.SIGINT, (0,), 2, SystemExit, 1),  # so Lightning ends after a KeyboardInterrupt
        (signal.SIGINT, (0, 1), 3, SystemExit, 1),
    ]
    for number, ranks, stage, error, code in cases:
        name = f"{signal.Signals(number).name} to {len(ranks)}"
        with subtest(name):
            saves = OnExceptionCheckpoint(str(tmp_path / name))
            saves.teardown = lambda *_, **__: None  # type: ignore[method-assign]  # it removes what it saved
            trainer = make_trainer(zero(stage), callbacks=[saves], enable_checkpointing=True)
            module = Stopped(number, ranks)
            before = signal.getsignal(signal.SIGTERM)
            with pytest.raises(error) as info:
                trainer.fit(module, loader())
            signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning leaves it ignored
            assert info.value.code == code
            assert len(module.losses) == 2
            assert signal.getsignal(signal.SIGTERM) == before
            assert not [t for t in threading.enumerate() if t.name == "zero_strategy.signals"]
            if rank() == 0:
                saved = torch.load(saves.ckpt_path, weights_only=False)
                assert saved["global_step"] == 2
                for fqn, value in expected.weights.items():
                    assert torch.equal(saved["state_dict"][fqn], value), fqn


@distributed(world_size=2)
def test_what_a_script_did_at_sigterm_is_still_done() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    trainer = make_trainer(zero(2))
    with pytest.raises(SIGTERMException):
        trainer.fit(Stopped(signal.SIGTERM), loader())
    assert heard == ([signal.SIGTERM] if rank() == 1 else [])


@distributed(world_size=2)
def test_an_error_on_all_ranks_that_is_caught_does_not_end_the_next_run() -> None:
    class Failing(TinyModule):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            raise ValueError("on all ranks")

    with pytest.raises(ValueError, match="on all ranks"):
        fit(zero(3), Failing)
    outcome = fit(zero(3), max_epochs=1)
    time.sleep(1.5)  # longer than the watch takes to look
    outcome.trainer.fit(outcome.module, loader())


# -- real processes --


SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
import lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset
import zero_strategy as zs

trouble, where, saves = sys.argv[1:]
rank = int(os.environ.get("LOCAL_RANK", 0))
print(f"rank {rank} is {os.getpid()}", flush=True)
if where == "now" and rank == 0:
    print("now", flush=True)

def begin(here):
    if here == where:
        if trouble == "wait" and rank == 0:
            time.sleep(1000)
        if rank != 1:
            return
        print("now", flush=True)
        if trouble == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if trouble == "raise":
            raise ValueError(f"boom of rank 1 in {here}")

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.number = nn.Linear(16, 16), nn.Linear(16, 16), 0

    def setup(self, stage):
        begin("setup")

    def training_step(self, batch, batch_idx):
        self.number += 1
        x = self.first(batch[0])
        if self.number == 3:
            begin("training_step")
            x.register_hook(lambda grad: begin("backward"))
        if where == "signal":
            if self.number == 3 and rank == 1:
                print("now", flush=True)
            time.sleep(0.2)
        return self.second(x).square().mean()

    def on_save_checkpoint(self, checkpoint):
        begin("save")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

class Data(TensorDataset):
    def __getitem__(self, index):
        if index > 20:
            begin("data")
        return super().__getitem__(index)

callbacks = [pl.callbacks.OnExceptionCheckpoint(saves)] if saves != "-" else []
trainer = pl.Trainer(
    strategy=zs.ZeroStrategy(stage=3, stage3_param_persistence_threshold=0),
    devices=2, accelerator="cpu", max_epochs=20 if where == "signal" else 1, logger=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks, num_sanity_val_steps=0,
    enable_checkpointing=where == "save" or saves != "-", default_root_dir=os.path.dirname(__file__),
)
trainer.fit(Model(), DataLoader(Data(torch.randn(64, 16)), batch_size=4, shuffle=False))
"""


def launch(
    folder: Path, trouble: str, where: str, *, torchrun: bool = False, saves: str = "-", **keywords: Any
) -> Ended:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    before = [*TORCHRUN, "2"] if torchrun else []
    return run_script([*before, str(script), trouble, where, saves], **keywords)


BOOM = "Rank 1 has failed: ValueError: boom of rank 1 in "


@pytest.mark.slow
def test_an_exception_in_a_step_ends_all_ranks_and_rank_0_has_its_text(tmp_path: Path) -> None:
    ended = launch(tmp_path, "raise", "training_step", saves=str(tmp_path))
    assert_all_ended(
        ended,
        f"[rank0]: zero_strategy.errors.ShardingError: {BOOM}training_step",
        "[rank1]: zero_strategy.errors.ShardingError: This rank has failed",  # the callback's save, by name
    )
    assert not list(tmp_path.glob("*.ckpt"))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["setup", "backward", "data", "save"])
def test_an_exception_anywhere_ends_all_ranks(tmp_path: Path, where: str) -> None:
    assert_all_ended(launch(tmp_path, "raise", where), f"ShardingError: {BOOM}{where}")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["setup", "training_step"])
def test_torchrun_ends_all_ranks_too(tmp_path: Path, where: str) -> None:
    assert_all_ended(launch(tmp_path, "raise", where, torchrun=True), f"{BOOM}{where}")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["training_step", "backward", "save"])
def test_a_killed_rank_ends_the_other(tmp_path: Path, where: str) -> None:
    assert_all_ended(launch(tmp_path, "kill", where), "ShardingError: The process of rank 1 has died")


@pytest.mark.slow
def test_sigterm_to_a_rank_that_waits_for_a_stuck_one_ends_both(tmp_path: Path) -> None:
    def send(pids: dict[int, int], group: int) -> None:
        time.sleep(2)
        os.kill(pids[1], signal.SIGTERM)

    ended = launch(tmp_path, "wait", "training_step", on_now=send)
    assert_all_ended(ended, "Rank 1 was stopped", "It received SIGTERM", within_s=22)


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_saves(tmp_path: Path) -> None:
    def send(pids: dict[int, int], group: int) -> None:
        os.killpg(group, signal.SIGINT)

    ended = launch(tmp_path, "signal", "signal", saves=str(tmp_path), on_now=send)
    assert_all_ended(ended, "Detected KeyboardInterrupt")
    assert (tmp_path / "on_exception.ckpt").exists()


@pytest.mark.slow
def test_a_port_in_use_ends_all_ranks_with_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        monkeypatch.setenv("MASTER_PORT", port)
        ended = launch(tmp_path, "none", "now")
    assert not ended.hung and ended.codes != [0], ended.output
    assert f"ConfigError: The ranks cannot meet at 127.0.0.1:{port}" in ended.output
    assert "Unset MASTER_PORT" in ended.output and ended.seconds < 20


@pytest.mark.slow
def test_two_jobs_at_once_need_no_settings(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        folders = [tmp_path / name for name in ("one", "two")]
        for folder in folders:
            folder.mkdir()
        jobs = [pool.submit(launch, folder, "none", "nowhere") for folder in folders]
        assert [job.result().codes for job in jobs] == [[0], [0]]
