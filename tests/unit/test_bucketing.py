"""Repeated blocks are found in models nobody has prepared, and what may not share a bucket does not.

Oracle: the names of the blocks, written out; and the rules themselves, checked on every bucket of every
model. Tolerance: none. Models are tiny and built from configs; nothing is loaded, nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero_strategy.bucketing import BucketPlan, check_model, find_units, plan_buckets, summarize
from zero_strategy.config import ZeroConfig
from zero_strategy.errors import ConfigError


def config(stage: int = 3, threshold: int = 0, **settings: Any) -> ZeroConfig:
    if stage == 3:
        settings["stage3_param_persistence_threshold"] = threshold
    return ZeroConfig(stage=stage, **settings).resolve(2)


def unit_names(model: nn.Module, settings: ZeroConfig | None = None) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return sorted({names[unit] for unit in find_units(model, settings or config()).values()})


def homes(plans: list[BucketPlan]) -> dict[str, str]:
    """The bucket's name by parameter."""
    return {fqn: plan.name.partition("#")[0] for plan in plans for fqn in plan.fqns}


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)


class Router(nn.Module):
    """A layer that sends each token to one of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(4))


class MixtureLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(6, 6), Router()


class Nested(nn.Module):
    """Stages of blocks: a ModuleList of ModuleLists."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(3))
        self.head = nn.Linear(6, 9)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.layers = nn.ModuleList(MixtureLayer() for _ in range(2))


class OneRouter(nn.Module):
    """Experts outside of any repeated block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.moe = nn.Embedding(9, 6), Router()


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2
        )
    )


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=3, n_head=2)
    )


def encoder() -> nn.Module:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16), num_layers=3, enable_nested_tensor=False
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "llama": (llama, ["model.layers.0", "model.layers.1", "model.layers.2"]),
    "gpt2": (gpt2, ["transformer.h.0", "transformer.h.1", "transformer.h.2"]),
    "torch encoder": (encoder, ["layers.0", "layers.1", "layers.2"]),
    "mlp": (mlp, ["0", "2", "4"]),
    "nested lists": (Nested, [f"stages.{i}.{j}" for i in range(3) for j in range(2)]),
    "mixture": (Mixture, ["layers.0", "layers.1"]),
    "one router": (OneRouter, ["moe"]),
    "no repetition": (Block, []),
    "one linear": (lambda: nn.Linear(3, 3), []),
    "no parameters": (nn.ReLU, []),
}


@pytest.mark.parametrize("name", MODELS)
def test_units_are_the_outermost_repeated_blocks(name: str) -> None:
    build, expected = MODELS[name]
    found = unit_names(build())
    assert set(expected) <= set(found), f"found {found}"
    # Two embedding tables side by side (GPT-2's tokens and positions) are siblings of one class.
    assert all("wte" in extra or "wpe" in extra for extra in set(found) - set(expected)), f"found {found}"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_in_one_bucket_of_its_own_kind(name: str, stage: int) -> None:
    model = MODELS[name][0]()
    for index, param in enumerate(model.parameters()):
        param.requires_grad_(index % 5 != 1)
        if index % 7 == 3:
            param.data = param.data.bfloat16()
    plans = plan_buckets(model, config(stage))
    placed = [param for plan in plans for param in plan.params]
    assert len(placed) == len(list(model.parameters()))
    assert {id(param) for param in placed} == {id(param) for param in model.parameters()}
    for plan in plans:
        assert {param.requires_grad for param in plan.params} == {plan.trainable}
        assert {param.dtype for param in plan.params} == {plan.dtype}
        assert [model.get_parameter(fqn) for fqn in plan.fqns] == list(plan.params)
        policy = (plan.policy.shard_optim, plan.policy.shard_grads, plan.policy.shard_params)
        assert policy == (stage >= 1, stage >= 2, stage >= 3)
    assert len({plan.name for plan in plans}) == len(plans), "two buckets have one name"


@pytest.mark.parametrize("name", MODELS)
def test_at_stage_3_a_bucket_holds_parameters_of_one_unit_or_of_the_root(name: str) -> None:
    model = MODELS[name][0]()
    units = find_units(model, config())
    for plan in plan_buckets(model, config()):
        owners = {
            module for module in model.modules() for p in module.parameters(recurse=False) if _in(p, plan)
        }
        unit = plan.modules[0]
        if plan.is_root:
            assert unit is model
        else:
            assert {units.get(owner) for owner in owners} == {unit}
        assert owners <= set(plan.modules), "an owner called on its own would not find its parameters"


def _in(param: nn.Parameter, plan: BucketPlan) -> bool:
    return any(param is other for other in plan.params)


def test_parameters_that_two_units_share_belong_to_the_root() -> None:
    model = Nested()
    model.stages[1][0].inner.weight = model.stages[0][0].inner.weight  # type: ignore[index,union-attr]
    placed = homes(plan_buckets(model, config()))
    assert placed["stages.0.0.inner.weight"] == "root.float32"
    assert placed["stages.0.0.inner.bias"] == "stages.0.0.float32"
    assert "stages.1.0.inner.weight" not in placed, "a tied parameter counts once"


def test_parameters_tied_within_a_unit_stay_in_it() -> None:
    model = Nested()
    block = model.stages[0][0]  # type: ignore[index]
    block.norm.bias = block.inner.bias  # type: ignore[union-attr]
    assert homes(plan_buckets(model, config()))["stages.0.0.norm.bias"] == "stages.0.0.float32"


def test_an_embedding_tied_to_the_head_belongs_to_the_root_once() -> None:
    model = Nested()
    model.head.weight = model.embed.weight
    plans = plan_buckets(model, config())
    root = [fqn for plan in plans if plan.is_root for fqn in plan.fqns]
    assert root == ["embed.weight", "head.bias"]


def test_the_same_module_in_two_places_is_one_unit() -> None:
    model = Nested()
    model.stages[2][1] = model.stages[0][0]  # type: ignore[index,operator]
    placed = homes(plan_buckets(model, config()))
    assert placed["stages.0.0.inner.weight"] == "stages.0.0.float32"
    assert not any(fqn.startswith("stages.2.1") for fqn in placed)


def test_experts_are_one_unit_with_their_router() -> None:
    model = Mixture()
    units = find_units(model, config())
    router = model.layers[0].mlp
    assert {units[module] for module in router.modules()} == {model.layers[0]}  # type: ignore[union-attr]
    alone = OneRouter()
    assert {find_units(alone, config())[module] for module in alone.moe.modules()} == {alone.moe}


class AdaptedHead(nn.Module):
    """A layer of the root with two adapters, held as PEFT holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(6, 5)
        self.lora_A = nn.ModuleDict({name: nn.Linear(6, 2) for name in "ab"})
        self.lora_B = nn.ModuleDict({name: nn.Linear(2, 5) for name in "ab"})


class AdaptedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = AdaptedHead()
        self.other = nn.Module()
        self.other.base_layer = nn.Linear(6, 6)
        self.other.lora_E = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2, 1))})


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AdaptedBlock() for _ in range(2))
        self.head = AdaptedHead()
        self.tables = nn.ParameterDict({name: nn.Parameter(torch.zeros(3)) for name in "ab"})
        self.others = nn.ParameterDict({"c": nn.Parameter(torch.zeros(3))})


def test_no_unit_begins_in_an_adapter_and_its_bare_parameters_belong_to_the_root() -> None:
    model = Adapted()
    assert unit_names(model) == ["blocks.0", "blocks.1"]
    placed = homes(plan_buckets(model, config()))
    in_root = {fqn for fqn, name in placed.items() if name.startswith("root")}
    assert {fqn for fqn in placed if not fqn.startswith("blocks")} < in_root
    assert {fqn for fqn in in_root if fqn.startswith("blocks")} == {
        f"blocks.{number}.other.lora_E.a" for number in range(2)
    }


def test_a_module_named_as_a_leaf_is_one_unit_with_all_below_it() -> None:
    by_class = config(leaf_module={"classes": ["Router"]})
    by_name = config(leaf_module={"names": ["stages"]})
    assert unit_names(Nested(), by_name) == ["stages"]
    assert unit_names(OneRouter(), by_class) == ["moe"]


def test_buckets_are_bounded_and_a_larger_parameter_has_one_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    plans = plan_buckets(model, config(1, reduce_bucket_size=40))
    assert [plan.fqns for plan in plans] == [
        ("0.weight",),
        ("1.weight", "1.bias", "2.weight"),
        ("2.bias", "3.weight", "3.bias"),
    ]
    assert len(plan_buckets(model, config(1, reduce_bucket_size=1))) == len(list(model.parameters()))
    assert len(plan_buckets(model, config(1))) == 1


def test_small_parameters_stay_whole_below_the_threshold() -> None:
    plans = plan_buckets(Nested(), config(threshold=10))
    sharded = {fqn for plan in plans if plan.policy.shard_params for fqn in plan.fqns}
    whole = {fqn for plan in plans if not plan.policy.shard_params for fqn in plan.fqns}
    assert all(fqn.endswith(("norm.weight", "norm.bias", "bias")) for fqn in whole)
    assert "embed.weight" in sharded and "stages.0.0.inner.weight" in sharded
    # What stays whole is sharded otherwise: it is a bucket of stage 2.
    assert all(
        plan.policy.shard_grads and plan.modules == () for plan in plans if not plan.policy.shard_params
    )


