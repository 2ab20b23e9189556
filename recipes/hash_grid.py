"""Shows that the stage and settings of speed and memory change no number: hashes what training leaves.

Every cell trains the same small model on the same data: stage x bucket size x overlap x prefetch x parameters
kept whole x parameters whole at a time. How much is stepped and gathered at a time, and how long a unit is
kept for reuse, take turns over those. Hashed are the weights on every rank, the fp32 masters and the whole
optimizer state. One line a group, and in a group all hashes must be one; else the cells that differ are named
and the exit status is 1.

    python recipes/hash_grid.py              # everything, some minutes
    python recipes/hash_grid.py --quick      # every value of every setting at stage 3, seconds
    python recipes/hash_grid.py --ranks 2 --precision bf16

A group has one order of additions: the number of ranks and the precision are part of it, and so is how the
same samples become gradients.

- one backward: all samples of a step at once.
- reduced once: three micro-batches, the first two under `no_sync`. Gradients are added on each rank, then
  over the ranks; stages 2 and 3 do so with `accumulate_whole_gradients`.
- reduced each: three micro-batches. Means over the ranks are added: stages 0 and 1 do so without `no_sync`,
  stages 2 and 3 with and without it, since they keep no whole gradients.

Rounding makes these three differ from one another. At two ranks in fp32, torch's DDP is in the first two.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from benchmarks.ranks import Ranks, launch, print_setting
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import zero_strategy as zs

WORLD_SIZES, PRECISIONS, WAYS = (2, 3, 4), ("fp32", "bf16"), ("one backward", "reduced once", "reduced each")
STEPS, QUICK_STEPS = 20, 3
VOCABULARY, WIDTH, NUM_SAMPLES, NUM_MICRO = 11, 15, 6, 3
ENDLESS = 1_000_000_000

Settings = dict[str, Any]
# Names as printed, keys of ds_config.json, values: elements, but for the second.
AXES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "bucket": ("reduce_bucket_size", (1, 300, ENDLESS)),
    "overlap": ("overlap_comm", (True, False)),
    "stepped": ("sub_group_size", (0, ENDLESS)),
    "gathered": ("allgather_bucket_size", (100, ENDLESS)),
    "prefetch": ("stage3_prefetch_bucket_size", (0, ENDLESS)),
    "whole below": ("stage3_param_persistence_threshold", (0, 50)),
    "max live": ("stage3_max_live_parameters", (700, ENDLESS)),
    "reused": ("stage3_max_reuse_distance", (0, ENDLESS)),
}
NUM_AXES_BELOW_STAGE_3 = 4
# Over the cells of all the others: every combination with these would be eight times as many and say no more.
TAKE_TURNS = ("stepped", "gathered", "reused")
# Every value of every axis, beside every value of every other axis at stage 3.
QUICK = [
    (0, 300, True, 0, 100),
    (1, 1, False, ENDLESS, 100),
    (2, ENDLESS, True, 0, ENDLESS),
    (3, 1, False, ENDLESS, ENDLESS, ENDLESS, 50, ENDLESS, ENDLESS),
    (3, 1, True, 0, 100, 0, 0, ENDLESS, 0),
    (3, 1, True, 0, 100, 0, 0, 700, ENDLESS),
    (3, 300, False, 0, 100, ENDLESS, 0, 700, 0),
    (3, 300, True, ENDLESS, 100, 0, 50, 700, 0),
    (3, 300, True, 0, ENDLESS, 0, 0, ENDLESS, ENDLESS),
    (3, ENDLESS, False, ENDLESS, ENDLESS, 0, 0, 700, 0),
    (3, ENDLESS, True, 0, 100, ENDLESS, 50, ENDLESS, ENDLESS),
]


class Cell(NamedTuple):
    """One training.

    Attributes:
        precision: Of `PRECISIONS`.
        way: Of `WAYS`: how samples become gradients.
        values: The stage, and one of each axis that acts at it; None: DDP.
        no_sync: Whether all micro-batches but the last run under it.
    """

    precision: str
    way: str
    values: tuple[Any, ...] | None
    no_sync: bool

    @property
    def settings(self) -> Settings:
        """Keywords of a ZeroConfig."""
        assert self.values is not None, "DDP has none"
        keys = [key for key, _ in AXES.values()]
        settings = {"stage": self.values[0], **dict(zip(keys, self.values[1:], strict=False))}
        settings.setdefault("stage3_param_persistence_threshold", 0)  # the model is small: shard it
        return settings | {"accumulate_whole_gradients": self.way == "reduced once"}

    def __str__(self) -> str:
        if self.values is None:
            return "DDP"
        named = [f"stage {self.values[0]}"]
        for name, value in zip(AXES, self.values[1:], strict=False):
            named.append(f"{name} {value}" if isinstance(value, bool) else f"{name} {value:,}")
        return ", ".join(named) + (", no_sync" if self.no_sync else "")


class Model(nn.Module):
    """Awkward on purpose: odd shapes, a tied, a frozen and an unused parameter, a module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))
            for _ in range(3)
        )
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.randn(7, 15))
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5), requires_grad=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.shared(self.embed(tokens))
        for block in self.blocks:
            x = x + block(x) * self.scale
        return self.head(self.shared(x))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"a part of the grid, {QUICK_STEPS} steps each")
    parser.add_argument("--ranks", type=int, nargs="+", default=WORLD_SIZES, help="default: 2 3 4")
    parser.add_argument("--precision", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    parser.add_argument("--steps", type=int, help=f"optimizer steps of a cell (default: {STEPS})")
    options = parser.parse_args()
    num_steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    print_setting(max(options.ranks), f"{num_steps} steps a cell")
    is_one = True
    for num_ranks in options.ranks:
        cells = list(cells_of(num_ranks, options.precision, is_quick=options.quick))
        hashes = whole_hashes(launch(num_ranks, train_cells, cells, num_steps))
        is_one &= report(num_ranks, dict(zip(cells, hashes, strict=True)))
    return 0 if is_one else 1


def cells_of(num_ranks: int, precisions: Iterable[str], *, is_quick: bool) -> Iterator[Cell]:
    """Yield what is trained at this number of ranks, group by group."""
    for precision, way in itertools.product(precisions, WAYS):
        if num_ranks == 2 and precision == "fp32" and way != "reduced each":
            yield Cell(precision, way, None, way == "reduced once")
        for values in QUICK[: None if way == "one backward" else 4] if is_quick else whole_grid():
            yield Cell(precision, way, values, way == "reduced once")
            if way == "reduced each" and values[0] >= 2:
                yield Cell(precision, way, values, True)


def whole_grid() -> Iterator[tuple[Any, ...]]:
    """Yield every stage with every combination of what acts at it, but for the axes that take turns."""
    for stage in range(4):
        names = list(AXES)[: None if stage == 3 else NUM_AXES_BELOW_STAGE_3]
        crossed = [name for name in names if name not in TAKE_TURNS]
        cells = itertools.product(*(AXES[name][1] for name in crossed))
        for number, values in enumerate(cells):
            # The bits of a count that is out of step with that of the combinations.
            turn = number + number // 8 + number // 2
            found = dict(zip(crossed, values, strict=True))
            for place, name in enumerate(TAKE_TURNS):
                found[name] = AXES[name][1][turn >> place & 1]
            yield (stage, *(found[name] for name in names))


# -- on every rank --


def train_cells(ranks: Ranks, cells: list[Cell], num_steps: int) -> list[tuple[str, str]]:
    """Train all cells one after the other, each from a new model; return two hashes of each.

    The first is of this rank's whole weights, the second of masters and optimizer state, on rank 0 alone.
    """
    bar = tqdm(cells, f"{ranks.world_size} ranks", disable=ranks.rank > 0 or None, leave=False)
    return [train(cell, ranks.rank, num_steps) for cell in bar]


def train(cell: Cell, rank: int, num_steps: int) -> tuple[str, str]:
    torch.manual_seed(0)
    model = Model()
    if cell.values is None:
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = adamw(model)
        run(cell, ddp, optimizer, ddp.no_sync, rank, num_steps)
        whole = hash_of(model.state_dict().items())
        return whole, hash_of([*model.named_parameters(), *tensors_of(optimizer)])
    config = zs.ZeroConfig(**cell.settings, bf16={"enabled": cell.precision == "bf16"})
    engine = zs.ZeroEngine(model, config)
    optimizer = engine.shard_optimizer(adamw(model))
    run(cell, model, optimizer, engine.no_sync, rank, num_steps)
    with engine.unsharded_params():
        whole = hash_of([(fqn, p) for fqn, p in model.named_parameters(remove_duplicate=False)])
    masters = engine.full_state_dict(dtype=torch.float32)
    names = dict(model.named_parameters())
    state = [*((fqn, value) for fqn, value in masters.items() if fqn in names), *tensors_of(optimizer)]
    engine.close()
    return whole, hash_of(state)


def run(cell: Cell, model: nn.Module, optimizer: Any, no_sync: Any, rank: int, num_steps: int) -> None:
    num_micro = 1 if cell.way == "one backward" else NUM_MICRO
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(1_000 * step + rank)
        samples = torch.randint(0, VOCABULARY, (2, NUM_SAMPLES, 5), generator=generator)
        for number, (tokens, targets) in enumerate(samples.chunk(num_micro, 1)):
            keeps = cell.no_sync and number < num_micro - 1
            context: AbstractContextManager[Any] = no_sync() if keeps else contextlib.nullcontext()
            with context:
                logits = model(tokens).float().reshape(-1, VOCABULARY)
                (nn.functional.cross_entropy(logits, targets.reshape(-1)) / num_micro).backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over two param groups: matrices decay."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trainable if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in trainable if param.ndim < 2], "weight_decay": 0.0, "lr": 5e-3},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def tensors_of(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an optimizer's whole state, under ours of rank 0 alone."""
    state = optimizer.state_dict()["state"]
    for index in sorted(state):
        for key in sorted(state[index]):
            yield f"{index}.{key}", state[index][key]


def hash_of(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of names, dtypes, shapes and every bit."""
    digest = hashlib.sha256()
    for name, value in named:
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        # A clone: a storage that numpy has seen can never be freed in place.
        digest.update(value.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


# -- the verdict --


def whole_hashes(by_rank: list[list[tuple[str, str]]]) -> list[str]:
    """Return one hash for each cell, or what says that its ranks have come apart."""
    found = []
    for ranks in zip(*by_rank, strict=True):
        weights = [of_weights for of_weights, _ in ranks]
        apart = "" if len(set(weights)) == 1 else f" (ranks have other weights: {', '.join(weights)})"
        found.append(f"{weights[0]} {ranks[0][1]}{apart}")
    return found


def report(num_ranks: int, hashes: dict[Cell, str]) -> bool:
    """Print a line for each group, and which cells differ; return whether all is as it must be."""
    groups: dict[tuple[str, str], dict[Cell, str]] = {}
    for cell, text in hashes.items():
        groups.setdefault((cell.precision, cell.way), {})[cell] = text
    is_one = True
    for (precision, way), group in groups.items():
        (usual, _), *others = Counter(group.values()).most_common()
        head = f"{num_ranks} ranks, {precision}, {way}".ljust(32) + f"{len(group):4} cells  "
        print(head + (f"{len(others) + 1} HASHES, most often {usual}" if others else usual), flush=True)
        for cell, text in group.items():
            if text != usual:
                print(f"    {text}  {cell}")
        is_one &= not others and "other weights" not in usual
    return is_one


if __name__ == "__main__":
    sys.exit(main())
