"""Tells whether an optimizer may run on slices of parameters.

Right on slices is only an update of each element from its own gradient and state (Fact 1 of the ZeRO derivation:
the update is separable). torch's element-wise classes are known by name, the well-known others are refused by name
with their reason, and any other class is tried: on a small tensor, whole and in slices.
"""

from __future__ import annotations

import copy
from collections import defaultdict

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


def check_elementwise(optimizer: Optimizer) -> ConfigError | None:
    """Return why an optimizer cannot run on slices, or None. Does not change the optimizer."""
    name = type(optimizer).__name__
    if type(optimizer) in _ELEMENTWISE:
        return None
    for refused, reason in _REFUSED.items():
        if refused.lower() in name.lower():
            return _refusal(f"{name} cannot run on shards: {reason}.")
    try:
        is_elementwise = _same_on_slices(optimizer)
    except Exception as error:
        return _refusal(f"{name} is not known, and a trial step on a small tensor failed: {type(error).__name__}: {error}.")
    if is_elementwise:
        return None
    return _refusal(f"{name} cannot run on shards: on a small tensor it gave other weights whole than in slices.")


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        what=what,
        why="A rank updates only its slices of the parameters, so each element's update may depend on nothing but that "
        "element's own gradient and state.",
        fix="Use an element-wise optimizer (AdamW, Adam, SGD, Adagrad, RMSprop, NAdam, RAdam, Lion ...).",
    )


def _same_on_slices(optimizer: Optimizer) -> bool:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(16, 16, generator=generator)
    grads = [torch.randn(16, 16, generator=generator) for _ in range(3)]
    whole = [weights.clone()]
    _try(optimizer, whole, [[grad] for grad in grads])
    pieces = list(weights.clone().reshape(-1).split(96))
    _try(optimizer, pieces, [list(grad.reshape(-1).split(96)) for grad in grads])
    return torch.allclose(whole[0].reshape(-1), torch.cat(pieces), rtol=1e-6, atol=1e-8)


def _try(optimizer: Optimizer, weights: list[Tensor], grads_of_steps: list[list[Tensor]]) -> None:
    """Run a copy of the optimizer, with its first param group's settings, on tensors of our own."""
    trial = copy.copy(optimizer)
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    trial.param_groups = [{**copy.deepcopy(settings), "params": weights}]
    trial.state = defaultdict(dict)
    step = type(optimizer).step
    for grads in grads_of_steps:
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad.clone()
        step(trial)
