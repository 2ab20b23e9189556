"""Fabric(strategy="zero1" ... "zero3") on two ranks.

Oracle: the same loop under Fabric's own DDPStrategy. Tolerance 0 where the order of additions is the same
(one reduction per step, or accumulation with `accumulate_whole_gradients`); a reduction per micro-batch and
clipping by norm agree to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, subtest
from tests.integrations.lightning_support import SMALL_BUCKETS, Block, HarnessEnvironment, assert_same_weights

STAGES = (1, 2, 3)


class Net(nn.Module):
    """Blocks of odd width, a frozen and a tied layer, a float buffer; and a second entrance."""

    def __init__(self, width: int = 15) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.last = nn.Linear(width, width, bias=False)
        self.last.weight = self.blocks[0].linear.weight
        self.head = nn.Linear(width, 1)
        self.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(self.frozen(x))) * self.scale

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self(x), y)


def zero(stage: int, **keywords: Any) -> Any:
    return zs.FabricZeroStrategy(stage=stage, **{**SMALL_BUCKETS, **keywords})


def ddp() -> Any:
    return DDPStrategy()


def make_fabric(strategy: Any, **keywords: Any) -> Fabric:
    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        plugins=[HarnessEnvironment()],
        **keywords,
    )
    fabric.launch()
    return fabric


def batches(num: int = 4) -> list[tuple[Tensor, Tensor]]:
    """This rank's own batches."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    inputs = [torch.randn(3, 4, generator=generator) for _ in range(num)]
    return [(x, x.sum(1, keepdim=True).sin()) for x in inputs]


def new_net(seed: int = 7) -> Net:
    torch.manual_seed(seed)
    return Net()


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    trainable = [param for param in net.parameters() if param.requires_grad]
    return torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.1)


def whole(fabric: Fabric, model: Any) -> dict[str, Tensor]:
    """The whole weights, by the way `fabric.save` takes."""
    state = fabric.strategy.get_module_state_dict(model._forward_module)
    return {name: value.clone() for name, value in state.items()}


def train(fabric: Fabric, model: Any, optimizer: Any, num_batches: int = 4) -> list[Tensor]:
    losses = []
    for x, y in batches(num_batches):
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def assert_as_ddp(
    run: Callable[[Any], dict[str, Tensor]],
    tolerance: float = 0.0,
    stages: tuple[int, ...] = STAGES,
    **keywords: Any,
) -> None:
    """Run under DDP and under the stages, and compare the weights that come out."""
    expected = run(ddp())
    for stage in stages:
        with subtest(f"stage {stage}"):
            assert_same_weights(run(zero(stage, **keywords)), expected, tolerance)


# -- set-up and training -------------------------------------------------------------------------------------


def _joint(strategy: Any) -> dict[str, Tensor]:
    fabric = make_fabric(strategy)
    net = new_net()
    model, optimizer = fabric.setup(net, adamw(net))
    train(fabric, model, optimizer)
    return whole(fabric, model)


@distributed(world_size=2)
def test_training_gives_the_bits_of_ddp() -> None:
    assert_as_ddp(_joint)