def test_no_more_stays_whole_than_the_limit_for_the_model_the_smallest_first() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(2, 3))  # 24+6, 12+2, 6+3 elements
    kept = {
        1: set(),
        2: {"1.bias"},
        2 + 3 + 6 - 1: {"1.bias", "2.bias"},
        # Of equal ones the first registered comes first.
        2 + 3 + 6: {"1.bias", "2.bias", "0.bias"},
        2 + 3 + 6 + 6 + 12: {"1.bias", "2.bias", "0.bias", "2.weight", "1.weight"},
    }
    for limit, names in kept.items():
        plans = plan_buckets(model, config(threshold=24, stage3_model_persistence_threshold=limit))
        assert {fqn for plan in plans if not plan.policy.shard_params for fqn in plan.fqns} == names


@pytest.mark.parametrize(("mode", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_16_bit_mode_changes_the_dtype_of_fp32_parameters_only(mode: str, dtype: torch.dtype) -> None:
    other = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}[dtype]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2).to(other))
    plans = plan_buckets(model, config(1, **{mode: {"enabled": True}}))
    assert {plan.fqns[0]: plan.dtype for plan in plans} == {
        "0.weight": dtype,
        "1.weight": torch.float64,
        "2.weight": other,
    }


@pytest.mark.parametrize("stage", [1, 3])
def test_buckets_come_in_the_order_of_registration(stage: int) -> None:
    model = Nested()
    order = [fqn for fqn, _ in model.named_parameters()]
    plans = plan_buckets(model, config(stage, reduce_bucket_size=50))
    assert [plan.fqns[0] for plan in plans] == sorted((plan.fqns[0] for plan in plans), key=order.index)
    for plan in plans:
        assert list(plan.fqns) == sorted(plan.fqns, key=order.index)


# -- what cannot be sharded --


def refusal(model: nn.Module) -> ConfigError:
    error = check_model(model)
    assert error is not None, "the model was accepted"
    assert error.what and error.why and error.fix
    return error


def test_plain_models_are_accepted() -> None:
    for build, _ in MODELS.values():
        assert check_model(build()) is None
    tied = Nested()
    tied.head.weight = tied.embed.weight
    assert check_model(tied) is None


def test_two_parameters_over_one_storage_on_meta_are_refused_by_name() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert check_model(model) is None
    model[1].weight = nn.Parameter(model[0].weight.data)
    error = refusal(model)
    assert "'0.weight'" in error.what and "'1.weight'" in error.what


def test_parameters_on_several_devices_are_refused() -> None:
    class Elsewhere(nn.Parameter):
        device = torch.device("cuda:7")  # a device this machine need not have

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].bias = Elsewhere(torch.zeros(2))
    error = refusal(model)
    assert "2 devices" in error.what and "cuda:7" in error.what and "device_map" in error.fix


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embeddings_are_refused_by_name(kind: type[nn.Module]) -> None:
    model = nn.Sequential()
    model.add_module("table", kind(4, 2, sparse=True))  # type: ignore[call-arg]
    assert "'table'" in refusal(model).what


def test_two_parameters_over_one_storage_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    error = refusal(model)
    assert "'0.weight'" in error.what and "'1.weight'" in error.what
    overlapping = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    whole = torch.zeros(6, 4)
    overlapping[0].weight, overlapping[1].weight = nn.Parameter(whole[:4]), nn.Parameter(whole[2:])
    assert "'1.weight'" in refusal(overlapping).what


def test_parameters_that_lie_side_by_side_in_one_storage_are_accepted() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    whole = torch.zeros(8, 4)
    model[0].weight, model[1].weight = nn.Parameter(whole[:4]), nn.Parameter(whole[4:])
    assert check_model(model) is None


def test_parameters_that_are_no_plain_tensors_are_refused() -> None:
    class Quantised(Tensor):
        pass

    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(2, 2).as_subclass(Quantised))
    assert "Quantised" in refusal(model).what


def test_the_summary_says_what_stays_whole_at_stage_3() -> None:
    model = nn.Linear(10, 3)
    for stage, threshold, whole in ((3, 30, "Of these 3 stay whole"), (3, 0, ""), (2, 30, "")):
        config = ZeroConfig(stage=stage, stage3_param_persistence_threshold=threshold).resolve(2)
        line = summarize(plan_buckets(model, config), config, 2)
        assert ("stay whole" in line) == bool(whole) and whole in line
