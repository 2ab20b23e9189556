"""Which optimizers may run on slices: torch's element-wise ones, and unknown ones that pass a trial.

Oracle: the definition. An optimizer is element-wise if each element's update depends on that element's own
gradient and state; the classes below are written to be so or not. Tolerance: none, the answer is yes or no.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero_strategy.errors import ConfigError
from zero_strategy.optim.elementwise import check_elementwise


class Lion(torch.optim.Optimizer):
    """An element-wise optimizer that nobody knows by name; keeps a setting on itself, as many classes do."""

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr})
        self.beta = beta

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    average = self.state[param].setdefault("average", torch.zeros_like(param))
                    average.mul_(self.beta).add_(param.grad, alpha=1 - self.beta)
                    param.sub_(average.sign(), alpha=group["lr"])


class NormScaled(torch.optim.Optimizer):
    """Divides the gradient by its norm, over one tensor or over all of them."""

    def __init__(self, params: Any, lr: float = 1e-2, over_all: bool = False) -> None:
        super().__init__(params, {"lr": lr, "over_all": over_all, "scale": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            grads = [param.grad for param in group["params"]]
            total = torch.stack([grad.norm() for grad in grads]).norm()
            for param, grad in zip(group["params"], grads, strict=True):
                norm = total if group["over_all"] else grad.norm()
                param.sub_(grad / norm if group["scale"] else grad, alpha=group["lr"])


class NeedsClosure(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class Renamed(torch.optim.SGD):
    """SGD under names that say something else."""


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 4))


def named(name: str) -> torch.optim.Optimizer:
    return type(name, (Renamed,), {})([weight()], lr=0.1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "name",
    ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD"],
)
def test_elementwise_optimizers_of_torch_are_accepted(name: str) -> None:
    optimizer = getattr(torch.optim, name)([weight()], lr=0.1)
    assert check_elementwise(optimizer) is None


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "SparseAdam", "Muon"])
def test_other_optimizers_of_torch_are_refused_with_their_reason(name: str) -> None:
    error = check_elementwise(getattr(torch.optim, name)([weight()], lr=0.1))
    assert isinstance(error, ConfigError)
    assert error.what.startswith(f"{name} cannot run on shards: it"), error.what
    assert "element" in error.why
    assert "AdamW" in error.fix


@pytest.mark.parametrize(
    "name",
    [
        "LAMB",
        "Lamb",
        "lamb",
        "FusedLAMB",
        "LARS",
        "Shampoo",
        "DistributedShampoo",
        "SOAP",
        "Muon",
        "MuonWithAuxAdam",
        "GaLoreAdamW",
        "AdamW8bit",
        "PagedAdamW8bit",
        "Adam4bit",
        "Adafactor",
        "LBFGSNew",
    ],
)
def test_well_known_names_are_refused_whatever_the_class_does(name: str) -> None:
    assert check_elementwise(named(name)) is not None


@pytest.mark.parametrize("name", ["LambdaSGD", "MyScalarsSGD", "SGDCommuning", "Collars"])
def test_a_refused_name_inside_another_word_does_not_count(name: str) -> None:
    assert check_elementwise(named(name)) is None


def test_an_unknown_elementwise_class_is_accepted() -> None:
    assert check_elementwise(Lion([weight()])) is None


def test_the_default_device_does_not_matter() -> None:
    known, unknown = Lion([weight()]), NormScaled([weight()])
    with torch.device("meta"):
        assert check_elementwise(known) is None
        assert check_elementwise(unknown) is not None


@pytest.mark.parametrize("over_all", [False, True], ids=["norm of a tensor", "norm of all tensors"])
@pytest.mark.parametrize("lr", [0.1, 0.0, 1e-12, torch.tensor(0.0)], ids=str)
def test_an_unknown_class_that_uses_a_norm_is_refused_at_any_learning_rate(
    over_all: bool, lr: float | Tensor
) -> None:
    error = check_elementwise(NormScaled([weight()], lr=lr, over_all=over_all))  # type: ignore[arg-type]
    assert error is not None
    assert "whole than in slices" in error.what


def test_every_param_group_is_tried() -> None:
    groups = [{"params": [weight()], "scale": False}, {"params": [weight()], "scale": True}]
    assert check_elementwise(NormScaled(groups[:1])) is None
    assert check_elementwise(NormScaled(groups)) is not None


def test_a_class_that_cannot_be_tried_is_refused_with_the_error_of_the_trial() -> None:
    error = check_elementwise(NeedsClosure([weight()]))
    assert error is not None
    assert "trial step" in error.what
    assert "closure" in error.what or "NoneType" in error.what


def test_the_trial_leaves_the_optimizer_and_the_random_numbers_alone() -> None:
    param = weight()
    optimizer = Lion([param])
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: float(epoch))
    before, rng = param.detach().clone(), torch.get_rng_state()
    groups = [dict(group) for group in optimizer.param_groups]
    assert check_elementwise(optimizer) is None
    assert torch.equal(param, before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert optimizer.param_groups == groups
    assert optimizer.param_groups[0]["params"][0] is param
    assert not optimizer.state
    assert not calls
    assert scheduler.optimizer is optimizer
