"""Models of transformers train as on DDP, and stay what they were: recomputing, generating, saving.

Oracle: the same model under torch's DDP at 2 ranks, tolerance 0 (two ranks add the same two numbers in the
same order; with gradient checkpointing on both sides, since that changes the order in which T5's layers add
to what they share), and an unsharded twin for generated tokens and loaded weights, tolerance 0. The models
are the real classes at a tiny size, made from a config with odd dims; dropout is off, since a recomputed mask
would depend on the order of random draws.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, run_ranks, subtest
from tests.integrations.tiny_models import VOCAB, bert, gpt2, llama, t5
from zero_strategy.bucketing import find_units
from zero_strategy.cli import main

transformers = pytest.importorskip("transformers")

Batch = dict[str, Tensor]


# -- tiny models of four families ----------------------------------------------------------------------------


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama, tied": lambda: llama(num_hidden_layers=3, tie_word_embeddings=True),
    "llama, untied": lambda: llama(num_hidden_layers=3),
    "gpt2": gpt2,
    "t5": lambda: t5(eos_token_id=1),
    "bert": bert,
}
FEW, OTHERS = ["llama, tied", "t5"], ["llama, untied", "gpt2", "bert"]
few_and_others = pytest.mark.parametrize(
    "families", [FEW, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["few", "others"]
)
LAYERS = {  # the class and the number of the layers of each family
    "llama, tied": ("LlamaDecoderLayer", 3),
    "llama, untied": ("LlamaDecoderLayer", 3),
    "gpt2": ("GPT2Block", 3),
    "t5": ("T5Block", 4),
    "bert": ("BertLayer", 2),
}


def build(family: str) -> nn.Module:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    return FAMILIES[family]().train()


def batch_of(step: int, of_rank: int) -> Batch:
    """Tokens with labels; the last column of one row is padding, so that a mask is used."""
    generator = torch.Generator().manual_seed(100 * of_rank + step)
    tokens = torch.randint(3, VOCAB, (2, 7), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, -1] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}


# -- training ------------------------------------------------------------------------------------------------


def shard(model: nn.Module, stage: int, **settings: Any) -> tuple[zs.ZeroEngine, torch.optim.Optimizer]:
    """An engine over a model, with nothing kept whole at stage 3, and AdamW."""
    if stage == 3:
        settings.setdefault("stage3_param_persistence_threshold", 0)
    engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=stage, **settings))
    return engine, engine.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 2) -> list[Tensor]:
    """Train on this rank's batches; return the losses."""
    losses = []
    for step in range(num_steps):
        loss = module(**batch_of(step, rank())).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def train_ddp(model: nn.Module) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train under DDP; return losses and weights."""
    module = DistributedDataParallel(model)
    losses = train(module, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return losses, model.state_dict()


def recompute(model: nn.Module, use_reentrant: bool) -> nn.Module:
    """Switch on transformers' gradient checkpointing, in whatever of the two ways."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5 has another name for it as well
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()  # or a re-entrant checkpoint of the first layer has no backward
    return model


def assert_same_training(
    model: nn.Module, stage: int, losses: list[Tensor], weights: dict[str, Tensor]
) -> None:
    """Train a model on the engine, and require DDP's losses, keys and weights in every bit."""
    engine, optimizer = shard(model, stage)
    assert [float(loss) for loss in train(model, optimizer)] == [float(loss) for loss in losses]
    state = engine.full_state_dict()
    engine.close()
    if rank() == 0:  # which has the weights
        assert list(state) == list(weights)
        for name, wanted in weights.items():
            difference = (state[name] - wanted).abs().max()
            assert torch.equal(state[name], wanted), f"{name} differs by {difference:.3g}"


@distributed(world_size=2, timeout=180)
@few_and_others
def test_training_equals_ddp_in_every_bit_at_every_stage(families: list[str]) -> None:
    for family in families:
        losses, weights = train_ddp(build(family))
        for stage in (1, 2, 3):
            with subtest(f"{family}, stage {stage}"):
                assert_same_training(build(family), stage, losses, weights)


@distributed(world_size=2, timeout=180)
@few_and_others
def test_gradient_checkpointing_at_stage3_equals_ddp_with_it(families: list[str]) -> None:
    for family in families:
        for use_reentrant in (False, True):
            with subtest(f"{family}, use_reentrant={use_reentrant}"):
                losses, weights = train_ddp(recompute(build(family), use_reentrant))
                assert_same_training(recompute(build(family), use_reentrant), 3, losses, weights)


