"""Which engine a module or an optimizer belongs to, and whether the next run can go on with it.

Called by the front ends, which meet modules that a former run, or another front end, has sharded. Must not
know a framework.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from zero_strategy import root_methods
from zero_strategy.config import ZeroConfig
from zero_strategy.engine import ZeroEngine
from zero_strategy.errors import ConfigError
from zero_strategy.front_ends.settings import shards_alike
from zero_strategy.log import log_once


def find_engine(module: nn.Module) -> ZeroEngine | None:
    """Return the engine that shards a module, whichever front end or script built it, or None."""
    engine = root_methods.owner_of(module)
    return engine if isinstance(engine, ZeroEngine) else None


def engine_for(optimizer: Optimizer, engines: Sequence[ZeroEngine]) -> ZeroEngine | None:
    """Return the engine that holds most parameters of an optimizer, None if none holds any.

    Where other parameters are in it as well, `shard_optimizer` says so on all ranks.
    """
    wanted = {id(param) for group in optimizer.param_groups for param in group["params"]}
    num_held = [sum(id(param) in wanted for param in engine.model.parameters()) for engine in engines]
    return engines[num_held.index(max(num_held))] if any(num_held) else None


def reusable_engine(
    engine: ZeroEngine, config: ZeroConfig, *, dtype: torch.dtype | None, asked: str
) -> ZeroEngine | None:
    """Return the engine a former run left on a module if it does what this one asks for.

    Args:
        engine: What is on the module; it is taken off if it is of no more use.
        config: Resolved.
        dtype: What the framework makes of floating-point parameters; None: it leaves them alone.
        asked: What this run asks for, for a message.

    Returns:
        The engine, or None if a new one must be built.

    Raises:
        ConfigError: The module is sharded at stage 3 with other settings.
    """
    module = engine.model
    if not engine.holds(module.parameters()):
        engine.close()  # the module was built anew
        return None
    if shards_alike(engine.config, config) and not _would_convert(module, dtype):
        engine.wake()
        engine.module_buffers.broadcast_all()
        return engine
    if not engine.config.shards_params:
        engine.close()
        return None
    raise ConfigError(
        what=f"This {type(module).__name__} is sharded at stage 3 by a former run, with other settings "
        f"than this one's ({asked}).",
        why="Another engine needs it whole on every rank first, which stage 3 promises never to do.",
        fix="Run with the settings of the former run, or save a checkpoint and load it into a new module.",
    )


def move_rest(module: nn.Module, device: torch.device) -> None:
    """Move what an engine does not hold: modules without parameters, such as metrics."""
    for name, child in module.named_modules():
        # Parameters, and what is on meta with a module that owns some, are the engine's to move.
        if next(child.parameters(), None) is None and not any(b.is_meta for b in child.buffers()):
            _move(name, child, device)


def has_16_bit_weights(engine: ZeroEngine) -> bool:
    """Whether the engine keeps masters, which are more precise than its weights."""
    return any(param.is_floating_point() and param.element_size() < 4 for param in engine.model.parameters())


def leave_out_frozen(optimizer: Optimizer, engine: ZeroEngine) -> None:
    """Take frozen parameters of an engine's model out of an optimizer that is not sharded yet.

    Under DDP they may be in it, since they get no gradient: `AdamW(model.parameters())` over a model with
    adapters. To train one later, it is added then (`add_param_group`).
    """
    own = {id(param) for param in engine.model.parameters()}
    num_left_out = 0
    for group in optimizer.param_groups:
        kept = [param for param in group["params"] if param.requires_grad or id(param) not in own]
        num_left_out += len(group["params"]) - len(kept)
        group["params"] = kept
    if num_left_out:
        log_once(f"{num_left_out} frozen parameters were in the optimizer; they are left out of it.")


def _would_convert(module: nn.Module, dtype: torch.dtype | None) -> bool:
    """Whether a framework would change the dtype of a parameter, which must not be sharded then."""
    return dtype is not None and any(p.is_floating_point() and p.dtype != dtype for p in module.parameters())


def _move(name: str, module: nn.Module, device: torch.device) -> None:
    try:
        module.to(device)
    except NotImplementedError as error:  # a metric made on meta: its state is no buffer
        raise ConfigError(
            what=f"{name!r} ({type(module).__name__}) keeps a tensor on the meta device that is neither "
            "parameter nor buffer.",
            why="A meta tensor has no values, and nobody would fill this one.",
            fix="Make it outside of init_module(empty_init=True) or `with torch.device('meta')`.",
        ) from error
