"""`sharded_from_pretrained`: every rank reads its part of the files into its shards, and gets the right
weights.

Oracle: plain `from_pretrained` of the same folder, tolerance 0 in every weight and buffer, the same missing
and unexpected keys, and the losses of DDP on that model. What a rank has read is counted by the kernel
(/proc/self/io). Models are real classes of transformers at a tiny size, with random weights.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.integrations.peft_support import (
    STAGES,
    VOCAB,
    assert_engine,
    assert_equal,
    llama,
    lora,
    shard,
    train,
    train_ddp,
)
from tests.integrations.tiny_models import bert, gpt2, mixtral, t5
from zero_strategy.peft import start_adapters
from zero_strategy.transformers import sharded_from_pretrained

pytestmark = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts what was read by /proc")


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama, tied": lambda: llama(tied=True),
    "llama, in bf16": lambda: llama(torch.bfloat16),
    "gpt2": gpt2,
    "t5": t5,
    "mixtral": mixtral,
    "bert": bert,
}


def saved(folder: Path, build: Callable[[], nn.Module], **keywords: Any) -> Path:
    """Save a model as its owner would, on rank 0."""
    if rank() == 0:
        torch.manual_seed(3)
        build().save_pretrained(folder, **keywords)
    dist.barrier()
    return folder


def load_both(folder: Path, model_class: Any, **keywords: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Load plainly and ours, on meta; the second reports what the first does."""
    torch.manual_seed(5)  # what is missing is drawn, the same way in both
    plain, told = model_class.from_pretrained(folder, output_loading_info=True, **keywords)
    torch.manual_seed(5)
    ours, info = sharded_from_pretrained(model_class, folder, output_loading_info=True, **keywords)
    assert info == told
    assert type(ours) is type(plain) and ours.training == plain.training
    assert ours.config.to_dict() == plain.config.to_dict()
    return plain, ours, info


