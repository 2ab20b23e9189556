"""The user's own state in a checkpoint: nested dicts and lists of JSON values and tensors.

Turns such a structure into JSON (kept in the manifest) and flat named tensors (kept in a rank file), and
back. Called by `save` and `opened`. Nothing is pickled, so loading runs no code; the price is that only
these types pass, and the error for another type says where in the structure it sits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import torch
from pydantic import JsonValue
from torch import Tensor

from zero_strategy.checkpoint.elements import dtype_name
from zero_strategy.errors import CheckpointError

MAX_DEPTH = 64  # levels of nesting; more is a structure that contains itself
EXTRA_PREFIX = "extra/"
MODULES_KEY = "$modules"  # of encoded extra state, where modules have some too; `encode_extra` never makes it

# JSON has neither tensors nor infinities; they become an object with one key of these. A user's own dict
# with a key that begins with "$" is wrapped in "$dict", so that every dict comes back as it was.
_TENSOR, _FLOAT, _DICT = "$tensor", "$float", "$dict"


def encode_extra(obj: object) -> tuple[JsonValue, dict[str, Tensor]]:
    """Split a nested structure into JSON and tensors.

    Args:
        obj: dicts with string keys, lists, tuples (they come back as lists), str, int, float, bool, None,
            tensors.

    Returns:
        The JSON value for the manifest, and the tensors by the names ("extra/<n>") under which to store them.

    Raises:
        CheckpointError: Something else is in it; the text has its path, such as extra["a"][2].
    """
    tensors: dict[str, Tensor] = {}
    return _encode(obj, "extra", tensors, MAX_DEPTH), tensors


def decode_extra(encoded: JsonValue, read_tensor: Callable[[str], object]) -> object:
    """Undo `encode_extra`; `read_tensor` gives the stored tensor of a name, with its shape, or a stand-in.

    Raises:
        CheckpointError: `encoded` is not something `encode_extra` makes.
    """
    if isinstance(encoded, list):
        return [decode_extra(item, read_tensor) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if not any(key.startswith("$") for key in encoded):
        return {key: decode_extra(value, read_tensor) for key, value in encoded.items()}
    if len(encoded) == 1:
        ((tag, content),) = encoded.items()
        if tag == _TENSOR and isinstance(content, str):
            return read_tensor(content)
        if tag == _FLOAT and content in ("nan", "inf", "-inf"):
            return float(content)
        if tag == _DICT and isinstance(content, dict):
            return {key: decode_extra(value, read_tensor) for key, value in content.items()}
    raise CheckpointError(
        what=f"The extra state of the checkpoint holds {json.dumps(encoded)[:80]}.",
        why="It is not in the form in which extra state is saved, so the manifest was edited or damaged.",
        fix="Use another copy of the checkpoint. Nothing on disk was changed.",
    )


def parts_of_extra(encoded: JsonValue) -> tuple[JsonValue, JsonValue]:
    """Return what is the user's of a checkpoint's extra state, and what is that of modules, both encoded."""
    if not isinstance(encoded, dict) or MODULES_KEY not in encoded:
        return encoded, {}
    both = encoded[MODULES_KEY]
    return (both.get("user"), both.get("modules", {})) if isinstance(both, dict) else (both, {})


def _encode(obj: object, path: str, tensors: dict[str, Tensor], depth: int) -> JsonValue:
    if depth == 0:
        raise _refused(path[:200], f"nested deeper than {MAX_DEPTH} levels (does it contain itself?)")
    if isinstance(obj, Tensor):
        name = f"{EXTRA_PREFIX}{len(tensors)}"
        tensors[name] = _storable(obj, path)
        return {_TENSOR: name}
    if obj is None or isinstance(obj, bool):
        return obj
    if isinstance(obj, str):  # of a subclass, such as an enum's, what it stands for
        return str.__str__(obj)
    if isinstance(obj, int):
        return int(obj)
    if isinstance(obj, float):
        return float(obj) if math.isfinite(obj) else {_FLOAT: str(float(obj))}
    if isinstance(obj, list | tuple):
        return [_encode(item, f"{path}[{i}]", tensors, depth - 1) for i, item in enumerate(obj)]
    if isinstance(obj, dict):
        return _encode_dict(obj, path, tensors, depth)
    raise _refused(path, type(obj).__qualname__)


def _encode_dict(obj: dict[object, object], path: str, tensors: dict[str, Tensor], depth: int) -> JsonValue:
    encoded: dict[str, JsonValue] = {}
    for key, value in obj.items():
        if not isinstance(key, str):
            raise _refused(path, f"a dict with the key {key!r} ({type(key).__qualname__})")
        encoded[str.__str__(key)] = _encode(value, f"{path}[{json.dumps(key)}]", tensors, depth - 1)
    return {_DICT: encoded} if any(key.startswith("$") for key in encoded) else encoded


def _storable(tensor: Tensor, path: str) -> Tensor:
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        raise _refused(path, f"a tensor without plain storage ({tensor.layout}, {tensor.device})")
    dtype_name(tensor.dtype)
    return tensor.detach()


def _refused(path: str, found: str) -> CheckpointError:
    return CheckpointError(
        what=f"The extra state cannot be saved: {path}: {found}.",
        why="Extra state is stored without pickle, so that loading a checkpoint never runs code.",
        fix="Use dicts with string keys, lists, tuples, str, int, float, bool, None and tensors only.",
    )
