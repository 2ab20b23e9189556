"""What of a model is exported, and under which names.

Called by `export`. It knows names, ties and prefixes; it writes nothing, and where elements come from is the
source's business.

[Note: Tied weights]
A tied parameter is stored once. transformers ties on loading when the config says `tie_word_embeddings`, so
the one name it was registered under first is enough. A config that says otherwise does not tie, and a
missing name would stay randomly initialised there, so every name is written. A model without a Hugging Face
config is written as safetensors' own `save_model` does it: one name, the others listed in the file's
metadata. torch's own format can say that two names share a tensor, so there every name is in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from zero_strategy.checkpoint.hf import ties_word_embeddings
from zero_strategy.checkpoint.records import BufferRecord, HFRecord, ParamRecord
from zero_strategy.checkpoint.streamed import StreamedTensor
from zero_strategy.errors import CheckpointError

DEFAULT_SHARD_SIZE_BYTES = 5 * 10**9  # a size every file system and hub takes


@dataclass(frozen=True)
class ExportOptions:
    """How to write the folder.

    Attributes:
        dtype: Of all floating-point parameters; None: each parameter's own in the model. Buffers keep theirs.
        max_shard_size_bytes: Of one weights file; a larger tensor gets a file of its own.
        trainable_only: Write the trainable parameters only, and no buffers.
        strip_prefix: Take what lies below this FQN prefix, and name it without. None: for safetensors the
            prefix of the Hugging Face model in the source, if there is one; for torch no prefix.
        hf_files: A folder whose tokenizer files are copied. Its config.json and generation_config.json serve
            only where the source has none: the source's describe the model that was trained, say with a
            resized vocabulary.
        force: Write into a folder that holds anything else than an earlier output of the same source: of the
            same checkpoint, or of an engine whose model has the same names and shapes. Files of the same
            names and weight files are replaced.
        format: Of the weights: "safetensors", as Hugging Face writes them, or "torch", pytorch_model.bin,
            which `torch.load` gives back as `ZeroEngine.full_state_dict` returns it.
    """

    dtype: torch.dtype | None = None
    max_shard_size_bytes: int = DEFAULT_SHARD_SIZE_BYTES
    trainable_only: bool = False
    strip_prefix: str | None = None
    hf_files: Path | None = None
    force: bool = False
    format: Literal["safetensors", "torch"] = "safetensors"


class Source(NamedTuple):
    """A model to write."""

    checkpoint_id: str | None  # of the checkpoint; None: the model of an engine, as it is now
    written: str  # when: the date of the checkpoint, or now
    params: Mapping[str, ParamRecord]
    buffers: Mapping[str, BufferRecord]
    hf: HFRecord | None
    chunks: Callable[[str], Iterator[Tensor]]  # the elements of a parameter or buffer, in order
    module_states: Mapping[str, Any]  # of modules that keep more; tensors in it may be `StreamedTensor`s
    is_whole: bool = True  # False: the model has parameters that are not in `params`


@dataclass
class Selection:
    """What is written.

    Attributes:
        prefix: What the names are stripped of.
        tensors: Parameters and buffers.
        left_out: Names that are not written: outside the prefix, or of no tensor where only tensors can be.
        tied: Name left out because it is tied -> name written.
        module_states: State that is no parameter and no buffer, by the name it is written under.
    """

    prefix: str
    tensors: list[StreamedTensor] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    module_states: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)


class _Candidate(NamedTuple):
    """A parameter or buffer that may be written."""

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # to write it in
    aliases: tuple[str, ...]


def select(source: Source, options: ExportOptions) -> Selection:
    """Decide what is written. See [Note: Tied weights].

    Raises:
        CheckpointError: The selection is empty, or two tensors would have one name.
    """
    is_torch = options.format == "torch"
    selection = Selection(_prefix(source, options))
    seen: set[str] = set()
    for fqn, shape, dtype, aliases in _candidates(source, options):
        names = [name for name in (fqn, *aliases) if name.startswith(selection.prefix)]
        if not names:
            selection.left_out.append(fqn)
            continue
        keys = [_key_of(source, name, selection.prefix, seen) for name in names]
        groups = [keys]  # of names, each of which gets the elements
        if not is_torch:
            groups = [[key] for key in keys] if _needs_every_name(source) else [keys[:1]]
            selection.tied.update(dict.fromkeys(keys[len(groups) :], keys[0]))
        chunks = partial(source.chunks, fqn)
        selection.tensors += [StreamedTensor(tuple(group), shape, dtype, chunks) for group in groups]
    if not options.trainable_only:
        _select_states(source, selection, seen, is_written=is_torch)
    if not selection.tensors:
        kind = "trainable parameter" if options.trainable_only else "parameter"
        names = list(source.params)[:3] or ["none"]
        why = (
            f"no {kind} has a name that begins with {selection.prefix!r}; names are: {', '.join(names)}, ..."
        )
        raise _bad_selection(source, why)
    return selection


def _prefix(source: Source, options: ExportOptions) -> str:
    if options.strip_prefix is not None:
        return options.strip_prefix
    return source.hf.prefix if source.hf and options.format == "safetensors" else ""


def _needs_every_name(source: Source) -> bool:
    return source.hf is not None and not ties_word_embeddings(source.hf.config)


def _candidates(source: Source, options: ExportOptions) -> Iterator[_Candidate]:
    for fqn, param in source.params.items():
        dtype = param.torch_dtype
        if options.dtype is not None and dtype.is_floating_point:
            dtype = options.dtype
        if param.trainable or not options.trainable_only:
            yield _Candidate(fqn, param.shape, dtype, param.aliases)
    if not options.trainable_only:
        for fqn, buffer in source.buffers.items():
            yield _Candidate(fqn, buffer.shape, buffer.torch_dtype, buffer.aliases)


def _select_states(source: Source, selection: Selection, seen: set[str], *, is_written: bool) -> None:
    for name, state in source.module_states.items():
        if is_written and name.startswith(selection.prefix):
            selection.module_states[_key_of(source, name, selection.prefix, seen)] = state
        else:
            selection.left_out.append(name)


def _key_of(source: Source, name: str, prefix: str, seen: set[str]) -> str:
    key = name.removeprefix(prefix)
    if not key or key == "__metadata__" or key in seen:
        raise _bad_selection(source, f"{name!r} would be written as {key!r}, which is taken or not a name")
    seen.add(key)
    return key


def _bad_selection(source: Source, why: str) -> CheckpointError:
    fix = "Choose another --strip-prefix (strip_prefix), or leave --trainable-only (trainable_only) out."
    if source.checkpoint_id is None:
        fix = (
            "Leave trainable_only out, or write a part of a checkpoint: `zero-strategy consolidate CKPT OUT "
            "--strip-prefix PREFIX`."
        )
    return CheckpointError(
        what="The model has nothing that could be written like this.",
        why=f"{why[0].upper()}{why[1:]}.",
        fix=fix,
    )
