"""Which parameters share a bucket, and what the stage means for each.

Of all files that read the number `stage` the only one that decides by it: here it turns into three booleans
per bucket. Called on the whole model when the engine is built, and on a frozen bucket when some of it begins
to be trained; it moves no data.

[Note: Units]
At stage 3 a *unit* is what is unsharded together: the outermost repeated block of the model (siblings of one
class, or the members of a `ModuleList`), which is a decoder layer in a transformer and a layer in an MLP,
without the user naming it. What is in no unit belongs to the root and stays whole from the root's forward to
the end of its backward. A parameter that two units share belongs to the root. A module that routes tokens
among experts is one unit with all of them: which experts run depends on a rank's data, and ranks must gather
the same things in the same order.

Adapters (PEFT's) are put around a layer and read its weights, and those of their own parts, without calling
them: no unit begins inside of one. Their bare parameters, which no module of their own is called for, belong
to the root: AdaLoRA reads those of all layers after the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise

import torch
from torch import Tensor, nn

from zero_strategy.compat import storage_id
from zero_strategy.config import ZeroConfig
from zero_strategy.errors import ConfigError

# What PEFT calls the module that a layer of its own is put around.
ADAPTED = ("base_layer", "original_module")


@dataclass(frozen=True)
class BucketPolicy:
    """What is sharded of a bucket; the stages are the cumulative choices (ZeRO, arXiv:1910.02054, section 5).

    Attributes:
        shard_optim: Master weights and optimizer state (P_os): stages 1-3.
        shard_grads: Gradients, reduced and freed as they come (P_g): stages 2-3.
        shard_params: The parameters themselves (P_p): stage 3.
    """

    shard_optim: bool
    shard_grads: bool
    shard_params: bool


_POLICY_OF_STAGE = {
    0: BucketPolicy(False, False, False),
    1: BucketPolicy(True, False, False),
    2: BucketPolicy(True, True, False),
    3: BucketPolicy(True, True, True),
}


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """The parameters of one bucket, before anything is moved.

    Attributes:
        name: For messages and profiles, such as `model.layers.3.float32#0`.
        unit: Fully qualified name of the module that is whole or sharded as one (stage 3); '' for the root.
        fqns: First name of each parameter.
        params: The parameters themselves, in the order of `fqns`.
        policy: What is sharded.
        trainable: Whether there is a place for their gradients; never mixed in a bucket.
        dtype: Their dtype once sharded; never mixed in a bucket.
        modules: The modules whose forward needs the bucket whole; the first is the unit itself (stage 3).
        is_root: Whether the bucket stays whole until the backward has ended.
        routes: Whether which of its parameters are used depends on a rank's own data (experts).
    """

    name: str
    unit: str
    fqns: tuple[str, ...]
    params: tuple[nn.Parameter, ...]
    policy: BucketPolicy
    trainable: bool
    dtype: torch.dtype
    modules: tuple[nn.Module, ...]
    is_root: bool
    routes: bool


@dataclass(frozen=True)
class _Kind:
    """Parameters that may share a bucket agree in all of these."""

    unit: nn.Module
    trainable: bool
    dtype: torch.dtype
    policy: BucketPolicy


def plan_buckets(model: nn.Module, config: ZeroConfig) -> list[BucketPlan]:
    """Divide a model's parameters into buckets.

    Args:
        model: Any module, whole; tied parameters count once.
        config: Resolved config; `reduce_bucket_size` bounds a bucket (a larger parameter has one of its own).

    Returns:
        The buckets in the order of their first parameter's registration. Every parameter is in exactly one.
    """
    whole_policy = _POLICY_OF_STAGE[min(config.stage, 2)]
    policy = _POLICY_OF_STAGE[config.stage]
    units = find_units(model, config) if policy.shard_params else {}
    persistent = _persistent(model, config) if policy.shard_params else set()
    bare = _bare_of_adapters(model) if policy.shard_params else set()
    owners = _owners(model)
    groups: dict[_Kind, list[tuple[str, nn.Parameter]]] = {}
    for fqn, param in model.named_parameters():
        kept_whole = not policy.shard_params or param in persistent
        homes = {units.get(owner, model) for owner in owners[param]}
        kind = _Kind(
            unit=model if kept_whole or len(homes) > 1 or param in bare else homes.pop(),
            trainable=param.requires_grad,
            dtype=_dtype_once_sharded(param.dtype, config),
            policy=whole_policy if kept_whole else policy,
        )
        groups.setdefault(kind, []).append((fqn, param))

    plans = _plans_of(groups, model, config, owners=owners, taken=set())
    position = {fqn: index for index, (fqn, _) in enumerate(model.named_parameters())}
    return sorted(plans, key=lambda plan: position[plan.fqns[0]])


def replan(
    plan: BucketPlan, *, model: nn.Module, config: ZeroConfig, begun: set[nn.Parameter], taken: set[str]
) -> list[BucketPlan]:
    """Divide a frozen bucket anew because some of its parameters begin to be trained.

    Args:
        plan: What the bucket is now.
        model: The whole model.
        config: As for `plan_buckets`.
        begun: Parameters of the bucket that are trained from now on.
        taken: Names of the other buckets.

    Returns:
        Buckets with the same parameters. Unit and policy stay as they are: both were decided once.
    """
    unit = plan.modules[0] if plan.policy.shard_params else model
    groups: dict[_Kind, list[tuple[str, nn.Parameter]]] = {}
    for fqn, param in zip(plan.fqns, plan.params, strict=True):
        kind = _Kind(unit, param in begun, plan.dtype, plan.policy)
        groups.setdefault(kind, []).append((fqn, param))
    return _plans_of(groups, model, config, owners=_owners(model), taken=taken)


def find_units(model: nn.Module, config: ZeroConfig) -> dict[nn.Module, nn.Module]:
    """Find the outermost repeated blocks. See [Note: Units].

    Args:
        model: The root module, not sharded yet.
        config: For the modules that the user declared one unit.

    Returns:
        For every module inside a unit, the unit; modules of the root are absent.
    """
    units: dict[nn.Module, nn.Module] = {}
    if not _is_leaf(model, "", config):
        for unit in _descend(model, config):
            for module in unit.modules():
                units.setdefault(module, unit)
    return units


def check_model(model: nn.Module) -> ConfigError | None:
    """Return why a model cannot be sharded, or None."""
    lazy = [fqn for fqn, param in model.named_parameters() if isinstance(param, nn.UninitializedParameter)]
    if lazy:
        return ConfigError(
            what=f"Parameter {lazy[0]!r} has no shape yet: it is made by the first forward of a lazy module.",
            why="Nothing can be laid out without shapes.",
            fix="Run one forward of the model before sharding it.",
        )
    devices = {param.device for param in model.parameters() if not param.is_meta}
    if len(devices) > 1:
        return ConfigError(
            what=f"The parameters are on {len(devices)} devices: {sorted(map(str, devices))}.",
            why="The flat buffer of a bucket lives on one device.",
            fix="Move the model to one device before sharding it; do not load it with device_map.",
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return ConfigError(
                what=f"The embedding {name!r} was built with sparse=True.",
                why="A sparse gradient cannot be reduced into a flat buffer.",
                fix="Build it with sparse=False.",
            )
    return _check_parameters(model)


def describe_model(model: nn.Module) -> list[str]:
    """Return a line for everything that ranks must agree on: parameters and buffers, not their values."""
    params = [
        f"parameter {_describe(fqn, param)}{'' if param.requires_grad else ' frozen'}"
        for fqn, param in model.named_parameters()
    ]
    return params + [f"buffer {_describe(fqn, buffer)}" for fqn, buffer in model.named_buffers()]


def has_masters(dtype: torch.dtype, config: ZeroConfig) -> bool:
    """Tell whether the optimizer updates fp32 copies of parameters of this dtype."""
    is_updated_itself = dtype == torch.bfloat16 and config.bf16.bf16_master_weights_and_grads
    return dtype.itemsize < 4 and not is_updated_itself


def summarize(plans: list[BucketPlan], config: ZeroConfig, world_size: int) -> str:
    """Return one line that says what is stored in what, for the log."""
    numels: Counter[str] = Counter()
    for plan in plans:
        dtype = str(plan.dtype).removeprefix("torch.")
        kind = f"trainable in {dtype}{' with fp32 masters' if has_masters(plan.dtype, config) else ''}"
        numels[kind if plan.trainable else f"frozen in {dtype}"] += sum(
            param.numel() for param in plan.params
        )
    parts = ", ".join(f"{numel:,} {kind}" for kind, numel in numels.items())
    line = f"Sharding over {world_size} ranks, {len(plans)} buckets: parameters {parts or 'none'}."
    whole = [param for plan in plans if not plan.policy.shard_params for param in plan.params]
    if config.shards_params and whole:
        threshold = config.zero_optimization.stage3_param_persistence_threshold
        line += (
            f" Of these {sum(param.numel() for param in whole):,} stay whole: their tensors have fewer "
            f"elements than stage3_param_persistence_threshold = {threshold:,}."
        )
    return line


# -- helpers --


def _describe(fqn: str, tensor: Tensor) -> str:
    return f"{fqn} {tuple(tensor.shape)} {tensor.dtype}{' on meta' if tensor.is_meta else ''}"


def _plans_of(
    groups: dict[_Kind, list[tuple[str, nn.Parameter]]],
    model: nn.Module,
    config: ZeroConfig,
    *,
    owners: dict[nn.Parameter, list[nn.Module]],
    taken: set[str],
) -> list[BucketPlan]:
    """Cut parameters that may share a bucket into buckets with names that are not taken."""
    names = {module: name for name, module in model.named_modules()}
    plans = []
    limit_numel = int(config.zero_optimization.reduce_bucket_size)
    for kind, members in groups.items():
        free = (name for name in _bucket_names(names[kind.unit], kind) if name not in taken)
        for name, chunk in zip(free, _pack(members, limit_numel), strict=False):
            users = _users(model, kind.unit, chunk, owners) if kind.policy.shard_params else ()
            plans.append(
                BucketPlan(
                    name=name,
                    unit=names[kind.unit],
                    fqns=tuple(fqn for fqn, _ in chunk),
                    params=tuple(param for _, param in chunk),
                    policy=kind.policy,
                    trainable=kind.trainable,
                    dtype=kind.dtype,
                    modules=users,
                    is_root=kind.unit is model,
                    routes=_is_leaf(kind.unit, names[kind.unit], config),
                )
            )
    return plans


def _check_parameters(model: nn.Module) -> ConfigError | None:
    spans: list[tuple[int, int, int, str]] = []  # storage, first and last byte in it, name
    for fqn, param in model.named_parameters():
        if param.is_complex():
            return ConfigError(
                what=f"Parameter {fqn!r} is complex ({param.dtype}).",
                why="Gradients are averaged in real arithmetic.",
                fix="Keep its real and imaginary parts as a real parameter (torch.view_as_real).",
            )
        # A parameter that is itself a distributed tensor has no plain storage to flatten.
        if type(param.data) is not Tensor:
            return ConfigError(
                what=f"Parameter {fqn!r} holds a {type(param.data).__name__}, not a plain tensor.",
                why="Its values do not lie in one plain storage that could be flattened and sharded.",
                fix="Shard the model before it is distributed or quantised by another library.",
            )
        start = int(param.storage_offset()) * param.element_size()
        spans.append((storage_id(param), start, start + param.nbytes, fqn))
    spans.sort()
    for (storage, _, end, first), (other, start, _, second) in pairwise(spans):
        if storage == other and start < end:
            return ConfigError(
                what=f"Parameters {first!r} and {second!r} are two Parameters that share one storage.",
                why="Sharding moves each into its own place, and the link between them would be lost without "
                "a word.",
                fix=f"Tie them by assigning the Parameter itself, so that both names are one object: "
                f"`module.weight = other.weight` ({second!r} = {first!r}).",
            )
    return None


def _persistent(model: nn.Module, config: ZeroConfig) -> set[nn.Parameter]:
    """Return the parameters that stay whole for being small, the smallest first as long as there is room."""
    zero = config.zero_optimization
    small = [p for p in model.parameters() if p.numel() < zero.stage3_param_persistence_threshold]
    chosen: set[nn.Parameter] = set()
    numel = 0
    for param in sorted(small, key=lambda param: param.numel()):
        numel += param.numel()
        if numel > zero.stage3_model_persistence_threshold:
            break
        chosen.add(param)
    return chosen


def _bare_of_adapters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that adapters hold in dictionaries, not in modules. See [Note: Units]."""
    adapters = [module for module in model.modules() if _is_adapter(module)]
    held = [
        child for module in adapters for child in module.children() if isinstance(child, nn.ParameterDict)
    ]
    return {param for child in held for param in child.parameters()}


