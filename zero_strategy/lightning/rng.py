"""The state of this process's random number generators, as plain values, and back.

A checkpoint to resume from holds one for each rank, so that dropout goes on as if nothing had happened.
Called by the checkpoint hooks. It must not know when a state is to be taken or restored.
"""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy
import torch


def get_state(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators, and the device's, as JSON."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": [version, _to_text(numpy.array(numbers, dtype=numpy.uint32)), gauss],
        "numpy": [str(kind), _to_text(keys), int(position), int(has_gauss), float(cached)],
        "torch": _to_text(torch.get_rng_state().numpy()),
        "cuda": _to_text(torch.cuda.get_rng_state(device).numpy()) if device.type == "cuda" else None,
    }


def set_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what `get_state` has returned.

    Args:
        state: On the same kind of device, or that device's part is left out.
        device: Of this rank.
    """
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(_from_text(numbers, numpy.uint32).tolist()), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, _from_text(keys, numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.from_numpy(_from_text(state["torch"], numpy.uint8)))
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(torch.from_numpy(_from_text(state["cuda"], numpy.uint8)), device)


def _to_text(values: Any) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _from_text(text: str, dtype: Any) -> Any:
    return numpy.frombuffer(base64.b64decode(text), dtype=dtype).copy()
