"""The weights of a checkpoint folder as a dict of whole tensors that are read when somebody looks.

Made by `opened` for whoever may want to change weights on their way in: what nobody has looked at is never
whole on any rank. It must not know the engine they go into.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from zero_strategy.checkpoint.format import CheckpointReader
from zero_strategy.checkpoint.manifest import Manifest
from zero_strategy.checkpoint.records import model_tensor_name


def stored_names(manifest: Manifest) -> dict[str, str]:
    """Return all names of parameters and buffers, aliases too, with the names they are stored under."""
    found: dict[str, str] = {}
    for records in (manifest.params, manifest.buffers):
        for fqn, record in records.items():
            found.update(dict.fromkeys((fqn, *record.aliases), fqn))
    return found


class StoredWeights(MutableMapping[str, Any]):
    """Weights and buffers under the names of the model's `state_dict()`, in the model's dtypes, on the CPU.

    The surprise: a tensor that was looked at counts as changed, as it may be written in place.
    """

    def __init__(self, reader: CheckpointReader, module_states: Mapping[str, Any]) -> None:
        """List the names.

        Args:
            reader: The checkpoint; must be readable while this is in use.
            module_states: What modules have returned from `get_extra_state`, by name.
        """
        self._reader = reader
        self._untouched = stored_names(reader.manifest)
        self._values: dict[str, Any] = dict(module_states)

    @property
    def untouched(self) -> dict[str, str]:
        """The names that nobody has looked at or changed, with the names in the checkpoint."""
        return dict(self._untouched)

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            self._values[name] = self._read(self._untouched[name])
            del self._untouched[name]
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._untouched.pop(name, None)
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        if self._untouched.pop(name, None) is None:
            del self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._untouched or name in self._values

    def __iter__(self) -> Iterator[str]:
        yield from [*self._untouched, *self._values]

    def __len__(self) -> int:
        return len(self._untouched) + len(self._values)

    def __repr__(self) -> str:
        return f"StoredWeights({len(self)} tensors of {self._reader.folder})"

    def _read(self, fqn: str) -> Tensor:
        manifest = self._reader.manifest
        record = manifest.params.get(fqn) or manifest.buffers[fqn]
        return self._reader.read_tensor(model_tensor_name(fqn)).to(record.torch_dtype)
