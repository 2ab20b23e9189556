"""The records a manifest is made of, and the names of files and tensors.

Owns the JSON schema of `manifest.json` below its top level, as frozen pydantic models: building one checks
every number. Used by `manifest`, which checks what one record says about another, and by whoever saves.
"""

from __future__ import annotations

import math
import secrets
from typing import Annotated, Final

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, JsonValue, StringConstraints, field_validator

from zero_strategy.checkpoint.elements import DTYPES, MAX_COUNT
from zero_strategy.errors import CheckpointError

FORMAT: Final = "zero_strategy"

# Strict: JSON's true is not 1, and 1.0 is not a count.
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
# A plain name: no separator, no "..", nothing hidden, so that it stays inside the folder it is joined to.
FileName = Annotated[str, StringConstraints(strict=True, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$")]
Shape = Annotated[tuple[Count, ...], Field(max_length=64)]
ChecksumText = Annotated[str, StringConstraints(strict=True, pattern=r"^xxh3:[0-9a-f]{16}$")]


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # a later minor writer may add fields


class FileRecord(Record):
    """What a rank file must look like."""

    num_bytes: Count
    header_checksum: ChecksumText  # over the bytes before the data, which have those of the pieces


class Piece(Record):
    """A run of elements of one flattened tensor, and where it is stored."""

    file: FileName
    key: str  # of the tensor inside the file
    file_start: Count  # element of `key` at which the run begins
    start: Count  # element of the flattened tensor at which the run begins
    numel: Count
    checksum: ChecksumText  # over the bytes of the run

    @property
    def stop(self) -> int:
        """Element of the flattened tensor after the run."""
        return self.start + self.numel


class TypedRecord(Record):
    shape: Shape
    dtype: str

    @field_validator("dtype")
    @classmethod
    def _is_storable(cls, name: str) -> str:
        if name not in DTYPES:
            raise ValueError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
        return name

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        return DTYPES[self.dtype]


class TensorEntry(TypedRecord):
    """A stored tensor: shape and dtype as stored, and the runs that make it up."""

    name: str = Field(exclude=True)  # the manifest's key; here for messages
    pieces: tuple[Piece, ...]


class ParamRecord(TypedRecord):
    """A parameter of the model: `dtype` is the model's, which the stored master weight need not share."""

    trainable: bool
    aliases: tuple[str, ...] = ()  # other names of a tied parameter


class BufferRecord(TypedRecord):
    """A persistent buffer of the model."""

    aliases: tuple[str, ...] = ()


class OptimizerRecord(Record):
    """One optimizer: its class for the reader, its param groups with `params` as lists of FQNs."""

    class_name: str = Field(validation_alias=AliasChoices("class", "class_name"), serialization_alias="class")
    param_groups: tuple[dict[str, JsonValue], ...]
    plain_state: dict[str, dict[str, JsonValue]] = Field(default_factory=dict)  # FQN -> key -> no tensor


class HFRecord(Record):
    """What a Hugging Face folder needs beside the weights."""

    prefix: str  # FQN prefix of the Hugging Face model inside the trained module, "" or with a trailing dot
    config: dict[str, JsonValue]
    generation_config: dict[str, JsonValue] | None = None


# -- names --


def new_checkpoint_id() -> str:
    """Draw the id of a save: 16 hexadecimal digits, without touching any seeded generator."""
    return secrets.token_hex(8)


def rank_file_name(rank: int, world_size: int, checkpoint_id: str) -> str:
    """Name the file of one rank."""
    return f"rank-{rank:05d}-of-{world_size:05d}-{checkpoint_id}.safetensors"


def file_metadata(rank: int, world_size: int, checkpoint_id: str) -> dict[str, str]:
    """What the header of a rank file says, so that a file from another save is recognised."""
    return {
        "format": FORMAT,
        "checkpoint_id": checkpoint_id,
        "rank": str(rank),
        "world_size": str(world_size),
    }


def model_tensor_name(fqn: str) -> str:
    """Name the stored tensor of a parameter or buffer."""
    return f"model/{fqn}"


def average_tensor_name(average_index: int, fqn: str | None = None) -> str:
    """Name the stored tensor of a parameter in an average of the weights; None: its number of updates."""
    return f"average/{average_index}/" + ("num_updates" if fqn is None else f"weights/{fqn}")


def param_of(tensor_name: str) -> str | None:
    """Return the parameter or buffer that a stored tensor belongs to, None if it belongs to none."""
    kind, _, rest = tensor_name.partition("/")
    if kind == "model":
        return rest
    if kind == "optim":
        return rest.partition("/")[2].rpartition("/")[0]
    found = rest.partition("/weights/")[2]
    return found if kind == "average" and found else None


def rng_tensor_name(rank: int) -> str:
    """Name the stored state of a rank's random number generators."""
    return f"rng/{rank}"


def optim_tensor_name(optimizer_index: int, fqn: str, state_key: str) -> str:
    """Name the stored tensor of one optimizer state of a parameter.

    Raises:
        CheckpointError: The key is none that a name can end in.
    """
    if not isinstance(state_key, str) or not state_key or "/" in state_key:
        raise CheckpointError(
            what=f"The state {state_key!r} of {fqn!r} in optimizer {optimizer_index} cannot be stored.",
            why="Its key becomes the last part of a name, after a '/', so it is a string without one.",
            fix="Give the optimizer's state keys such as 'exp_avg'.",
        )
    return f"optim/{optimizer_index}/{fqn}/{state_key}"
