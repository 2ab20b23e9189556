"""Pretrained models without a copy on every rank: `sharded_from_pretrained`.

transformers' own `from_pretrained` runs, over tensors that have no values and remember where they come from
(recorded.py). So names, renamings, conversions, ties, dtypes, missing weights and what is reported are its
own. The model it returns is on meta; when it is sharded every rank reads its part of the files, straight into
its shards ([Note: Weights from files] in materialize.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import modeling_utils

from zero_strategy import first_weights
from zero_strategy.errors import ConfigError
from zero_strategy.log import log_event
from zero_strategy.transformers.recorded import RecordedTensor, Stored, StoredFile, recorded
from zero_strategy.transformers.stored_params import StoredParams, values_of

# Keywords of from_pretrained that decide where weights lie, or that change them as they are read.
_REFUSED = {
    "device_map": "The engine decides which rank holds what.",
    "quantization_config": "Quantised weights are not sharded yet.",
    "gguf_file": "Only safetensors files can be read by ranges.",
    "distributed_config": "transformers would shard the model itself.",
    "tp_plan": "transformers would shard the model itself.",
    "state_dict": "Its tensors are in memory already; load_full_state_dict() of the engine takes them.",
}


def sharded_from_pretrained(model_class: Any, name_or_path: Any, **kwargs: Any) -> Any:
    """Load a pretrained model so that no rank ever holds all of it.

    Example:
        model = sharded_from_pretrained(AutoModelForCausalLM, "folder", dtype=torch.bfloat16)
        engine = ZeroEngine(model, {"zero_optimization": {"stage": 3}})  # or prepare(), or a Trainer

    The surprise: the model has no values until it is sharded. Adapters may be put around it before; what
    needs values (a forward, `resize_token_embeddings`, PiSSA) may not.

    Args:
        model_class: A model class of transformers, or an Auto class.
        name_or_path: As for `from_pretrained`; the weights must be in safetensors files.
        **kwargs: As for `from_pretrained`.

    Returns:
        What `from_pretrained` returns, on meta: the model, with `output_loading_info=True` and the info. What
        is missing in the files, and buffers, has values.

    Raises:
        ConfigError: A keyword contradicts sharding.
        OSError: There is no such model, or it has no safetensors files.
    """
    for name, why in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ConfigError(
                what=f"sharded_from_pretrained was given {name}.",
                why=why,
                fix=f"Leave {name} out, or use plain from_pretrained.",
            )
    kwargs |= {"use_safetensors": True, "disable_mmap": False}
    files: dict[str, StoredFile] = {}
    with _recording(files):
        result = model_class.from_pretrained(name_or_path, **kwargs)
    model = result[0] if isinstance(result, tuple) else result
    _replace_recorded(model, files)
    return result


# -- helpers --


@contextmanager
def _recording(files: dict[str, StoredFile]) -> Iterator[None]:
    """Have transformers open files that give recorded tensors. What it opened is in `files` afterwards."""

    def opened(path: Any, *args: Any, **kwargs: Any) -> _RecordingFile:
        return _RecordingFile(
            safe_open(path, *args, **kwargs), files.setdefault(str(path), StoredFile(str(path)))
        )

    module: Any = modeling_utils
    before, module.safe_open = module.safe_open, opened
    try:
        yield
    finally:
        module.safe_open = before


class _RecordingFile:
    """What `safe_open` returns, but for the tensors."""

    def __init__(self, file: Any, stored: StoredFile) -> None:
        self._file = file
        self._stored = stored

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def metadata(self) -> Any:
        return self._file.metadata()

    def get_slice(self, key: str) -> _RecordingSlice:
        return _RecordingSlice(self._file.get_slice(key), Stored(self._stored, key))

    def __enter__(self) -> _RecordingFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)


class _RecordingSlice:
    """A tensor of a file that is not read."""

    def __init__(self, found: Any, origin: Stored) -> None:
        self._found = found
        self._origin = origin

    def get_shape(self) -> Any:
        return self._found.get_shape()

    def get_dtype(self) -> Any:
        return self._found.get_dtype()

    def __getitem__(self, index: Any) -> Tensor:
        dtype = modeling_utils.str_to_torch_dtype[self.get_dtype()]
        empty = torch.empty(self.get_shape(), dtype=dtype, device="meta")
        tensor = recorded(empty, self._origin)
        return tensor if index is Ellipsis else tensor[index]


def _replace_recorded(model: nn.Module, files: dict[str, StoredFile]) -> None:
    """Give a model plain parameters on meta, and their source; read its buffers."""
    source = StoredParams(files.values())
    params: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for key, tensor in module._parameters.items():
            if isinstance(tensor, RecordedTensor):
                if id(tensor) not in params:
                    params[id(tensor)] = source.take(f"{name}.{key}".lstrip("."), tensor)
                module._parameters[key] = params[id(tensor)]
        for key, buffer in module._buffers.items():
            if isinstance(buffer, RecordedTensor):
                module._buffers[key] = values_of(buffer)
    _tie(model, source)
    first_weights.attach(model, source)


def _tie(model: Any, source: StoredParams) -> None:
    """Tie what is stored under both names if it is the same, as `from_pretrained` does with values."""
    for target, kept in list(getattr(model, "all_tied_weights_keys", {}).items()):
        one, other = model.get_parameter(kept), model.get_parameter(target)
        if one is other or not (one in source.names and other in source.names):
            continue
        if not source.are_equal(one, other):
            log_event(
                f"The config ties {target} to {kept}, and the files have other values for each: not tied."
            )
            model.all_tied_weights_keys.pop(target)
            continue
        path, _, key = target.rpartition(".")
        setattr(model.get_submodule(path), key, one)
        source.forget(other)
