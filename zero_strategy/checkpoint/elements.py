"""Elements as bytes: dtypes and their names, memory views, chunks on the host, checksums.

Used by all modules of checkpoints above it. It knows neither files nor folders.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from zero_strategy.checkpoint.durable import CHUNK_BYTES, Checksum
from zero_strategy.errors import CheckpointError

MAX_COUNT = 2**63 - 1  # elements or bytes: what a signed 64-bit file offset can hold

# Name in a manifest (torch's own, without "torch.") -> (dtype, name in a safetensors header).
_DTYPES = {
    "float64": (torch.float64, "F64"),
    "float32": (torch.float32, "F32"),
    "float16": (torch.float16, "F16"),
    "bfloat16": (torch.bfloat16, "BF16"),
    "float8_e4m3fn": (torch.float8_e4m3fn, "F8_E4M3"),
    "float8_e4m3fnuz": (torch.float8_e4m3fnuz, "F8_E4M3FNUZ"),
    "float8_e5m2": (torch.float8_e5m2, "F8_E5M2"),
    "float8_e5m2fnuz": (torch.float8_e5m2fnuz, "F8_E5M2FNUZ"),
    "complex64": (torch.complex64, "C64"),
    "int64": (torch.int64, "I64"),
    "int32": (torch.int32, "I32"),
    "int16": (torch.int16, "I16"),
    "int8": (torch.int8, "I8"),
    "uint64": (torch.uint64, "U64"),
    "uint32": (torch.uint32, "U32"),
    "uint16": (torch.uint16, "U16"),
    "uint8": (torch.uint8, "U8"),
    "bool": (torch.bool, "BOOL"),
}
DTYPES: Mapping[str, torch.dtype] = MappingProxyType({name: dtype for name, (dtype, _) in _DTYPES.items()})
_NAME_OF_DTYPE = {dtype: name for name, (dtype, _) in _DTYPES.items()}
HEADER_NAMES: Mapping[torch.dtype, str] = MappingProxyType(dict(_DTYPES.values()))


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as manifests do: torch's name without "torch.".

    Raises:
        CheckpointError: The safetensors format has no such dtype.
    """
    name = _NAME_OF_DTYPE.get(dtype)
    if name is None:
        raise CheckpointError(
            what=f"A tensor of dtype {dtype} cannot be stored in a checkpoint.",
            why=f"The safetensors format knows {', '.join(DTYPES)} only.",
            fix="Convert the tensor to one of these, or leave it out (buffers: persistent=False).",
        )
    return name


def bytes_of(tensor: Tensor) -> memoryview:
    """Look at the memory of a contiguous CPU tensor as writable bytes, without NumPy and without a copy.

    Invariant: the view holds no reference to the tensor; the caller keeps the tensor alive while using it.
    """
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), (tensor.device, tensor.stride())
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")


def checksum(data: Tensor | memoryview | bytes) -> str:
    """Compute the checksum of bytes, or of a tensor's elements.

    Shapes:
        data [numel] any dtype, any device; only the bytes count
    """
    found = Checksum()
    if isinstance(data, Tensor):
        for chunk in cpu_chunks(data):
            found.add(bytes_of(chunk))
    else:
        found.add(data)
    return str(found)


def cpu_chunks(tensor: Tensor, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Tensor]:
    """Yield the elements in order as contiguous CPU tensors of at most `chunk_bytes`."""
    flat = tensor.detach().reshape(-1)
    chunk_numel = chunk_bytes // flat.element_size()
    for start in range(0, flat.numel(), chunk_numel):
        # The last two make lazy conjugates and negations real; they are no-ops for every other tensor.
        yield flat[start : start + chunk_numel].to("cpu").contiguous().resolve_conj().resolve_neg()
