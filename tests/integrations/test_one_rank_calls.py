"""A call made on one rank only, where the others go on: all ranks end, with the line of the user's code.

Oracle: the line of this file, or of the script, that makes the call, read from the text of the error.
Tolerance: real processes end within 25 seconds; one that stands in torch's own barrier is given 10 of them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.integrations import fabric_support
from tests.integrations.lightning_support import TinyModule, loader, make_trainer, zero
from tests.launching import assert_all_ended, run_script
from zero_strategy.comm import watch


class SavesOnRank0(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.is_global_zero:
            trainer.save_checkpoint(self.path)


@distributed(world_size=2)
def test_a_checkpoint_saved_on_rank_0_only_ends_all_ranks_and_names_the_line(tmp_path: Path) -> None:
    watch.POLL_S, watch.LONG_WAIT_S = 0.05, 0.5
    for stage in (1, 2, 3):
        texts = [
            "rank 0 waits in ", "rank 1 waits in torch.distributed.broadcast()",  # Lightning's, each batch
            "test_one_rank_calls.py:", "trainer.save_checkpoint(self.path)", "if trainer.is_global_zero:",
        ]  # fmt: skip
        with subtest(f"stage {stage}"):
            trainer = make_trainer(zero(stage), callbacks=[SavesOnRank0(tmp_path / "x.ckpt")])
            with expect_error(zs.ShardingError, texts):
                try:
                    trainer.fit(TinyModule(), loader())
                finally:
                    if rank() == 0:
                        dist.broadcast(torch.tensor(0), src=0)  # lets rank 1 out: it stays in this process


@distributed(world_size=2)
def test_a_call_of_fabric_on_rank_0_only_is_named_on_all_ranks() -> None:
    watch.POLL_S, watch.LONG_WAIT_S = 0.05, 0.5
    calls: dict[str, Callable[[Any], Any]] = {
        "barrier": lambda fabric: fabric.barrier(),
        "broadcast": lambda fabric: fabric.broadcast("x"),
        "all_gather": lambda fabric: fabric.all_gather(torch.ones(3)),
        "all_reduce": lambda fabric: fabric.all_reduce(torch.ones(3)),
        "decision": lambda fabric: fabric.strategy.reduce_boolean_decision(True),
    }
    for name, call in calls.items():
        with subtest(name):
            fabric = fabric_support.make_fabric(fabric_support.zero(3))
            net = fabric_support.new_net()
            model, _ = fabric.setup(net, fabric_support.adamw(net))
            texts = ["rank 0 waits in torch.distributed.", "rank 1 waits in the all-gather", "lambda fabric:"]
            with expect_error(zs.ShardingError, texts):
                if rank() == 0:
                    call(fabric)  # returns when rank 1 has been told and joins in
                model(torch.ones(3, 4))
            if rank() == 1:
                call(fabric)


# -- real processes --


SCRIPT = """
import os, sys
import torch
import lightning.pytorch as pl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import zero_strategy as zs

name = sys.argv[1]
rank = int(os.environ.get("LOCAL_RANK", 0))
print(f"rank {rank} is {os.getpid()}", flush=True)

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def training_step(self, batch, batch_idx):
        x = self.first(batch[0])
        if name == "log" and self.trainer.is_global_zero:
            print("now", flush=True)
            self.log("mean", x.mean(), sync_dist=True)
        return self.second(x).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if name != "log" and self.trainer.is_global_zero:
            print("now", flush=True)
            if name == "barrier":
                self.trainer.strategy.barrier()
            self.trainer.save_checkpoint("x.ckpt")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

trainer = pl.Trainer(
    strategy=zs.ZeroStrategy(stage=3, stage3_param_persistence_threshold=0), devices=2, accelerator="cpu",
    max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
    enable_checkpointing=False, default_root_dir=os.path.dirname(__file__),
)
trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(64, 16)), batch_size=4))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "texts"),
    [
        pytest.param("save", [': self.trainer.save_checkpoint("x.ckpt"); rank 1 at train.py:']),
        pytest.param(
            "barrier",  # both ranks stand in torch's own collectives, which nothing gets them out of
            [
                "torch.distributed.barrier() on rank 0; torch.distributed.broadcast() on rank 1",
                ": self.trainer.strategy.barrier(); rank 1 at",
            ],
        ),
        pytest.param(
            "log",
            ["which rank 0 has not begun", ': self.log("mean", x.mean(), sync_dist=True); rank 1 at'],
        ),
    ],
)
def test_a_call_on_rank_0_only_ends_the_processes(tmp_path: Path, name: str, texts: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    assert_all_ended(run_script([str(script), name]), *texts, within_s=25)
