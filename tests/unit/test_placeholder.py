"""A freed parameter answers questions about its kind, refuses its values by name, and comes back unchanged.

Oracle: the same parameter while it is whole. Tolerance: none.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero_strategy.bucket import ParamState
from zero_strategy.errors import ShardingError


class SpecialParameter(nn.Parameter):
    """A parameter class of somebody else's."""


class Freed:
    """A linear layer, freed; `whole` is its twin."""

    def __init__(self, kind: type[nn.Parameter] = nn.Parameter) -> None:
        self.module = nn.Linear(4, 3)
        self.module.weight = kind(self.module.weight.detach())
        self.whole = copy.deepcopy(self.module)
        params = list(self.module.parameters())
        names = {id(self.module.weight): "block.weight", id(self.module.bias): "block.bias"}
        self.state = ParamState(params, [param.data for param in params], names)
        self.state.free()

    @property
    def weight(self) -> nn.Parameter:
        return self.module.weight


@pytest.fixture
def freed() -> Iterator[Freed]:
    yield Freed()


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda p: p.shape,
    "size": lambda p: p.size(0),
    "dim": lambda p: p.dim(),
    "ndim": lambda p: p.ndim,
    "numel": lambda p: p.numel(),
    "len": lambda p: len(p),
    "dtype": lambda p: p.dtype,
    "device": lambda p: p.device,
    "layout": lambda p: p.layout,
    "nbytes": lambda p: p.nbytes,
    "element_size": lambda p: p.element_size(),
    "requires_grad": lambda p: p.requires_grad,
    "is_leaf": lambda p: p.is_leaf,
    "grad": lambda p: p.grad,
    "grad_fn": lambda p: p.grad_fn,
    "is_floating_point": lambda p: p.is_floating_point(),
    "torch.is_floating_point": lambda p: torch.is_floating_point(p),
    "torch.numel": lambda p: torch.numel(p),
    "is_cuda": lambda p: p.is_cuda,
    "is_meta": lambda p: p.is_meta,
    "type": lambda p: p.type(),
    "data.shape": lambda p: p.data.shape,
    "data.dtype": lambda p: p.data.dtype,
    "isinstance": lambda p: isinstance(p, nn.Parameter),
    "zeros_like": lambda p: torch.zeros_like(p),
    "ones_like": lambda p: torch.ones_like(p, dtype=torch.float64),
    "full_like": lambda p: torch.full_like(p, 3.0, memory_format=torch.preserve_format),
    "new_zeros": lambda p: p.new_zeros(5),
    "data.zeros_like": lambda p: torch.zeros_like(p.data),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_as_by_the_whole_parameter(question: str, freed: Freed) -> None:
    ask = QUESTIONS[question]
    answer, expected = ask(freed.weight), ask(freed.whole.weight)
    if isinstance(expected, Tensor):
        assert type(answer) is Tensor
        assert answer.is_contiguous()
        assert answer.dtype == expected.dtype
        torch.testing.assert_close(answer, expected, rtol=0, atol=0)
    else:
        assert answer == expected


