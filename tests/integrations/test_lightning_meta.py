"""Models built on the meta device under Lightning's Trainer and Fabric, on two ranks.

Oracle: the same module built plainly and trained under DDP, tolerance 0 (two ranks, so the order of additions
is DDP's). The hook `setup` seeds every rank alike right before a module on meta is filled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torchmetrics
from safetensors.torch import load_file
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.integrations import fabric_support
from tests.integrations.lightning_support import (
    TinyModule,
    assert_same_losses,
    assert_same_weights,
    ddp,
    fit,
    loader,
    make_trainer,
    whole_weights,
    zero,
)

SEED = 7


class Seeded(TinyModule):
    """Fills its own buffer, as whatever owns a tensor on meta must."""

    def setup(self, stage: str) -> None:
        torch.manual_seed(SEED)

    def reset_parameters(self) -> None:
        self.scale.fill_(1.5)


class Configured(Seeded):
    """Builds its layers in `configure_model`; the Trainer calls that for every run."""

    on_meta = False

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.built = 0
        del self.first, self.blocks, self.frozen, self.last, self.head

    def configure_model(self) -> None:
        if self.built:
            return
        self.built += 1
        with torch.device("meta" if self.on_meta else torch.empty(0).device):
            parts = Seeded()
        for name, part in parts.named_children():
            self.add_module(name, part)


class ConfiguredOnMeta(Configured):
    on_meta = True


def empty_module(trainer: Any, empty_init: bool = True) -> TinyModule:
    with trainer.init_module(empty_init=empty_init):
        return Seeded()


def settled(weights: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights in the order of others: `configure_model` registers buffers before layers."""
    return {name: weights[name] for name in like} if weights else weights


# -- how a module comes to be ------------------------------------------------------------------------------


@distributed(world_size=2)
def test_init_module_gives_meta_at_stage_3_only_and_real_tensors_when_asked() -> None:
    for stage in (1, 2, 3):
        trainer = make_trainer(zero(stage))
        for empty_init in (True, False, None):
            with subtest(f"stage {stage}, empty_init={empty_init}"):
                module = empty_module(trainer, empty_init)
                on_meta = stage == 3 and empty_init is True
                for tensor in (*module.parameters(), *module.buffers()):
                    assert tensor.device.type == ("meta" if on_meta else "cpu")
                if empty_init is False:
                    assert torch.equal(module.head.weight, TinyModule().head.weight)
        fabric = fabric_support.make_fabric(fabric_support.zero(stage))
        for empty_init in (True, False):
            with subtest(f"Fabric, stage {stage}, empty_init={empty_init}"):
                with fabric.init_module(empty_init=empty_init):
                    net = fabric_support.Net()
                assert all(param.is_meta == (stage == 3 and empty_init) for param in net.parameters())


@distributed(world_size=2, timeout=120)
def test_a_module_built_on_meta_trains_as_the_plain_one_under_ddp() -> None:
    expected = fit(ddp(), Seeded, max_epochs=1)
    with subtest("init_module at stage 3"):
        trainer = make_trainer(zero(3), max_epochs=1)
        module = empty_module(trainer)
        trainer.fit(module, loader(), loader(2))
        assert_same_losses(module, expected.module)
        assert_same_weights(whole_weights(trainer), expected.weights)
    for stage in (1, 3):
        for build in (Configured, ConfiguredOnMeta):
            with subtest(f"{build.__name__} at stage {stage}"):
                outcome = fit(zero(stage), build, max_epochs=1)
                assert_same_losses(outcome.module, expected.module)
                assert_same_weights(settled(outcome.weights, expected.weights), expected.weights)
    with subtest("bf16 parameters"):
        outcomes = []
        for empty_init in (False, True):
            trainer = make_trainer(zero(3), max_epochs=1, precision="bf16-true")
            module = empty_module(trainer, empty_init)
            assert module.head.weight.dtype == torch.bfloat16 and module.head.weight.is_meta == empty_init
            trainer.fit(module, loader(), loader(2))
            outcomes.append((module, whole_weights(trainer)))
        assert_same_losses(outcomes[1][0], outcomes[0][0])
        assert_same_weights(outcomes[1][1], outcomes[0][1])


@distributed(world_size=2, timeout=120)
def test_configure_model_is_called_again_for_fit_after_validate_and_finds_the_module_sharded() -> None:
    expected = fit(ddp(), Seeded, max_epochs=1)
    for stage in (1, 3):
        with subtest(f"stage {stage}"):
            module = ConfiguredOnMeta()
            trainer = make_trainer(zero(stage), max_epochs=1)
            trainer.validate(module, loader(2), verbose=False)
            engine = trainer.strategy.engine
            trainer.fit(module, loader(), loader(2))
            assert trainer.strategy.engine is engine and module.built == 1
            assert_same_losses(module, expected.module)
            assert_same_weights(settled(whole_weights(trainer), expected.weights), expected.weights)


