"""The random number generators of this process: their state as plain values and as a tensor, and back.

A checkpoint to resume from holds one for each rank, so that dropout goes on as if nothing had happened.
Called by `save` and `opened`, and by front ends for checkpoints of their own. It must not know when a state
is to be taken or restored.
"""

from __future__ import annotations

import base64
import importlib
import json
import random
import struct
import sys
from typing import Any

import torch
from torch import Tensor

from zero_strategy.checkpoint.elements import bytes_of
from zero_strategy.log import log_event


def get_state(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's and torch's generators, the device's, and numpy's if it is in use.

    Args:
        device: Of this rank.

    Returns:
        JSON; what is not there is None.
    """
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, _to_text(struct.pack(f"<{len(numbers)}I", *numbers)), gauss],
        "numpy": _numpy_state() if "numpy.random" in sys.modules else None,
        "torch": _tensor_to_text(torch.get_rng_state()),
        "device": None if device.type == "cpu" else _device_state(device),
    }


def set_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what `get_state` has returned.

    Args:
        state: Taken on the same kind of device, or that device's part is left out.
        device: Of this rank.

    Raises:
        ImportError: numpy was in use when it was taken, and is not here.
    """
    version, numbers, gauss = state["python"]
    words = base64.b64decode(numbers)
    random.setstate((version, struct.unpack(f"<{len(words) // 4}I", words), gauss))
    if state["numpy"] is not None:
        numpy = importlib.import_module("numpy")
        kind, keys, position, has_gauss, cached = state["numpy"]
        keys = numpy.frombuffer(base64.b64decode(keys), dtype="<u4").copy()
        numpy.random.set_state((kind, keys, position, has_gauss, cached))
    torch.set_rng_state(_text_to_tensor(state["torch"]))
    if state["device"] is not None and state["device"]["type"] == device.type:
        values = _text_to_tensor(state["device"]["state"])
        torch.get_device_module(device).set_rng_state(values, device)


def to_tensor(state: dict[str, Any]) -> Tensor:
    """Return a state as bytes.

    Shapes:
        -> [num_bytes] uint8
    """
    return _to_uint8(json.dumps(state).encode())


def from_tensor(values: Tensor) -> dict[str, Any]:
    """Undo `to_tensor`.

    Shapes:
        values [num_bytes] uint8
    """
    state: dict[str, Any] = json.loads(bytes(bytes_of(values)))
    return state


def can_go_on(path: object, num_there: int, num_here: int) -> bool:
    """Whether there is a state for every rank, and only those; if not, the log says what that means.

    Args:
        path: Of the checkpoint.
        num_there: Ranks that have stored their states.
        num_here: Ranks that load.
    """
    if num_there != num_here:
        log_event(
            f"{path} was written by {num_there} ranks and is read by {num_here}: random numbers (dropout) do "
            f"not go on where they were."
        )
    return num_there == num_here


# -- helpers --


def _numpy_state() -> list[Any]:
    state = sys.modules["numpy.random"].get_state(legacy=True)
    kind, keys, position, has_gauss, cached = state
    return [str(kind), _to_text(keys.astype("<u4").tobytes()), int(position), int(has_gauss), float(cached)]


def _device_state(device: torch.device) -> dict[str, str]:
    values = torch.get_device_module(device).get_rng_state(device)
    return {"type": device.type, "state": _tensor_to_text(values)}


def _to_text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _tensor_to_text(values: Tensor) -> str:
    return _to_text(bytes(bytes_of(values)))


def _text_to_tensor(text: str) -> Tensor:
    return _to_uint8(base64.b64decode(text))


def _to_uint8(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