def _is_adapter(module: nn.Module) -> bool:
    return any(name in ADAPTED for name, _ in module.named_children())


def _owners(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """Return, for every parameter, the modules that hold it directly."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for _, param in module.named_parameters(recurse=False):
            owners.setdefault(param, []).append(module)
    return owners


def _descend(module: nn.Module, config: ZeroConfig, prefix: str = "") -> Iterator[nn.Module]:
    children = [
        (name, child) for name, child in module.named_children() if next(child.parameters(), None) is not None
    ]
    classes = Counter(type(child) for _, child in children)
    for name, child in children:
        fqn = f"{prefix}{name}"
        is_member = isinstance(module, nn.ModuleList) or classes[type(child)] > 1
        # These are never called, so nobody would notice their use.
        is_container = isinstance(child, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
        # An encoder and a decoder of one class are no repeated blocks: their layers are.
        is_stack = not isinstance(module, nn.ModuleList) and _has_layers(child)
        if (is_member and not is_container and not is_stack) or _is_leaf(child, fqn, config):
            yield child
        elif not _is_adapter(child):
            yield from _descend(child, config, f"{fqn}.")


def _has_layers(module: nn.Module) -> bool:
    """Tell whether a module is a stack of blocks, rather than a block."""
    return any(_is_stack(inner) for inner in module.modules())


def _is_stack(module: nn.Module) -> bool:
    members = [member for member in module.children() if next(member.parameters(), None) is not None]
    if isinstance(module, nn.Sequential):
        # Of blocks, as in a ResNet; Linear, activation, Linear is one block.
        composed = Counter(type(member) for member in members if next(member.children(), None) is not None)
        return max(composed.values(), default=0) > 1
    return isinstance(module, nn.ModuleList) and len(members) > 1


def _is_leaf(module: nn.Module, fqn: str, config: ZeroConfig) -> bool:
    """Tell whether a module is one unit with all that is below it, because the user or its experts say so."""
    routes = any("expert" in name.lower() for name, _ in module.named_children())
    return routes or (fqn != "" and config.is_leaf(type(module), fqn))


def _dtype_once_sharded(dtype: torch.dtype, config: ZeroConfig) -> torch.dtype:
    if dtype != torch.float32:
        return dtype
    return torch.bfloat16 if config.bf16.enabled else torch.float16 if config.fp16.enabled else dtype


def _users(
    model: nn.Module,
    unit: nn.Module,
    members: list[tuple[str, nn.Parameter]],
    owners: dict[nn.Parameter, list[nn.Module]],
) -> tuple[nn.Module, ...]:
    """Return the modules whose call needs the bucket whole: the unit, and what owns its parameters.

    The owners are there so that any of them can be called on its own (`model.block.attention(x)`). For the
    root, the containers between it and the units count too, so that calling a backbone keeps the root whole
    across its blocks.
    """
    users = dict.fromkeys([unit])
    for _, param in members:
        users.update(dict.fromkeys(owners[param]))
    if unit is model:
        inside = {id(param) for _, param in members}
        for module in model.modules():
            if any(id(param) in inside for param in module.parameters()):
                users[module] = None
    return tuple(users)


def _pack(members: list[tuple[str, nn.Parameter]], limit_numel: int) -> list[list[tuple[str, nn.Parameter]]]:
    chunks: list[list[tuple[str, nn.Parameter]]] = [[]]
    filled_numel = 0
    for fqn, param in members:
        if chunks[-1] and filled_numel + param.numel() > limit_numel:
            chunks.append([])
            filled_numel = 0
        chunks[-1].append((fqn, param))
        filled_numel += param.numel()
    return chunks


def _bucket_names(unit: str, kind: _Kind) -> Iterator[str]:
    marks = "" if kind.trainable else ".frozen"
    for number in count():
        yield f"{unit or 'root'}{marks}.{str(kind.dtype).removeprefix('torch.')}#{number}"