@distributed(world_size=2, timeout=120)
def test_a_checkpoint_is_resumed_in_a_module_built_on_meta(tmp_path: Path) -> None:
    expected = fit(ddp(), Seeded, max_epochs=2)
    trainer = fit(ddp(), Seeded, max_epochs=1).trainer
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    for stage in (2, 3):
        with subtest(f"stage {stage}"):
            trainer = make_trainer(zero(stage), max_epochs=2)
            with torch.device("meta"):
                module = Seeded()
            trainer.fit(module, loader(), loader(2), ckpt_path=str(tmp_path / "plain.ckpt"))
            assert_same_weights(whole_weights(trainer), expected.weights)
            trainer.test(module, loader(2), ckpt_path=str(tmp_path / "plain.ckpt"), verbose=False)


class EmptyNet(fabric_support.Net):
    def reset_parameters(self) -> None:
        self.scale.fill_(1.5)


@distributed(world_size=2)
def test_fabric_trains_a_model_built_on_meta_as_the_plain_one() -> None:
    fabric = fabric_support.make_fabric(fabric_support.ddp())
    net = fabric_support.new_net(SEED)
    model, optimizer = fabric.setup(net, fabric_support.adamw(net))
    fabric_support.train(fabric, model, optimizer)
    expected = fabric_support.whole(fabric, model)
    for stage in (1, 3):
        with subtest(f"stage {stage}"):
            fabric = fabric_support.make_fabric(fabric_support.zero(stage))
            with fabric.init_module(empty_init=True), torch.device("meta"):
                net = EmptyNet()
            torch.manual_seed(SEED)
            model, optimizer = fabric.setup(net, fabric_support.adamw(net))
            fabric_support.train(fabric, model, optimizer)
            assert_same_weights(fabric_support.whole(fabric, model), expected)


# -- Hugging Face models -----------------------------------------------------------------------------------


class LlamaModule(TinyModule):
    """A tiny Llama, built in `configure_model`: with its weights, or empty, to be loaded once sharded."""

    def __init__(self, folder: str, empty: bool) -> None:
        super().__init__()
        self.folder, self.empty, self.llama = folder, empty, None
        del self.first, self.blocks, self.frozen, self.last, self.head

    def configure_model(self) -> None:
        from transformers import AutoConfig, LlamaForCausalLM

        if self.llama is not None:
            return
        if not self.empty:
            self.llama = LlamaForCausalLM.from_pretrained(self.folder)
            return
        with torch.device("meta"):
            self.llama = LlamaForCausalLM(AutoConfig.from_pretrained(self.folder))

    def on_fit_start(self) -> None:
        if self.empty:
            weights = load_file(Path(self.folder, "model.safetensors")) if rank() == 0 else {}
            weights = {f"llama.{name}": value for name, value in weights.items()}
            self.trainer.strategy.engine.load_full_state_dict(weights, strict=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens = (batch[0].abs() * 10).long()
        loss = self.llama(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@distributed(world_size=2, timeout=120)
def test_a_transformers_model_is_loaded_in_configure_model_or_after_it(tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#19259: from_pretrained inside configure_model at stage 3."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    torch.manual_seed(rank())
    if rank() == 0:
        LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path)
    torch.distributed.barrier()
    expected = fit(ddp(), lambda: LlamaModule(str(tmp_path), False), max_epochs=1, limit_val_batches=0)
    for empty in (False, True):
        for stage in (1, 3):
            with subtest(f"empty={empty}, stage {stage}"):
                module = LlamaModule(str(tmp_path), empty)
                init = lambda inner, module=module: module.llama._init_weights(inner)  # noqa: E731
                outcome = fit(
                    zero(stage, param_init_fn=init), lambda m=module: m, max_epochs=1, limit_val_batches=0
                )
                assert_same_losses(outcome.module, expected.module)
                assert_same_weights(outcome.weights, expected.weights)


# -- bad input ---------------------------------------------------------------------------------------------


@distributed(world_size=2)
def test_what_nobody_can_fill_is_refused_by_name_under_lightning() -> None:
    with expect_error(zs.ConfigError, ["the root", "TinyModule: scale", "param_init_fn"]):
        trainer = make_trainer(zero(3))
        with trainer.init_module(empty_init=True):
            module = TinyModule()
        trainer.fit(module, loader())
    with expect_error(zs.ConfigError, ["'seen' (MeanMetric)", "meta", "init_module"]):
        trainer = make_trainer(zero(3))
        module = empty_module(trainer)
        with torch.device("meta"):
            module.seen = torchmetrics.MeanMetric()
        trainer.fit(module, loader())
    with expect_error(zs.ConfigError, ["'0' (Bare: gain)"]):
        fabric = fabric_support.make_fabric(fabric_support.zero(1))
        with torch.device("meta"):
            bare = nn.Sequential(Bare())
        fabric.setup(bare)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(3))
