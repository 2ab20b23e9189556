"""Adapters of a sharded model, whole and small: gathered, saved and loaded without the base.

Which weights belong to an adapter, and under which keys they are stored, PEFT decides: it is asked with the
parameters themselves in the place of their values, and the answer is read by identity. So what it adds to an
adapter (modules to save, trained tokens, embeddings of another size) is in the files as ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from peft import PeftModel, get_peft_model_state_dict, load_peft_weights
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from zero_strategy.checkpoint.full_weights import names_in
from zero_strategy.comm.together import agreed
from zero_strategy.engine import ZeroEngine
from zero_strategy.errors import CheckpointError, ConfigError
from zero_strategy.front_ends.engines import find_engine


def adapter_state_dict(model: PeftModel, adapter_names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Gather the weights of adapters, and of nothing else. Collective.

    Args:
        model: With an engine.
        adapter_names: Which adapters; None for all.

    Returns:
        On rank 0 CPU tensors under the names of `model.state_dict()`, to be passed to
        `model.save_pretrained(folder, state_dict=...)` or `get_peft_model_state_dict`; {} elsewhere.

    Raises:
        ConfigError: The model has no engine, or no such adapter.
    """
    engine, wanted = _engine_of(model), set[str]()
    with whole_for_saving(model):
        for adapter in _known(model, adapter_names):
            wanted.update(*_names_by_key(model, adapter).values())
    return engine.full_state_dict(names=wanted)


@contextmanager
def whole_for_saving(model: nn.Module) -> Iterator[None]:
    """Make whole what PEFT looks at when it saves or loads, beside the state it is given. Collective.

    Those are modules to save, whose `state_dict()` PEFT asks for their keys.

    Args:
        model: Any; where there is no engine, nothing is done.
    """
    engine = find_engine(model)
    wrappers = [module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]
    params = [param for wrapper in wrappers for param in wrapper.modules_to_save.parameters()]
    with engine.unsharded_params(params=params) if engine is not None and params else nullcontext():
        yield


def save_adapters(
    model: PeftModel,
    folder: str | os.PathLike[str],
    adapter_names: Sequence[str] | None = None,
    **kwargs: Any,
) -> None:
    """Write adapters as `model.save_pretrained` does: plain `PeftModel.from_pretrained` reads them.
    Collective.

    Args:
        model: With an engine.
        folder: As for `save_pretrained`; rank 0's counts.
        adapter_names: Which adapters; None for all. "default" lies in the folder itself.
        **kwargs: For `save_pretrained`.

    Raises:
        ConfigError: The model has no engine, or no such adapter.
        CheckpointError: It cannot be written; on all ranks.
    """
    state = adapter_state_dict(model, adapter_names)
    chosen = _known(model, adapter_names)

    def write() -> None:
        model.save_pretrained(os.fspath(folder), selected_adapters=chosen, state_dict=state, **kwargs)

    with whole_for_saving(model):
        _on_rank_0(_engine_of(model), write)


def load_adapter(
    model: PeftModel, folder: str | os.PathLike[str], adapter_name: str = "default", *, strict: bool = True
) -> None:
    """Load the weights of an adapter that the model has already, as a file of PEFT's holds them. Collective.

    PEFT's own `load_adapter` puts new parameters into the model, which an engine would neither train nor
    save.

    Args:
        model: With an engine.
        folder: That `save_pretrained` wrote, of one adapter; rank 0 reads it.
        adapter_name: The adapter in the model.
        strict: Refuse keys that are in the file only, or in the model only.

    Raises:
        ConfigError: The model has no engine, or no such adapter.
        CheckpointError: The file cannot be read, or does not fit; on all ranks.
    """
    engine = _engine_of(model)
    (adapter,) = _known(model, [adapter_name])
    with whole_for_saving(model):
        names = _names_by_key(model, adapter)

    def read() -> dict[str, Tensor]:
        weights: dict[str, Tensor] = load_peft_weights(os.fspath(folder), device="cpu")
        if strict and weights.keys() != names.keys():
            raise _misfit(folder, adapter, weights, names)
        return {name: value for key, value in weights.items() for name in names.get(key, ())}

    state = _on_rank_0(engine, read) or {}
    engine.load_full_state_dict(state, strict=False)


# -- helpers --


def _names_by_key(model: PeftModel, adapter: str) -> dict[str, list[str]]:
    """Return the keys of an adapter in its file, each with the names of its weight in the model."""
    tensors = names_in(model)
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    found = get_peft_model_state_dict(model, state_dict=tensors, adapter_name=adapter)
    return {key: names[id(tensor)] for key, tensor in found.items()}


def _on_rank_0(engine: ZeroEngine, work: Callable[[], Any]) -> Any:
    collectives = engine.collectives
    return agreed(collectives, work if collectives.rank == 0 else lambda: None)


def _known(model: PeftModel, names: Sequence[str] | None) -> list[str]:
    known = list(model.peft_config)
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ConfigError(
            what=f"The model has no adapter {unknown[0]!r}.",
            why=f"It has {', '.join(map(repr, known))}.",
            fix="Add adapters before the model is sharded, and name one of them.",
        )
    return known if names is None else list(names)


def _engine_of(model: nn.Module) -> ZeroEngine:
    engine = find_engine(model)
    if engine is None:
        raise ConfigError(
            what=f"This {type(model).__name__} has no engine.",
            why="The weights of its adapters are whole.",
            fix="Use PEFT's own calls, or pass the PeftModel that was given to ZeroEngine or prepare().",
        )
    return engine


def _misfit(
    folder: str | os.PathLike[str], adapter: str, weights: Mapping[str, Any], names: Mapping[str, Any]
) -> CheckpointError:
    missing, unexpected = sorted(names.keys() - weights.keys()), sorted(weights.keys() - names.keys())
    return CheckpointError(
        what=f"{os.fspath(folder)} does not fit the adapter {adapter!r}: missing {missing[:3]}, unexpected "
        f"{unexpected[:3]} ({len(missing)} and {len(unexpected)} keys).",
        why="With strict=True every key must have its match. Nothing was loaded.",
        fix="Load the adapter that was saved from the same config, or pass strict=False.",
    )
