"""What is checked before an engine is built, and before it takes an optimizer; errors found later.

Called by the engine; it must not know the engine, and changes nothing.
"""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy import root_methods
from zero_strategy.bucket import FREED_VERSION
from zero_strategy.bucketing import ADAPTED
from zero_strategy.comm.collectives import Collectives
from zero_strategy.config import ZeroConfig
from zero_strategy.errors import ConfigError, ShardingError
from zero_strategy.first_weights import FirstWeights
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer
from zero_strategy.reducer import is_watched

_QUANTISERS = {"bitsandbytes", "torchao", "hqq", "optimum", "gptqmodel", "awq", "quark", "fouroversix"}


def agreed_config(source: Any, collectives: Collectives) -> ZeroConfig:
    """Resolve the config; a fault on one rank is raised on all, and so is a difference."""
    config, error = None, None
    try:
        config = ZeroConfig.load(source).resolve(collectives.world_size)
    except ConfigError as raised:
        error = raised
    collectives.agree(error)
    assert config is not None, "agreed on no error"
    collectives.require_same(
        json.dumps(config.to_dict(), indent=1, sort_keys=True).splitlines(), "The config"
    )
    return config


def check_not_wrapped(optimizer: Optimizer) -> ConfigError | None:
    """Return an error if an optimizer has been through `shard_optimizer` already, or None."""
    if not isinstance(optimizer, ShardedOptimizer):
        return None
    return ConfigError(
        what="This optimizer has been through shard_optimizer already.",
        why="It updates slices, and slices are not sharded again.",
        fix="Call shard_optimizer once for each optimizer, with the plain torch one.",
    )


def check_not_sharded(model: nn.Module) -> ConfigError | None:
    """Return why a model cannot have an engine of its own, or None."""
    for name, module in model.named_modules():
        if root_methods.owner_of(module) is not None:
            return ConfigError(
                what=f"This {type(model).__name__} is sharded "
                f"already{f', in part: {name!r}' if name else ''}.",
                why="A parameter has one engine.",
                fix="Use the engine it has, or call its close() first (below stage 3).",
            )
    for fqn, param in model.named_parameters():
        if is_watched(param):
            return ConfigError(
                what=f"Parameter {fqn!r} belongs to another model that is sharded already.",
                why="A parameter has one engine.",
                fix="Shard the model that holds all its parameters, once.",
            )
    return None


def check_not_placed_by_others(model: nn.Module) -> ConfigError | None:
    """Return why what a loader has made of a model cannot be sharded: placed, or quantised; or None."""
    for name, module in model.named_modules():
        hook = vars(module).get("_hf_hook")
        if hook is not None:
            return ConfigError(
                what=f"Module {name or 'the root'!r} has a {type(hook).__name__} of Accelerate's: the "
                "model was placed by device_map.",
                why="The hook moves weights before and after every forward; in between they may be on disk "
                "or on meta, and the engine would shard what happens to be there.",
                fix="Load the model without device_map. One that is too large for a rank: "
                "zero_strategy.transformers.sharded_from_pretrained at stage 3.",
            )
        method = vars(module).get("quantization_method")
        if method is not None:
            return _quantised(
                f"Module {name or 'the root'!r} ({type(module).__name__}) was quantised "
                f"by {getattr(method, 'value', method)}."
            )
    for fqn, param in model.named_parameters():
        package = type(param).__module__.partition(".")[0]
        if package in _QUANTISERS:
            return _quantised(f"Parameter {fqn!r} is a {type(param).__name__} of {package}.")
    return None


def check_adapters_have_values(model: nn.Module, param_init_fn: object) -> ConfigError | None:
    """Return which adapters are on meta, where nobody would start them as PEFT does; or None."""
    if param_init_fn is not None:
        return None
    stored = FirstWeights(model)
    empty = [
        f"{name}.{key}"
        for name, module in model.named_modules()
        if (adapted := [part for part, _ in module.named_children() if part in ADAPTED])
        for key, param in module.named_parameters()
        if param.is_meta and param not in stored and key.partition(".")[0] not in adapted
    ]
    if not empty:
        return None
    return ConfigError(
        what=f"{len(empty)} parameters of adapters are on the meta device, {empty[0]!r} among them.",
        why="An adapter starts from values of its own (LoRA's B from zero), which reset_parameters() of its "
        "parts does not give.",
        fix="Build it with low_cpu_mem_usage=False, or load its weights (PeftModel.from_pretrained) before "
        "the model is sharded. On a model of sharded_from_pretrained: "
        "zero_strategy.peft.start_adapters(model).",
    )


def _quantised(what: str) -> ConfigError:
    return ConfigError(
        what=what,
        why="Quantised weights are packed, with scales kept beside the parameters: a flat range of them is "
        "no range of weights. Sharding them is not built yet.",
        fix="Load the base in bf16: at stage 3 every rank holds its part of it only. Adapters in fp32 on a "
        "bf16 base are fine.",
    )


# -- what is found out later --


def run_backward(loss: Tensor, **kwargs: Any) -> None:
    """Call `loss.backward()`, with errors explained.

    Raises:
        ShardingError: A weight was needed that is sharded at that moment.
    """
    try:
        loss.backward(**kwargs)
    except RuntimeError as error:
        if str(FREED_VERSION) not in str(error):
            raise
        raise _needs_sharded_weight() from error


def _needs_sharded_weight() -> ShardingError:
    return ShardingError(
        what="The backward needs a weight that is sharded at this moment.",
        why="At stage 3 a unit is whole again for its backward when a gradient reaches what its modules have "
        "returned; here a gradient came another way (a value kept aside, or a second derivative).",
        fix="Let the value be part of what the module returns, or run this forward and backward inside "
        "`with engine.unsharded_params():`.",
    )


def step_at_rest() -> ShardingError:
    """Return what a step raises after `engine.rest()` if no backward of the engine's has come since."""
    return ShardingError(
        what="step() was called on an optimizer of a run that has ended.",
        why="When a run ends, gradients are left to whoever trains the model next.",
        fix="To go on without the Trainer: engine.backward(loss) instead of loss.backward(), or "
        "engine.wake() before it.",
    )


def loss_of_other_weights() -> ShardingError:
    """Return what the first backward after `engine.rest()` raises where ranks have trained apart."""
    return ShardingError(
        what="The ranks had different weights when backward() was called, the first since a run ended.",
        why="Others have trained the model meanwhile, each rank by itself. All ranks have rank 0's weights "
        "now, and the loss was computed with those from before.",
        fix="Call engine.wake() before the forward; or compute the loss anew and go on from here.",
    )


def not_a_parameter(tensor: Tensor) -> ShardingError:
    """Return what is raised for a tensor that is not one of the model's parameters."""
    return ShardingError(
        what=f"The tensor of shape {tuple(tensor.shape)} is no parameter of the sharded model.",
        why="The engine knows the gradients of its own parameters only.",
        fix="Pass one of `model.parameters()`.",
    )


def gathers_unasked() -> ConfigError:
    """Return what is raised where saving a 16-bit model would gather what the config leaves sharded."""
    return ConfigError(
        what="save_16bit_model() at stage 3 needs stage3_gather_16bit_weights_on_model_save, which is false.",
        why="Parameters are sharded, and gathering them is left out unless the config asks for it, as in "
        "DeepSpeed.",
        fix='Set "stage3_gather_16bit_weights_on_model_save": true in zero_optimization; or save with '
        "engine.save_checkpoint() and run `zero-strategy consolidate`.",
    )
