"""A checkpoint of any stage, consolidated, is what `full_state_dict` returned when it was saved, bit for bit.

Oracles: the whole weights gathered on rank 0; the plain model, which loads them strictly. Tolerance: none.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zero_strategy as zs
from tests.distributed.state_support import LAYOUTS, Everything, assert_same, build, sharded, train
from tests.harness import distributed, rank, subtest
from zero_strategy.checkpoint.consolidate import consolidate
from zero_strategy.checkpoint.export import ExportOptions
from zero_strategy.checkpoint.manifest import Manifest
from zero_strategy.checkpoint.safetensors_io import SafetensorsFile

TIES = {frozenset({"embed.weight", "head.weight"}), frozenset({"left.weight", "right.weight"})}


class Laid(Everything):
    """`Everything` with parameters and a buffer whose memory is not in the order of their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(torch.randn(5, 7).T)
        self.register_buffer("strided", torch.randn(6, 8)[:, ::2])

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * (1 + self.kernel.std() * self.turned.std() * 1e-2)


def groups_of(model: nn.Module, num_groups: int) -> list[dict[str, Any]]:
    """Param groups of various sizes; of five the second is empty."""
    params = [param for param in model.parameters() if param.requires_grad]
    if num_groups < 5:
        return [
            {"params": params[index::num_groups], "lr": 0.01 * (index + 1)} for index in range(num_groups)
        ]
    cuts = [0, 2, 2, 3, 7, len(params)]
    return [{"params": params[a:b], "weight_decay": 0.1 * a} for a, b in itertools.pairwise(cuts)]


def read_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@distributed(world_size=2, timeout=120)
def test_every_layout_and_number_of_param_groups_exports_the_very_state_dict(tmp_path: Path) -> None:
    for number, layout in enumerate(LAYOUTS):
        num_groups = (1, 2, 5)[number % 3]
        with subtest(f"{layout}, {num_groups} groups"):
            engine = sharded(build(Laid), **layout)
            optimizer = engine.shard_optimizer(
                torch.optim.AdamW(groups_of(engine.model, num_groups), lr=1e-2)
            )
            train(engine.model, optimizer, 1)
            folder = tmp_path / str(number)
            engine.save_checkpoint(folder / "checkpoint")
            for dtype in (None, torch.float32) if "bf16" in layout else (None,):
                whole = engine.full_state_dict(dtype)
                if rank() == 0:
                    require_same(folder, f"{dtype}", whole, dtype)
            engine.close()


def require_same(folder: Path, name: str, whole: dict[str, Any], dtype: torch.dtype | None) -> None:
    """Consolidate in both formats and compare with the whole weights."""
    tensors = {key: value for key, value in whole.items() if isinstance(value, Tensor)}
    consolidate(folder / "checkpoint", folder / f"{name}-torch", ExportOptions(dtype=dtype, format="torch"))
    found = torch.load(folder / f"{name}-torch" / "pytorch_model.bin", weights_only=True, mmap=True)
    assert_same(dict(sorted(found.items())), dict(sorted(whole.items())))
    assert shared(found) == shared(whole) == TIES
    plain = build(Laid, seed=1)
    plain.load_state_dict(found, strict=True)
    for key, value in plain.state_dict().items():
        if isinstance(value, Tensor):
            assert torch.equal(value, tensors[key].to(value.dtype)), key
    report = consolidate(folder / "checkpoint", folder / name, ExportOptions(dtype=dtype))
    assert report.tied == {"head.weight": "embed.weight", "right.weight": "left.weight"}
    assert report.left_out == ("counting._extra_state",)
    stored = load_file(folder / name / "model.safetensors")
    assert_same({key: stored[report.tied.get(key, key)] for key in tensors}, tensors)
    # Nothing but ties shares memory, so safetensors' own writer takes them too.
    save_file({key: found[key] for key in stored}, folder / f"{name}.safetensors")
    again = load_file(folder / f"{name}.safetensors")
    assert_same({key: again[key] for key in stored}, stored)


def shared(state: dict[str, Any]) -> set[frozenset[str]]:
    """Which names share memory."""
    groups: dict[int, set[str]] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.numel():
            groups.setdefault(value.untyped_storage().data_ptr(), set()).add(name)
    return {frozenset(names) for names in groups.values() if len(names) > 1}


@distributed(world_size=4)
def test_consolidation_reads_the_weights_alone(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=3))
    optimizer = engine.shard_optimizer(torch.optim.AdamW(model.parameters()))
    model(torch.randn(2, 256)).sum().backward()
    optimizer.step()
    engine.save_checkpoint(tmp_path / "checkpoint")
    whole = engine.full_state_dict()
    if rank() == 0:
        overwrite_optimizer(tmp_path / "checkpoint")
        before = read_bytes()
        consolidate(tmp_path / "checkpoint", tmp_path / "out")
        weights_bytes = sum(value.nbytes for value in whole.values())
        assert read_bytes() - before < 1.1 * weights_bytes
        assert_same(load_file(tmp_path / "out" / "model.safetensors"), whole)
    engine.close()


def overwrite_optimizer(folder: Path) -> None:
    """Damage every byte of the optimizer's state: twice what the weights take."""
    manifest = Manifest.read(folder)
    for name, entry in manifest.tensors.items():
        for piece in entry.pieces if name.startswith("optim/") else ():
            stored = SafetensorsFile(folder / piece.file)
            with open(folder / piece.file, "r+b") as file:
                file.seek(stored.tensors[piece.key].offset_bytes)
                file.write(b"\xff" * (stored.tensors[piece.key].numel * entry.torch_dtype.itemsize))
            stored.close()
