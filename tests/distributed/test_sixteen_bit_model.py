"""`save_16bit_model` writes what transformers and safetensors load, at every stage, or fails on all ranks.

Oracles: the whole weights gathered on rank 0, cast by `Tensor.to`; the folder as
it was. Tolerance: none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.storage_tracker import StorageTracker
from zero_strategy.checkpoint.export import MARKER_NAME
from zero_strategy.checkpoint.output_file import OutputFile
from zero_strategy.comm import watch
from zero_strategy.errors import CheckpointError, ConfigError, ShardingError

INDEX_NAME = "model.safetensors.index.json"
ASKED = {"stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 0}


class Odd(nn.Module):
    """Frozen, tied and odd parameters, one of integers, and buffers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(13, 15)
        self.norm = nn.BatchNorm1d(15)
        self.inner = nn.Sequential(nn.Linear(15, 7), nn.Linear(7, 15))
        self.head = nn.Linear(15, 13, bias=False)
        self.head.weight = self.table.weight
        self.inner[0].requires_grad_(False)
        self.codes = nn.Parameter(torch.arange(251, dtype=torch.uint8)[:35], requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.norm(self.table(ids))))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


@distributed(world_size=[2, 3])
def test_every_stage_writes_the_parameters_in_16_bits_and_buffers_as_they_are(tmp_path: Path) -> None:
    for stage in (0, 1, 2, 3):
        for bf16 in (False, True):
            with subtest(f"stage {stage}, bf16 {bf16}"):
                out = tmp_path / f"{stage}{bf16}"
                engine = zs.ZeroEngine(
                    Odd(), zs.ZeroConfig(stage=stage, bf16=bf16, reduce_bucket_size=120, **ASKED)
                )
                assert len(engine.buckets) > 3
                whole = engine.full_state_dict()
                engine.save_16bit_model(out, max_shard_size_bytes=400)
                if rank() == 0:
                    found = weights_of(out)
                    assert found.keys() == whole.keys() - {"head.weight"}
                    narrowed = {n for n, p in engine.model.named_parameters() if p.is_floating_point()}
                    assert found["codes"].dtype == torch.uint8
                    for name, value in found.items():
                        wanted = whole[name].to(torch.bfloat16) if name in narrowed else whole[name]
                        assert value.dtype == wanted.dtype and torch.equal(value, wanted), name
                    index = json.loads((out / INDEX_NAME).read_text())["weight_map"]
                    assert index.keys() == found.keys()
                    assert json.loads((out / MARKER_NAME).read_text())["tied"] == {
                        "head.weight": "table.weight"
                    }
                    assert not list(tmp_path.glob(".*"))
                engine.close()


