"""The parameters of a model that are in safetensors files, as a source of first weights.

Made by `loading`. It knows which elements of which file a parameter consists of, and reads them into shards.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.transformers.recorded import RecordedTensor, StoredFile, Values, whole

_CHUNK_NUMEL = 1 << 20  # elements that are read at once where they are to be converted or moved


class StoredParams:
    """Reads ranges of parameters from files. A `first_weights.WeightSource`."""

    def __init__(self, files: Iterable[StoredFile]) -> None:
        """Begin without parameters.

        Args:
            files: Those that all of them are in.
        """
        self._files = list(files)
        self._origins: dict[nn.Parameter, tuple[str, Values, torch.dtype]] = {}

    @property
    def names(self) -> Mapping[nn.Parameter, str]:
        """The parameters whose values it has, each with its name when it was loaded."""
        return {param: name for param, (name, _, _) in self._origins.items()}

    def take(self, name: str, tensor: RecordedTensor) -> nn.Parameter:
        """Return the parameter, on meta, that a recorded one is to be replaced by."""
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        param = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        self._origins[param] = name, tensor.origin, tensor.dtype
        return param

    def share(self, copied: nn.Parameter, original: nn.Parameter) -> None:
        """Give a copy, made of a parameter while it had no values, the same values."""
        self._origins[copied] = self._origins[original]

    def read(self, param: nn.Parameter, start: int, out: Tensor) -> None:
        """Write the elements of a parameter from `start` on into `out`, [numel] of any dtype and device.

        Raises:
            CheckpointError: The file is damaged, or gone.
        """
        _, origin, dtype = self._origins[param]
        if out.device.type == "cpu" and out.dtype == dtype:
            origin.read(start, out)
            return
        room = torch.empty(min(_CHUNK_NUMEL, out.numel()), dtype=dtype)
        for done in range(0, out.numel(), _CHUNK_NUMEL):
            piece = out[done : done + _CHUNK_NUMEL]
            origin.read(start + done, room[: piece.numel()])
            piece.copy_(room[: piece.numel()])

    def are_equal(self, one: nn.Parameter, other: nn.Parameter) -> bool:
        """Tell whether two parameters have the same values, looking at a piece at a time."""
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        numel = one.numel()
        rooms = [torch.empty(min(_CHUNK_NUMEL, numel), dtype=one.dtype) for _ in range(2)]
        for start in range(0, numel, _CHUNK_NUMEL):
            parts = [room[: min(_CHUNK_NUMEL, numel - start)] for room in rooms]
            self.read(one, start, parts[0])
            self.read(other, start, parts[1])
            if not torch.equal(*parts):
                return False
        return True

    def forget(self, param: nn.Parameter) -> None:
        """Leave out a parameter that another one has taken the place of."""
        del self._origins[param]

    def describe(self) -> list[str]:
        """Return a line for every file: its size and its header."""
        lines = []
        for stored in self._files:
            file = stored.opened()
            lines.append(f"{file.path.name}: {file.num_bytes} bytes, header {file.header_checksum}")
        return lines

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredParams:
        """Serve the copies of the parameters, as of a model that is copied before it has values."""
        copied = StoredParams(self._files)
        memo[id(self)] = copied
        copied._origins = {copy.deepcopy(param, memo): known for param, known in self._origins.items()}
        return copied


def values_of(tensor: RecordedTensor) -> Tensor:
    """Read a recorded tensor whole, as of a buffer."""
    return whole(tensor)
