"""What the Lightning tests share: small models, data, and a Trainer whose ranks are the harness's processes.

`fit` runs one real `Trainer.fit` and returns what a comparison needs. Models are built from one seed on every
rank, so that two runs differ in the strategy alone. Buckets are small and nothing is persistent: at stage 3
every block is really sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zero_strategy as zs
from tests.harness import subtest

BATCH_SIZE = 3
SMALL_BUCKETS = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 0}


class HarnessEnvironment(LightningEnvironment):
    """Ranks that exist already, with a process group."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class TinyModule(LightningModule):
    """Repeated blocks of odd width, a frozen and a tied layer, a float buffer; two param groups."""

    def __init__(self, lr: float = 1e-2, width: int = 15) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(7)
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.last = nn.Linear(width, width, bias=False)
        self.last.weight = self.blocks[0].linear.weight
        self.head = nn.Linear(width, 1)
        self.register_buffer("scale", torch.tensor([1.5]))
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(self.frozen(x))) * self.scale

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.detach().clone())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.ndim > 1 and p.requires_grad]
        rest = [p for p in self.parameters() if p.ndim == 1 and p.requires_grad]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 5e-3}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Outcome(NamedTuple):
    trainer: Trainer
    module: LightningModule
    weights: dict[str, Tensor]  # whole; {} on ranks other than 0 under ZeroStrategy


def loader(num_batches: int = 5) -> DataLoader:
    """Return `num_batches` batches for each of 2 ranks; the Trainer adds the distributed sampler."""
    generator = torch.Generator().manual_seed(3)
    numel = num_batches * BATCH_SIZE * 2
    x = torch.randn(numel, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=BATCH_SIZE)


def ddp() -> Any:
    return DDPStrategy(find_unused_parameters=True)


def strategies() -> dict[str, Any]:
    """DDP first: its outcome is what the others are held to."""
    return {"ddp": ddp(), **{f"stage {stage}": zero(stage) for stage in (1, 2, 3)}}


def zero(stage: int, **keywords: Any) -> Any:
    return zs.ZeroStrategy(stage=stage, **{**SMALL_BUCKETS, **keywords})


def make_trainer(strategy: Any, trainer_class: Any = Trainer, **keywords: Any) -> Any:
    settings: dict[str, Any] = {
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 1,
        "plugins": [],
    }
    settings.update(keywords)
    environment = settings.pop("environment", HarnessEnvironment)
    settings["plugins"] = [environment(), *settings["plugins"]]
    return trainer_class(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **settings)


def fit(
    strategy: Any,
    make_module: Callable[[], LightningModule] = TinyModule,
    num_batches: int = 5,
    ckpt_path: Any = None,
    **keywords: Any,
) -> Outcome:
    """Train a new module; validation runs in between."""
    module = make_module()
    trainer = make_trainer(strategy, **keywords)
    trainer.fit(module, loader(num_batches), loader(2), ckpt_path=ckpt_path)
    return Outcome(trainer, module, whole_weights(trainer))


def whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}


def assert_same_weights(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0
) -> None:
    """Compare on rank 0, the only one that holds whole weights.

    Args:
        tolerance: 0 asks for the same bits; else the largest norm of the difference over the norm, per
            tensor.
    """
    if dist.get_rank() != 0:
        return
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        if tolerance == 0.0:
            assert torch.equal(found[name], value), (
                f"{name}: differs by up to {(found[name] - value).abs().max()}"
            )
        else:
            distance = float((found[name] - value).norm() / value.norm().clamp_min(1e-30))
            assert distance <= tolerance, f"{name}: {distance} > {tolerance}"


def assert_same_losses(found: LightningModule, expected: LightningModule) -> None:
    """Each rank's own training losses, in order, bit for bit."""
    assert len(found.losses) == len(expected.losses) > 0
    assert torch.equal(torch.stack(found.losses), torch.stack(expected.losses))


def compare_with_ddp(make_module: Callable[[], Any], *, name: str = "", **settings: Any) -> list[Outcome]:
    """Train under DDP and at stages 1, 2, 3, and require the same bits; return what each came to."""
    with subtest(f"{name} ddp"):
        outcomes = [fit(ddp(), make_module, **settings)]
    for stage in (1, 2, 3):
        with subtest(f"{name} stage {stage}"):
            found = fit(zero(stage, accumulate_whole_gradients=stage > 1), make_module, **settings)
            assert_same_weights(found.weights, outcomes[0].weights)
            assert_same_losses(found.module, outcomes[0].module)
            outcomes.append(found)
    return outcomes