def bytes_read() -> int:
    """What this process has read by system calls so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def assert_loaded(engine: zs.ZeroEngine, plain: nn.Module) -> None:
    assert_equal(engine.full_state_dict(), plain.state_dict())
    for (name, ours), (_, theirs) in zip(engine.model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    for ours, theirs in zip(engine.model.parameters(), plain.parameters(), strict=True):
        assert ours.dtype == theirs.dtype and ours.requires_grad == theirs.requires_grad and not ours.is_meta


@pytest.mark.slow
@distributed(world_size=2, timeout=180)
def test_weights_are_those_of_from_pretrained_for_every_family(tmp_path: Path) -> None:
    for family, build in FAMILIES.items():
        folder = saved(tmp_path / family, build, max_shard_size="20KB")
        model_class = type(build())
        for stage in STAGES if family == "llama, tied" else (3,):
            with subtest(f"{family}, stage {stage}"):
                plain, ours, _ = load_both(folder, model_class)
                assert all(param.is_meta for param in ours.parameters())
                engine, _ = shard(ours, stage)
                assert_loaded(engine, plain)
                assert engine.config.stage == stage
                engine.close()


@distributed(world_size=2)
def test_each_rank_reads_its_part_of_the_files_and_no_more(tmp_path: Path) -> None:
    folder = saved(tmp_path / "llama", lambda: llama(width=120), max_shard_size="200KB")
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert size > 400_000 and len(list(folder.glob("*.safetensors"))) > 2
    sharded_from_pretrained(transformers.LlamaForCausalLM, folder)  # imports what is read from now on
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            before = bytes_read()
            ours = sharded_from_pretrained(transformers.LlamaForCausalLM, folder)
            built = bytes_read()
            engine, _ = shard(ours, stage)
            assert built - before < 0.1 * size, "headers and configs only"
            # Half, the padding between ranks, and headers.
            assert 0.4 * size < bytes_read() - built < 0.6 * size
            assert engine.config.stage == stage
            engine.close()


@distributed(world_size=2, timeout=180)
def test_dtypes_new_heads_and_leftovers_are_as_from_pretrained_has_them(tmp_path: Path) -> None:
    folder = saved(tmp_path / "llama", llama)
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "an Auto class": (transformers.AutoModelForCausalLM, {}),
        "another dtype": (transformers.LlamaForCausalLM, {"dtype": torch.bfloat16}),
        "the backbone only": (transformers.AutoModel, {}),
        "a new head": (transformers.LlamaForSequenceClassification, {"num_labels": 3, "pad_token_id": 0}),
    }
    for name, (model_class, keywords) in cases.items():
        with subtest(name):
            plain, ours, info = load_both(folder, model_class, **keywords)
            assert bool(info["missing_keys"]) == (name == "a new head")
            assert bool(info["unexpected_keys"]) == (name in ("a new head", "the backbone only"))
            engine, _ = shard(ours, 3)
            assert_loaded(engine, plain)
            engine.close()
    with subtest("parameters that the config stores in 16 bits keep fp32 masters"):
        ours = sharded_from_pretrained(transformers.LlamaForCausalLM, folder)
        engine, _ = shard(ours, 3, bf16={"enabled": True})
        masters = engine.full_state_dict(dtype=torch.float32)
        plain = transformers.LlamaForCausalLM.from_pretrained(folder)
        assert_equal(masters, plain.state_dict())
        assert ours.dtype == torch.bfloat16 and engine.ledger.memory["master"] > 0
        engine.close()


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
def test_ties_that_are_stored_twice_are_tied_if_the_values_agree(tmp_path: Path) -> None:
    folder = saved(tmp_path / "tied", lambda: llama(tied=True))
    for same in (True, False):
        with subtest(f"same={same}"):
            if rank() == 0:
                path = folder / "model.safetensors"
                tensors = load_file(path)
                head = tensors["model.embed_tokens.weight"].clone()
                tensors["lm_head.weight"] = head if same else head + 1
                save_file(tensors, path, metadata={"format": "pt"})
            dist.barrier()
            plain, ours, _ = load_both(folder, transformers.LlamaForCausalLM)
            assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == same
            assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == same
            engine, _ = shard(ours, 3)
            assert_loaded(engine, plain)
            engine.close()
            dist.barrier()


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
def test_what_was_loaded_trains_as_under_ddp_with_adapters_and_copies_too(tmp_path: Path) -> None:
    folder = saved(tmp_path / "llama", llama)
    plain = transformers.LlamaForCausalLM.from_pretrained(folder)
    losses, weights = train_ddp(copy.deepcopy(plain).train())
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            ours = sharded_from_pretrained(transformers.LlamaForCausalLM, folder).train()
            copied = copy.deepcopy(ours)  # a reference model, say
            engine, optimizer = shard(ours, stage)
            assert train(ours, optimizer) == losses
            assert_engine(engine, stage)
            assert_equal(engine.full_state_dict(), weights)
            other, _ = shard(copied, stage)
            assert_equal(other.full_state_dict(), plain.state_dict())
            engine.close()
            other.close()


@distributed(world_size=2, timeout=120)
def test_adapters_are_put_around_a_model_that_has_no_values_yet(tmp_path: Path) -> None:
    folder = saved(tmp_path / "llama", llama)
    config = lora(modules_to_save=["lm_head"], target_modules=["q_proj", "embed_tokens"])

    def on_meta() -> Any:
        return peft.get_peft_model(sharded_from_pretrained(transformers.LlamaForCausalLM, folder), config)

    plain = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(folder), config)
    with expect_error(zs.ConfigError, ["adapters are on the meta device", "start_adapters"]):
        zs.ZeroEngine(on_meta())
    model = on_meta()
    torch.manual_seed(6)
    before = list(model.parameters())
    start_adapters(model)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True)), "optimizers hold them"
    engine, optimizer = shard(model.train(), 3)
    state = engine.full_state_dict()
    if rank() == 0:
        base = [name for name in state if "lora_" not in name]
        assert_equal({n: state[n] for n in base}, {n: v for n, v in plain.state_dict().items() if n in base})
        for name in (name for name in state if "lora_" in name):
            is_zero = "lora_B" in name or "lora_embedding_A" in name
            assert bool((state[name] == 0).all()) == is_zero, name
            assert state[name].abs().max() < 5
    train(model, optimizer, 2)
    assert_engine(engine, 3)
    engine.close()
    with subtest("what starts from the weights is refused"):
        base = sharded_from_pretrained(transformers.LlamaForCausalLM, folder)
        model = peft.get_peft_model(base, lora(use_dora=True))
        with expect_error(zs.ConfigError, ["DoRA or another variant", "q_proj"]):
            start_adapters(model)


@distributed(world_size=2, timeout=120)
def test_what_cannot_be_loaded_so_is_refused_by_name(tmp_path: Path) -> None:
    folder = saved(tmp_path / "llama", llama)
    with expect_error(zs.ConfigError, ["device_map", "which rank holds what"]):
        sharded_from_pretrained(transformers.LlamaForCausalLM, folder, device_map="cpu")
    with subtest("a vocabulary that was resized before there were values"):
        model = sharded_from_pretrained(transformers.LlamaForCausalLM, folder)
        model.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
        with expect_error(zs.ConfigError, ["_head.weight", "no longer part of the model", "resize"]):
            zs.ZeroEngine(model)
    with subtest("no safetensors"):
        if rank() == 0:
            (tmp_path / "bin").mkdir()
            torch.save(llama().state_dict(), tmp_path / "bin" / "pytorch_model.bin")
            llama().config.save_pretrained(tmp_path / "bin")
        dist.barrier()
        with expect_error(OSError, ["safetensors"]):
            sharded_from_pretrained(transformers.LlamaForCausalLM, tmp_path / "bin")
    with subtest("ranks that see other files"):
        mine = tmp_path / f"own-{rank()}"
        shutil.copytree(folder, mine)
        state = llama(torch.bfloat16 if rank() else torch.float32).state_dict()
        save_file(state, mine / "model.safetensors", metadata={"format": "pt"})
        model = sharded_from_pretrained(transformers.LlamaForCausalLM, mine, dtype=torch.float32)
        with expect_error(zs.ConfigError, ["What is to be loaded differs"]):
            zs.ZeroEngine(model)
    with subtest("a file that is cut off meanwhile, on one rank only"):
        mine = tmp_path / f"cut-{rank()}"
        if rank() == 0:
            llama().save_pretrained(mine)
        dist.barrier()
        mine = tmp_path / "cut-0"
        model = sharded_from_pretrained(transformers.LlamaForCausalLM, mine)
        dist.barrier()
        if rank() == 0:
            path = mine / "model.safetensors"
            path.write_bytes(path.read_bytes()[:-100])
        dist.barrier()
        with expect_error(zs.CheckpointError, ["model.safetensors"]):
            zs.ZeroEngine(model)


def _high_water_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024


def _write_large(folder: Path) -> int:
    """Write a random Llama of some 500 million parameters in fp32; return its bytes."""
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=14,
        num_attention_heads=12,
        num_key_value_heads=12,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.float32
    config.save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        tensors[name] = torch.empty(value.shape).uniform_(-0.05, 0.05)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.slow
def test_a_model_of_500_million_parameters_needs_half_of_itself_on_each_of_two_ranks(tmp_path: Path) -> None:
    num_bytes = _write_large(tmp_path)
    assert num_bytes > 1.9e9
    _peak_of_loading(folder=tmp_path, num_bytes=num_bytes)


@distributed(world_size=2, timeout=500)
def _peak_of_loading(folder: Path, num_bytes: int) -> None:
    transformers.LlamaForCausalLM(llama().config)  # imports what it needs
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _high_water_bytes()
    model = sharded_from_pretrained(transformers.LlamaForCausalLM, folder)
    engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=3))
    peak = _high_water_bytes() - before
    print(f"[rank {rank()}] {num_bytes / 2**20:.0f} MiB of weights, {peak / 2**20:.0f} MiB at the peak")
    assert engine.ledger.memory["params"] > 0.5 * num_bytes
    assert peak < num_bytes / 2 + 300 * 2**20, peak / 2**20
    engine.close()