@distributed(world_size=2)
def test_stage_3_refuses_unless_the_config_asks_for_it(tmp_path: Path) -> None:
    engine = zs.ZeroEngine(Odd(), zs.ZeroConfig(stage=3, stage3_param_persistence_threshold=0))
    with expect_error(
        ConfigError,
        [
            "save_16bit_model() at stage 3 needs stage3_gather_16bit_weights_on_model_save",
            "sharded",
            "zero-strategy consolidate",
        ],
    ):
        engine.save_16bit_model(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    engine.close()


@distributed(world_size=[2, 3])
def test_rank_0_needs_memory_for_one_bucket_at_a_time_and_the_others_for_none(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)])
    engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=3, reduce_bucket_size=64 * 64, **ASKED))
    optimizer = engine.shard_optimizer(torch.optim.AdamW(model.parameters()))
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    bucket_bytes, message_bytes = 4 * 64 * 64, 2048
    # What each may take besides, on rank 0: a bucket, and a part of it converted; what is asked for.
    calls = {
        "save_16bit_model": (lambda: engine.save_16bit_model(tmp_path / "out"), bucket_bytes * 3 // 2),
        "full_state_dict": (engine.full_state_dict, 7 * bucket_bytes),
        "masters": (lambda: engine.full_state_dict(torch.float32), 7 * bucket_bytes),
        "optimizer.state_dict": (optimizer.state_dict, 14 * bucket_bytes),
    }
    for name, (call, most_on_rank_0) in calls.items():
        engine.ledger.reset()
        with subtest(name), StorageTracker() as tracker:
            tracker.add(tensor for tensor in _held(engine, optimizer))
            tracker.look()
            call()
            before, *later = [sum(alive.values()) for alive in tracker.history]
            # Before it is sent, the state of an optimizer is put together from its slices.
            own_bytes = bucket_bytes if name == "optimizer.state_dict" else 0
            allowed_bytes = (most_on_rank_0 if rank() == 0 else 0) + own_bytes + message_bytes
            assert max(later) - before <= allowed_bytes, (max(later) - before, allowed_bytes)
            assert engine.ledger.comm["all_gather"]["calls"] == 0
            num_gathers = 12 if own_bytes else 6
            shards_bytes = num_gathers * engine.buckets[0].param_shard.nbytes
            sent_bytes = engine.ledger.comm["control"]["bytes_sent"]
            assert (sent_bytes >= shards_bytes) == (rank() != 0)
    engine.close()


def _held(engine: zs.ZeroEngine, optimizer: zs.ShardedOptimizer) -> Iterator[Tensor]:
    for bucket in engine.buckets:
        yield bucket.param_shard
    for state in optimizer.state.values():
        yield from state.values()


@distributed(world_size=2)
def test_a_second_save_replaces_the_first_and_a_failed_one_leaves_it_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out"
    engine = zs.ZeroEngine(Odd(), zs.ZeroConfig(stage=3, bf16=True, **ASKED))
    engine.save_16bit_model(out, max_shard_size_bytes=400)
    with engine.unsharded_params(writeback=True):
        for param in engine.model.parameters():
            param.data.add_(1)
    engine.save_16bit_model(out)
    wanted = engine.full_state_dict()
    if rank() == 0:
        assert {path.name for path in out.iterdir()} == {"model.safetensors", MARKER_NAME}
        found = weights_of(out)
        assert all(torch.equal(found[name], wanted[name]) for name in found)
    before = files_of(out) if rank() == 0 else {}
    engine._collectives.agree(None)
    with subtest("a folder of somebody else"):
        if rank() == 0:
            (tmp_path / "mine").mkdir()
            (tmp_path / "mine" / "thesis.txt").write_text("mine")
        with expect_error(CheckpointError, ["is not empty", "thesis.txt", "new folder"]):
            engine.save_16bit_model(tmp_path / "mine")
    with subtest("weights of another model in training"):
        other = zs.ZeroEngine(nn.Linear(3, 2).requires_grad_(False), zs.ZeroConfig(stage=1))
        with expect_error(CheckpointError, ["holds weights of another model in training", "new folder"]):
            other.save_16bit_model(out)
        with expect_error(CheckpointError, ["No trainable parameter", "Leave trainable_only out"]):
            other.save_16bit_model(tmp_path / "none", trainable_only=True)
        other.close()
    with subtest("a value that cannot be stored, found half-way"):
        engine.model.register_buffer("zz", torch.zeros(2, dtype=torch.complex128))
        with expect_error(CheckpointError, ["complex128", "safetensors", "leave it out"]):
            engine.save_16bit_model(out)
        del engine.model.zz
    with subtest("an error of the file system in the middle of the weights"):
        if rank() == 0:
            patch = pytest.MonkeyPatch()
            patch.setattr(OutputFile, "write", _refuse)
        with expect_error(CheckpointError, ["could not be written", "The disk is full", "space"]):
            engine.save_16bit_model(out)
        if rank() == 0:
            patch.undo()
    if rank() == 0:
        assert files_of(out) == before
        assert {path.name for path in tmp_path.iterdir()} == {"out", "mine"}
    engine.save_16bit_model(out)  # the ranks have not parted
    engine.close()


def _refuse(*args: object) -> None:
    raise OSError("the disk is full")


@distributed(world_size=2)
def test_transformers_loads_what_was_written(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=3, reduce_bucket_size=2000, **ASKED))
    whole = engine.full_state_dict(torch.bfloat16)
    with subtest("save_pretrained"), expect_error(ShardingError, "full_state_dict"):
        model.save_pretrained(tmp_path / f"none-{rank()}")
    assert not list(tmp_path.glob("none-*/*model*"))
    engine.save_16bit_model(tmp_path / "out", max_shard_size_bytes=2000)
    if rank() == 0:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
        assert loaded.dtype == torch.bfloat16
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, whole[name]), name
    engine.close()


@distributed(world_size=2)
def test_an_export_that_one_rank_alone_asks_for_ends_on_all_with_its_line(tmp_path: Path) -> None:
    watch.POLL_S, watch.LONG_WAIT_S = 0.05, 0.5
    engine = zs.ZeroEngine(Odd(), zs.ZeroConfig(stage=3, **ASKED))
    began = time.monotonic()
    with expect_error(ShardingError, ["rank 0", "rank 1", "test_sixteen_bit_model.py"]):
        if rank() == 0:
            engine.save_16bit_model(tmp_path / "out")
        engine.model(torch.arange(4)).sum().backward()
    assert time.monotonic() - began < 10
    assert not any(tmp_path.iterdir())
    engine.close()


@distributed(world_size=2)
def test_what_one_rank_has_done_to_its_model_is_raised_on_all_when_it_is_saved(tmp_path: Path) -> None:
    engine = zs.ZeroEngine(Odd(), zs.ZeroConfig(stage=2))
    weight = engine.model.inner[1].weight
    kept = weight.data
    if rank() == 1:
        weight.data = kept.clone()
    for name, call in (
        ("full_state_dict", engine.full_state_dict),
        ("save_checkpoint", lambda: engine.save_checkpoint(tmp_path / "c")),
        ("save_16bit_model", lambda: engine.save_16bit_model(tmp_path / "out")),
    ):
        with subtest(name), expect_error(ShardingError, ["[rank 1]", "'inner.1.weight'", "other memory"]):
            call()
    assert not any(tmp_path.iterdir())
    weight.data = kept
    engine.save_16bit_model(tmp_path / "out")
    engine.close()
