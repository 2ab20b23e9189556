"""What the Fabric tests share: a small model, its data, and a Fabric whose ranks are the harness's processes.

`assert_as_ddp` does one thing under Fabric's own DDPStrategy and under every stage, and compares what comes
out. Buckets are small and nothing is persistent: at stage 3 every block is really sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.wrappers import _unwrap_objects
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import subtest
from tests.integrations.lightning_support import SMALL_BUCKETS, Block, HarnessEnvironment, assert_same_weights


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

    def reset_parameters(self) -> None:
        """Fill what this module itself owns; at stage 3 `init_module(empty_init=True)` builds on meta."""
        self.scale.fill_(1.5)

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
    return DDPStrategy(find_unused_parameters=True)


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
    state = fabric.strategy.get_module_state_dict(_unwrap_objects(model))
    return {name: value.clone() for name, value in state.items()}


def train(
    fabric: Fabric, model: Any, optimizer: Any, scheduler: Any = None, plain: bool = False
) -> list[Tensor]:
    losses = []
    for x, y in batches():
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward() if plain else fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.detach())
    return losses


Run = Callable[[Any], dict[str, Tensor]]


def assert_as_ddp(run: Run, tolerance: float = 0.0, **keywords: Any) -> None:
    """Do the same under DDP and under every stage, and compare the weights that come out."""
    name = run.__name__
    with subtest(f"{name}, ddp"):
        expected = run(ddp())
    for stage in (1, 2, 3):
        with subtest(f"{name}, stage {stage}"):
            assert_same_weights(run(zero(stage, **keywords)), expected, tolerance)
