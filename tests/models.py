"""Small models that are awkward on purpose, and the training loops that tests compare.

Shapes are odd, one parameter is tied, one frozen, one unused, one module is used twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from tests.harness import rank

VOCAB, WIDTH = 11, 15


class Block(nn.Module):
    """A residual block with odd shapes, a frozen scale, and an inner module that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale
        return x + 0.5 * self.down(torch.tanh(self.up(x)))


class Awkward(nn.Module):
    """Embedding and head tied, two equal blocks and a shared one used twice, a parameter nobody uses."""

    def __init__(self, recompute: str | None = None, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.unused = nn.Parameter(torch.randn(7, 15))
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("bias_table", torch.randn(3))
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.shared(self.embed(tokens))
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        x = self.shared(x) + self.bias_table.sum()
        return self.head(x)


def param_groups(model: nn.Module, lr: float = 1e-2) -> list[dict[str, Any]]:
    """Two groups, as most recipes have: matrices decay, vectors do not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0, "lr": lr / 2},
    ]


def batches(num: int, rank: int, size: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Seeded token batches of one rank."""
    generator = torch.Generator().manual_seed(42 + rank)
    draw: Callable[[], Tensor] = lambda: torch.randint(0, VOCAB, (size, 5), generator=generator)  # noqa: E731
    return [(draw(), draw()) for _ in range(num)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy."""
    return nn.functional.cross_entropy(logits.float().reshape(-1, VOCAB), targets.reshape(-1))


class Mlp(nn.Module):
    """Equal layers in a row, each a unit; with `tied` the first and the last share their weight."""

    def __init__(self, depth: int = 3, width: int = 15, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        if tied:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.5 * torch.tanh(layer(x))
        return x


class Routes(nn.Module):
    """Three equal units; a string says which of them run, and in which order."""

    def __init__(self, width: int = 15) -> None:
        super().__init__()
        self.units = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(width, width), nn.Tanh()) for name in "abc"}
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, route: str = "abc") -> Tensor:
        for name in route:
            x = x + self.units[name](x)
        return self.head(x)


class Moe(nn.Module):
    """A gate and experts; `choice` [num_rows] says which expert gets a row, -1 for none."""

    def __init__(self, width: int = 15, num_experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num_experts))

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(
                    0, rows, torch.tanh(expert(x[rows])) * self.gate(x[rows])[:, index : index + 1]
                )
        return out


class MoeModel(nn.Module):
    """Two residual MoE units between two linear layers of other shapes."""

    def __init__(self, width: int = 15, recompute: str | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(7, width)
        self.moes = nn.ModuleList(Moe(width) for _ in range(2))
        self.head = nn.Linear(width, 1)
        self.recompute = recompute

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        x = self.embed(x)
        for moe in self.moes:
            if self.recompute is None:
                x = x + moe(x, choice)
            else:
                x = x + checkpoint(moe, x, choice, use_reentrant=self.recompute == "reentrant")
        return self.head(x)


class TinyGpt(nn.Module):
    """Two pre-norm decoder layers with causal attention and tied embeddings."""

    def __init__(self, recompute: str | None = None, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.position = nn.Embedding(5, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 3 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        num = tokens.shape[1]
        x = self.embed(tokens) + self.position(torch.arange(num))
        mask = torch.full((num, num), float("-inf"), dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


# -- optimizers and losses -----------------------------------------------------------------------------------


def adamw(model: nn.Module, lr: float = 1e-2) -> Optimizer:
    """AdamW over two param groups."""
    return torch.optim.AdamW(param_groups(model, lr), lr=lr)


def sgd(model: nn.Module, lr: float = 0.1, **settings: Any) -> Optimizer:
    """SGD over all that trains: without momentum, the change of a weight is -lr times its gradient."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, **settings)


def inputs(step: int = 0, size: int = 4, width: int = WIDTH) -> Tensor:
    """This rank's inputs of a step, `[size, width]`."""
    return torch.randn(size, width, generator=torch.Generator().manual_seed(100 * step + rank()))


def awkward_loss(model: nn.Module, step: int) -> Tensor:
    """Cross-entropy on this rank's tokens of a step."""
    tokens, targets = batches(step + 1, rank())[step]
    return loss_of(model(tokens), targets)


def square_loss(model: nn.Module, step: int) -> Tensor:
    """Mean square of the output for this rank's inputs of a step."""
    return model(inputs(step)).pow(2).mean()


def route_loss(model: nn.Module, step: int, route: str = "abc") -> Tensor:
    """Mean square of the output by a route."""
    return model(inputs(step), route).pow(2).mean()
