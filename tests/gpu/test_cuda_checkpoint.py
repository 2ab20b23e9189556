"""Checkpoints of engines on a GPU: saved at once and beside the training, with the device's random numbers.

Oracles: the uninterrupted run, bit for bit; a checkpoint saved at once, byte for byte but for ids; where
plain torch puts the optimizer state that it loads. Tolerance: none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_strategy as zs
from tests.distributed.test_async_save import files_of
from tests.gpu.test_cuda import STAGES, Net, batch_of, net, on_gpus, shard, train
from tests.harness import subtest

pytestmark = pytest.mark.gpu


class Dropping(Net):
    """With dropout, which draws from the device's generator, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = nn.functional.dropout(super().forward(x), 0.3) * self.gain
        return out


@on_gpus()
def test_a_run_goes_on_from_a_checkpoint_of_either_kind_bit_for_bit(tmp_path: Path) -> None:
    for stage in STAGES:
        for asynchronous in (False, True):
            with subtest(f"stage {stage}, asynchronous={asynchronous}"):
                folder = tmp_path / f"{stage}-{asynchronous}"
                model = net(Dropping)
                engine, optimizer = shard(model, stage)
                train(model, optimizer, 2)
                engine.save_checkpoint(folder, extra={"x": torch.ones(3).cuda()}, asynchronous=asynchronous)
                expected = train(model, optimizer, 2)
                engine.close()
                model = net(Dropping)
                engine, optimizer = shard(model, (stage + 1) % len(STAGES))
                train(model, optimizer, 1)
                assert torch.equal(engine.load_checkpoint(folder)["x"], torch.ones(3))
                found = train(model, optimizer, 2)
                assert [float(loss) for loss in found] == [float(loss) for loss in expected]
                engine.close()


@on_gpus()
def test_what_is_saved_beside_the_training_is_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    model = net(Dropping)
    engine, optimizer = shard(model, 3, bf16={"enabled": True})

    def step(number: int) -> None:
        model(batch_of(number).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(3):
        step(number)
        engine.save_checkpoint(tmp_path / f"{number}-now")
        engine.save_checkpoint(tmp_path / f"{number}", asynchronous=True)
        for later in range(3, 6):
            step(later)
        engine.wait_for_checkpoint()
        dist.barrier()
        assert files_of(tmp_path / f"{number}") == files_of(tmp_path / f"{number}-now")
    engine.close()


def places_of(state: dict[str, Any]) -> dict[str, tuple[str, torch.dtype]]:
    return {key: (value.device.type, value.dtype) for key, value in state.items()}


@on_gpus("one rank, nccl")
def test_loaded_state_lies_where_torch_puts_it_also_of_a_parameter_without_dimensions(tmp_path: Path) -> None:
    for name, options in {"AdamW": {}, "AdamW, fused": {"fused": True}, "NAdam": {}, "ASGD": {}}.items():
        with subtest(name):
            kind = getattr(torch.optim, name.partition(",")[0])
            model = net(Dropping)
            engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=2), device="cuda")
            optimizer = engine.shard_optimizer(kind(model.parameters(), lr=1e-2, **options))
            train(model, optimizer, 1)
            engine.save_checkpoint(tmp_path / name)
            whole = optimizer.state_dict()
            plain = kind(net(Dropping).cuda().parameters(), lr=1e-2, **options)
            plain.load_state_dict(whole)
            wanted = [places_of(plain.state[param]) for param in plain.param_groups[0]["params"]]
            for way in ("load_state_dict", "load_checkpoint"):
                if way == "load_state_dict":
                    optimizer.load_state_dict(whole)
                else:
                    engine.load_checkpoint(tmp_path / name)
                for param, expected in zip(optimizer.params(), wanted, strict=True):
                    for _, weight in optimizer.slices_of(param):
                        assert places_of(optimizer.state[weight]) == expected, way
                train(model, optimizer, 1)
            engine.close()
