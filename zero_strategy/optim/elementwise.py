"""Tells whether an optimizer may run on slices of parameters.

Right on slices is only an update of each element from its own gradient and state (Fact 1 of the ZeRO
derivation: the update is separable). torch's element-wise classes are known by name, the well-known others
are refused by name with their reason, and any other class is tried: on a small tensor, whole and in slices.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_strategy.errors import ConfigError

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)

_REFUSED = {
    "Adafactor": "it keeps row and column means of a whole matrix",
    "LBFGS": "its line search needs dot products over all parameters and several backwards per step",
    "LAMB": "it scales each tensor's update by the norm of the whole tensor",
    "LARS": "it scales each tensor's update by the norm of the whole tensor",
    "Muon": "it orthogonalises the update of a whole matrix",
    "Shampoo": "it keeps a preconditioner per dimension of a whole tensor",
    "SOAP": "it keeps a preconditioner per dimension of a whole tensor",
    "SparseAdam": "it updates rows of sparse gradients",
    "GaLore": "it projects the gradient of a whole matrix",
    "8bit": "its quantisation blocks would straddle the borders of shards",
    "4bit": "its quantisation blocks would straddle the borders of shards",
}

_TRIAL_LR = 0.1  # large beside the tolerance of the comparison
_TRIAL_SLICE_NUMEL = 96  # of 256: slices of unequal length that cut through rows


def check_elementwise(optimizer: Optimizer) -> ConfigError | None:
    """Return why an optimizer cannot run on slices, or None. Does not change the optimizer."""
    name = type(optimizer).__name__
    if type(optimizer) in _ELEMENTWISE:
        return None
    for refused, reason in _REFUSED.items():
        if _is_word_of(refused, name):
            return _refusal(f"{name} cannot run on shards: {reason}.")
    try:
        is_elementwise = all(_same_on_slices(optimizer, group) for group in _distinct(optimizer))
    except Exception as error:
        return _refusal(
            f"{name} is not known, and a trial step on a small tensor failed: {type(error).__name__}: "
            f"{error}."
        )
    if is_elementwise:
        return None
    return _refusal(
        f"{name} cannot run on shards: on a small tensor it gave other weights whole than in slices."
    )


def counts_steps_per_tensor(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer may be stepped over a part of its tensors at a time.

    torch's own classes keep a step count with each tensor; another class may count its calls in the param
    group.
    """
    return type(optimizer) in _ELEMENTWISE


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        what=what,
        why="A rank updates only its slices of the parameters, so each element's update may depend on "
        "nothing but that element's own gradient and state.",
        fix="Use an element-wise optimizer (AdamW, Adam, SGD, Adagrad, RMSprop, NAdam, RAdam, Lion ...).",
    )


def _is_word_of(word: str, name: str) -> bool:
    """Tell whether a class name has a word in it: `FusedLAMB` and `lamb` have "LAMB", `LambdaSGD` has not."""
    start = name.lower().find(word.lower())
    if start < 0:
        return False
    before, first, after = name[:start][-1:], name[start], name[start + len(word) :][:1]
    begins = not before.isalpha() or not first.islower()
    return begins and not after.islower()


def _distinct(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of every param group, each once: a class may treat groups in different ways."""
    distinct: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if isinstance(settings.get("lr"), float | int | Tensor):
            # A warm-up starts at 0, and no update at all would look the same whole and in slices.
            settings["lr"] = _TRIAL_LR
        if not any(repr(settings) == repr(other) for other in distinct):
            distinct.append(settings)
    return distinct


def _same_on_slices(optimizer: Optimizer, settings: dict[str, Any]) -> bool:
    """Step a matrix whole, and slices of it each on its own as ranks would, and compare."""
    device = next((param.device for group in optimizer.param_groups for param in group["params"]), None)
    generator = torch.Generator().manual_seed(0)
    weights, *grads = (torch.randn(16, 16, generator=generator, device="cpu").to(device) for _ in range(4))
    whole = _stepped(optimizer, settings, weights, grads)
    flat_grads = [grad.reshape(-1).split(_TRIAL_SLICE_NUMEL) for grad in grads]
    pieces = [
        _stepped(optimizer, settings, piece, [grad[number] for grad in flat_grads])
        for number, piece in enumerate(weights.reshape(-1).split(_TRIAL_SLICE_NUMEL))
    ]
    return torch.allclose(whole.reshape(-1), torch.cat(pieces), rtol=1e-6, atol=1e-8)


def _stepped(optimizer: Optimizer, settings: dict[str, Any], start: Tensor, grads: list[Tensor]) -> Tensor:
    """Return what a copy of the optimizer makes of a tensor of our own, one step for each gradient."""
    trial = copy.copy(optimizer)
    # torch's own way of copying leaves out hooks, which is right here, and what a subclass has set on itself.
    for name, value in vars(optimizer).items():
        if name not in vars(trial):
            setattr(trial, name, copy.copy(value))
    weight = start.clone()
    trial.param_groups = [{**copy.deepcopy(settings), "params": [weight]}]
    trial.state = defaultdict(dict)
    step = type(optimizer).step
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for grad in grads:
            weight.grad = grad.clone()
            step(trial)
    return weight