ACTIONS: dict[str, Callable[[Any, nn.Module], Any]] = {
    "add_": lambda p, m: p.add_(1),
    "zero_": lambda p, m: p.zero_(),
    "data.zero_": lambda p, m: p.data.zero_(),
    "data.copy_": lambda p, m: p.data.copy_(torch.ones(3, 4)),
    "data[0] fill_": lambda p, m: p.data[0].fill_(1),
    "copy_ from": lambda p, m: torch.ones(3, 4).copy_(p),
    "setitem": lambda p, m: p.__setitem__(0, 1.0),
    "getitem": lambda p, m: p[0],
    "iteration": lambda p, m: list(p),
    "sum": lambda p, m: p.sum(),
    "item": lambda p, m: p.item(),
    "tolist": lambda p, m: p.tolist(),
    "numpy": lambda p, m: p.detach().numpy(),
    "numpy directly": lambda p, m: p.numpy(),
    "detach": lambda p, m: p.detach(),
    "clone": lambda p, m: p.clone(),
    "to": lambda p, m: p.to(torch.float64),
    "cpu": lambda p, m: p.cpu(),
    "view": lambda p, m: p.view(-1),
    "transpose": lambda p, m: p.T,
    "addition": lambda p, m: torch.ones(3, 4) + p,
    "matmul": lambda p, m: torch.ones(2, 3) @ p,
    "cat": lambda p, m: torch.cat([torch.ones(3, 4), p]),
    "equal": lambda p, m: torch.equal(p, torch.ones_like(p)),
    "==": lambda p, m: p == p,
    "bool": lambda p, m: bool(p),
    "forward": lambda p, m: m(torch.ones(2, 4)),
    "init": lambda p, m: nn.init.normal_(p),
    "state_dict": lambda p, m: m.state_dict(),
    "deepcopy": lambda p, m: copy.deepcopy(m),
    "deepcopy data": lambda p, m: copy.deepcopy(p.data),
    "pickle": lambda p, m: pickle.dumps(p),
    "Module.to": lambda p, m: m.to(torch.bfloat16),
    "vector": lambda p, m: nn.utils.parameters_to_vector([p]),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_reading_or_writing_values_is_refused_and_changes_nothing(action: str, freed: Freed) -> None:
    with torch.no_grad(), pytest.raises(ShardingError) as info:
        ACTIONS[action](freed.weight, freed.module)
    assert "sharded at this moment" in info.value.what
    assert "stage 3" in info.value.why
    assert "engine.unsharded_params" in info.value.fix
    freed.state.show()
    assert torch.equal(freed.module.weight, freed.whole.weight)
    assert type(freed.module.weight) is nn.Parameter


def test_a_backward_that_names_its_inputs_is_told_what_to_write(freed: Freed) -> None:
    loss = torch.ones((), requires_grad=True) * 2
    with pytest.raises(ShardingError, match=r"backward\(inputs=...\) names parameter 'block.weight'") as info:
        loss.backward(inputs=[freed.weight])
    assert "requires_grad_(False)" in info.value.fix


def test_the_message_names_the_parameter_and_the_action(freed: Freed) -> None:
    with pytest.raises(ShardingError, match=r"sum was called on parameter 'block\.weight'"):
        freed.weight.sum()
    with pytest.raises(ShardingError, match=r"linear was called on parameter 'block\.weight'"):
        freed.module(torch.ones(1, 4))
    with pytest.raises(ShardingError, match=r"add was called on parameter 'block\.bias'"):
        torch.ones(3) + freed.module.bias


def test_load_state_dict_says_what_to_call_instead(freed: Freed) -> None:
    with pytest.raises(RuntimeError, match="load_full_state_dict"):
        freed.module.load_state_dict(freed.whole.state_dict())
    freed.state.show()
    assert torch.equal(freed.module.weight, freed.whole.weight)


def test_printing_a_freed_module_and_its_parameters_works(freed: Freed) -> None:
    assert "<parameter 'block.weight': sharded, shape (3, 4), torch.float32>" in repr(freed.weight)
    assert "Linear" in repr(freed.module)
    assert "sharded" in f"{freed.weight}"


def test_identity_hashing_and_attributes_survive(freed: Freed) -> None:
    table = {freed.weight: "x"}
    freed.weight.tag = "mine"  # type: ignore[attr-defined]
    freed.state.show()
    assert table[freed.module.weight] == "x"
    assert freed.module.weight.tag == "mine"  # type: ignore[attr-defined]


def test_requires_grad_can_be_switched_while_freed(freed: Freed) -> None:
    assert freed.weight.requires_grad_(False) is freed.weight
    freed.weight.requires_grad = True
    assert freed.weight.requires_grad
    freed.module.requires_grad_(False)
    freed.state.show()
    assert not freed.module.weight.requires_grad


def test_gradients_can_be_set_and_cleared_while_freed(freed: Freed) -> None:
    freed.weight.grad = torch.ones(3, 4)
    assert torch.equal(freed.weight.grad, torch.ones(3, 4))
    freed.module.zero_grad()
    assert freed.weight.grad is None


def test_the_users_own_parameter_class_is_kept(freed: Freed) -> None:
    special = Freed(SpecialParameter)
    assert isinstance(special.weight, SpecialParameter)
    assert isinstance(special.module.bias, nn.Parameter)
    assert not isinstance(special.module.bias, SpecialParameter)
    with pytest.raises(ShardingError, match=r"block\.weight"):
        special.weight.sum()
    special.state.show()
    assert type(special.module.weight) is SpecialParameter


def test_a_freed_parameter_costs_one_element_of_memory(freed: Freed) -> None:
    assert freed.weight.untyped_storage().nbytes() == 4


def test_optimizers_can_be_built_over_freed_parameters(freed: Freed) -> None:
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "ASGD"):
        optimizer = getattr(torch.optim, name)(freed.module.parameters(), lr=0.1)
        assert optimizer.param_groups[0]["params"][0] is freed.weight


def test_a_plain_optimizer_step_on_freed_parameters_is_refused(freed: Freed) -> None:
    optimizer = torch.optim.SGD(freed.module.parameters(), lr=0.1)
    freed.weight.grad = torch.ones(3, 4)
    with pytest.raises(ShardingError):
        optimizer.step()
