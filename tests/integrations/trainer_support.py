"""What the tests of transformers' Trainer share: tiny random models, data, a run, and what is left of it.

`trainer_of(None, ...)` is transformers' own Trainer, whose Accelerator wraps in DDP; any stage is a Trainer
with `ZeroTrainerMixin`. Buckets are small and nothing is persistent, so that at stage 3 every block is really
sharded, which `assert_sharded` checks. Some labels are ignored, so that every batch has another number of
tokens that count.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.harness import rank, world_size
from tests.integrations import tiny_models
from tests.integrations.accelerate_support import exact_norm, reset
from tests.integrations.tiny_models import VOCAB
from zero_strategy.transformers import ZeroPlugin, ZeroTrainerMixin

SMALL_BUCKETS = {"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 0}
STAGES = (1, 2, 3)
Sample = dict[str, Tensor]


class ZeroTrainer(ZeroTrainerMixin, Trainer):  # type: ignore[misc]
    pass


def llama(seed: int = 7, **keywords: Any) -> nn.Module:
    torch.manual_seed(seed)
    return tiny_models.llama(**keywords)


def samples(number: int = 24, length: int = 9, seed: int = 5) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(number):
        tokens = torch.randint(3, VOCAB, (length,), generator=generator)
        ignored = torch.rand(length, generator=generator) < 0.4
        found.append({"input_ids": tokens, "labels": tokens.masked_fill(ignored, -100)})
    return found


def arguments_of(folder: Path, **keywords: Any) -> TrainingArguments:
    reset()
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 0.01,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "max_grad_norm": 1e6,
    }
    return TrainingArguments(**{**defaults, **keywords})


class ExactNorms(TrainerCallback):  # type: ignore[misc]
    """Norms of DDP's gradients as the engine takes them: in fp64, rounded once."""

    def __init__(self) -> None:
        self.norms: list[Tensor] = []

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self.norms.append(exact_norm(model))


def trainer_of(
    stage: int | None,
    arguments: TrainingArguments,
    model: nn.Module | None = None,
    config: dict[str, Any] | None = None,
    **keywords: Any,
) -> Any:
    """Return a Trainer: transformers' own for None, else ours at a stage."""
    keywords.setdefault("train_dataset", samples())
    model = llama() if model is None and "model_init" not in keywords else model
    if stage is None:
        return Trainer(model, arguments, **keywords)
    plugin = ZeroPlugin(stage=stage, **{**SMALL_BUCKETS, **(config or {})})
    return ZeroTrainer(model, arguments, zero_plugin=plugin, **keywords)


class Run(NamedTuple):
    """What a run has logged, and what of it is left on rank 0."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def run(trainer: Any, resume: str | None = None) -> Run:
    """Train; norms are those of DDP's gradients in fp64, rounded once, as the engine's are."""
    exact = ExactNorms()
    is_ours = isinstance(trainer, ZeroTrainerMixin)
    if not is_ours:
        trainer.add_callback(exact)
    trainer.train(resume_from_checkpoint=resume)
    return left_of(trainer, exact)


def left_of(trainer: Any, exact: ExactNorms) -> Run:
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    norms = [log["grad_norm"] for log in logs]
    number = len(exact.norms)  # of this run; a checkpoint brings the logs of the run before
    if number:
        torch.testing.assert_close(torch.tensor(norms[-number:]), torch.stack(exact.norms), rtol=1e-6, atol=0)
        norms[-number:] = [norm.item() for norm in exact.norms]
    return Run([log["loss"] for log in logs], norms, whole(trainer))


def whole(trainer: Any) -> dict[str, Tensor]:
    """Return whole weights on rank 0, {} elsewhere."""
    state = trainer.accelerator.get_state_dict(trainer.model)
    return {name: value.clone() for name, value in state.items()} if rank() == 0 else {}


def assert_sharded(trainer: Any, stage: int, *, num_moments: int = 2) -> None:
    """The engine is in use: its stage, a share of the states, bytes that were sent."""
    engine = trainer.accelerator.engine_of(trainer.model)
    assert engine.config.stage == stage
    trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    states, comm = engine.ledger.memory["optimizer"], engine.ledger.comm
    assert all(param.grad is None for param in trainer.model.parameters())
    if world_size() > 1:
        most = 1.2 * num_moments * trainable * 4 / world_size()
        assert states <= most and bool(states) == bool(num_moments), f"{states} bytes of states on this rank"
        assert comm["reduce_scatter"]["bytes_sent"] > 0 and comm["all_gather"]["bytes_sent"] > 0


def assert_same(found: Run, expected: Run, tolerance: float = 0.0) -> None:
    """Losses, norms and weights are equal, to a relative tolerance."""
    assert len(found.losses) == len(expected.losses) and found.weights.keys() == expected.weights.keys()
    for name in ("losses", "norms"):
        ours, theirs = (torch.tensor(getattr(one, name)) for one in (found, expected))
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0.0, msg=lambda m, n=name: f"{n}: {m}")
    for name, weight in expected.weights.items():
        torch.testing.assert_close(
            found.weights[name], weight, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