@pytest.mark.parametrize("family", FAMILIES)
def test_units_are_the_layers(family: str) -> None:
    model = build(family)
    units = dict.fromkeys(find_units(model, zs.ZeroConfig(stage=3).resolve(1)).values())
    # Embeddings side by side (of words and of positions) are units of their own.
    found = [type(unit).__name__ for unit in units if not isinstance(unit, nn.Embedding)]
    name, number = LAYERS[family]
    assert found == [name] * number


# -- generating ----------------------------------------------------------------------------------------------


@distributed(world_size=2, timeout=180)
@few_and_others
def test_generate_at_stage3_gives_the_tokens_of_the_unsharded_twin(families: list[str]) -> None:
    for family in families:
        if family != "bert":
            with subtest(family):
                generate_and_compare(family)


def generate_and_compare(family: str) -> None:
    """Train a step, generate, compare with an unsharded model of the same weights, and train on."""
    model = build(family)
    engine, optimizer = shard(model, 3)
    train(model, optimizer)
    state = engine.full_state_dict()
    # The same prompts everywhere: ranks must call the model equally often, and an end token ends generating.
    prompts = {key: value for key, value in batch_of(9, of_rank=0).items() if key != "labels"}
    settings = {"max_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        tokens = model.eval().generate(**prompts, **settings)
    assert engine.ledger.memory["unsharded"] == 0
    if rank() == 0:
        twin = build(family)
        twin.load_state_dict(state, strict=True)
        assert torch.equal(tokens, twin.eval().generate(**prompts, **settings))
    train(model.train(), optimizer, num_steps=1)
    engine.close()


# -- saving --------------------------------------------------------------------------------------------------


@few_and_others
def test_a_consolidated_checkpoint_loads_by_from_pretrained(families: list[str], tmp_path: Path) -> None:
    whole = run_ranks(_save_all, 2, {"families": families, "root": tmp_path}, timeout=180)[0]
    for family in families:
        folder = folder_of(family, tmp_path)
        assert main(["consolidate", str(folder), str(folder) + "-out"]) == 0
        original = build(family)
        model, report = type(original).from_pretrained(str(folder) + "-out", output_loading_info=True)
        assert not any(report.values()), report
        loaded, wanted = model.state_dict(), {name: torch.tensor(v) for name, v in whole[family].items()}
        assert loaded.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(loaded[name], value), f"{family}: {name}"
        original.load_state_dict(wanted, strict=True)
        batch = batch_of(0, of_rank=0)
        with torch.no_grad():
            assert torch.equal(model.eval()(**batch).logits, original.eval()(**batch).logits), family


def folder_of(family: str, root: Path) -> Path:
    """Where the checkpoint of a family lies."""
    return root / family.replace(", ", "-")


def _save_all(families: list[str], root: Path) -> dict[str, dict[str, Any]]:
    """Train and save some families; return the weights as what crosses a process boundary."""
    whole = {}
    for family in families:
        model = build(family)
        engine, optimizer = shard(model, 3)
        train(model, optimizer)
        engine.save_checkpoint(folder_of(family, root))
        whole[family] = {name: value.numpy() for name, value in engine.full_state_dict().items()}
        engine.close()
    return whole


@distributed(world_size=2)
def test_a_vocabulary_is_resized_before_sharding_and_refused_by_name_at_stage_3_afterwards() -> None:
    """Shapes are the whole ones, so nothing is made of 0 rows."""
    for tied in (True, False):
        with subtest(f"tied={tied}"):
            model = llama(num_hidden_layers=3, tie_word_embeddings=tied)
            old = model.get_input_embeddings().weight.detach().clone()
            model.resize_token_embeddings(VOCAB + 10)
            config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
            engine = zs.ZeroEngine(model, config)
            optimizer = engine.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            assert model.get_input_embeddings().weight.shape[0] == VOCAB + 10
            with engine.unsharded_params():
                new = model.get_input_embeddings().weight.detach().clone()
            dist.broadcast(old, src=0)  # rank 0's weights are everybody's
            assert torch.equal(new[:VOCAB], old)
            with expect_error(zs.ShardingError, ["model.embed_tokens.weight", "unsharded_params"]):
                model.resize_token_embeddings(VOCAB)
            assert model.config.vocab_size == VOCAB + 10
            ids = torch.randint(3, VOCAB + 10, (2, 8))
            for _ in range(2):
                engine.backward(model(input_ids=ids, labels=ids).loss)
                optimizer.step()
                optimizer.zero_grad()
            weights = engine.full_state_dict()
            assert rank() or weights["lm_head.weight"].shape[0] == VOCAB + 10
            texts = ["'model.embed_tokens.weight' has the shape", "before sharding"]
            with expect_error(zs.ShardingError, texts), engine.unsharded_params(writeback=True):
                model.resize_token_embeddings(VOCAB)
