"""What stands in for functions of TRL. Each is called with the function it stands in for, then its arguments.

They must not know buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from zero_strategy.accelerate.accelerator import ZeroAccelerator
from zero_strategy.accelerate.gradients import engine_of, gathered_parameters
from zero_strategy.front_ends.mixing import mix_into

Stock = Callable[..., Any]  # what a body stands in for


@contextmanager
def unwrap_model_for_generation(
    stock: Stock, model: Any, accelerator: Any, gather_deepspeed3_params: bool = True, **kwargs: Any
) -> Iterator[Any]:
    """Make a model whole for a whole generation, if that is asked for, rather than block by block.

    Args:
        stock: TRL's own.
        model: To generate with.
        accelerator: Of the trainer.
        gather_deepspeed3_params: The argument `ds3_gather_for_generation` of a trainer.
        **kwargs: As for TRL's own.
    """
    engine = engine_of(model)
    with ExitStack() as stack:
        if engine is not None and gather_deepspeed3_params and engine.config.shards_params:
            stack.enter_context(engine.unsharded_params())
        yield stack.enter_context(stock(model, accelerator, gather_deepspeed3_params, **kwargs))


@contextmanager
def gather_params(stock: Stock, backend: Any, params: Any) -> Iterator[None]:
    """Make parameters whole that an engine has sharded.

    Args:
        stock: TRL's own.
        backend: TRL's `DistributedBackend`.
        params: The parameters.
    """
    from zero_strategy.accelerate.rebinding import living_engines

    wanted = list(params)
    with gathered_parameters(living_engines(), wanted, None, True), stock(backend, wanted):
        yield


def sync_target_model(stock: Stock, model: Any, target_model: Any, alpha: float) -> None:
    """Mix a model into its reference, shard by shard where both are sharded. Collective then.

    Args:
        stock: TRL's own.
        model: What is trained.
        target_model: The reference.
        alpha: The share of the model.
    """
    source, target = engine_of(model), engine_of(target_model)
    if source is None or target is None:
        stock(model, target_model, alpha)
    else:
        mix_into(target, source, alpha)


def precompute_ref_logps(stock: Stock, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute reference log-probabilities with a model that is sharded, if it is going to be. Collective.

    Args:
        stock: TRL's own.
        trainer: A DPOTrainer or KTOTrainer.
        *args: As for TRL's own.
        **kwargs: As for TRL's own.
    """
    accelerator = trainer.accelerator
    # Before `train` prepares it. Below stage 3 it is whole where the Trainer has put it.
    is_ours = isinstance(accelerator, ZeroAccelerator) and accelerator.zero_plugin.config.shards_params
    if is_ours and trainer.ref_model is None and engine_of(trainer.model) is None:
        accelerator.prepare_model(trainer.model, evaluation_mode=True)
    return stock(*args, **kwargs)


OF_TRAINERS = ("DPOTrainer._precompute_ref_logps", "KTOTrainer._precompute_ref_logps")  # methods
BODIES: dict[str, Callable[..., Any]] = {
    "_unwrap_model_for_generation": unwrap_model_for_generation,
    "DistributedBackend.gather_params": gather_params,
    "SyncRefModelCallback.sync_target_model": sync_target_model,
    "DPOTrainer._precompute_ref_logps": precompute_ref_logps,
    "KTOTrainer._precompute_ref_logps": precompute_ref_logps,
}
