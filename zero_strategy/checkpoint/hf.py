"""What a Hugging Face folder needs beside weights: configs of a model, small files of another folder.

Called by `parts` (to record the configs of the model being trained) and by `consolidate` (to write
them). A transformers model is recognised by what its config offers, so transformers itself is never
imported and need not be installed. It knows nothing of shards.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from pydantic import JsonValue
from torch import nn

from zero_strategy.checkpoint.folders import copy_file, sync_folder
from zero_strategy.checkpoint.records import HFRecord
from zero_strategy.errors import CheckpointError

# Tokenizers, processors, chat templates, configs and the code of custom models. Never weights, whatever they
# are called: an allow-list, since a weight file copied by mistake would shadow the trained weights.
_SIDE_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".vocab", ".bpe"}
_SIDE_FOLDERS = {"additional_chat_templates"}
_CONFIG_FILES = ("config.json", "generation_config.json")


def hf_record(model: nn.Module) -> HFRecord | None:
    """Find the Hugging Face model in (or around) what is trained, and take its configs.

    The outermost module that carries a transformers config counts; of several side by side (student and
    teacher) the one that trains most.

    Returns:
        Its FQN prefix, config and generation config; None where there is no such module.
    """
    found = list(_outermost(model, ""))
    if not found:
        return None
    prefix, module = max(found, key=lambda item: _trainable_numel(item[1]))
    config = _config_json(module, "config", use_diff=False)
    assert config is not None, type(module)
    if not config.get("architectures"):
        config["architectures"] = [type(module).__name__]  # as save_pretrained() does
    return HFRecord(
        prefix=prefix,
        config=config,
        generation_config=_config_json(module, "generation_config", use_diff=True),
    )


def ties_word_embeddings(config: dict[str, JsonValue]) -> bool:
    """Whether a config makes transformers tie weights on loading, so that one name in the file is enough."""
    if isinstance(config.get("tie_word_embeddings"), bool):
        return bool(config["tie_word_embeddings"])
    nested = [value for key, value in config.items() if key.endswith("_config") and isinstance(value, dict)]
    return any(ties_word_embeddings(value) for value in nested)


def config_with_dtype(config: dict[str, JsonValue], dtype: str) -> dict[str, JsonValue]:
    """Copy a config, with the dtype of the weights beside it set to `dtype` ("bfloat16")."""
    changed = dict(config)
    # transformers 5 calls it dtype, 4 calls it torch_dtype; both read either.
    changed["dtype" if "dtype" in config else "torch_dtype"] = dtype
    for key, value in config.items():
        if (
            key.endswith("_config")
            and isinstance(value, dict)
            and (value.get("dtype") or value.get("torch_dtype"))
        ):
            changed[key] = config_with_dtype(value, dtype)
    return changed


def copy_side_files(source: Path, out: Path) -> list[str]:
    """Copy tokenizer, chat template and the like, but no weights and no configs; return what was copied.

    Raises:
        CheckpointError: `source` is not a folder, or holds nothing of the kind.
    """
    if not source.is_dir():
        raise _no_side_files(source, "is not a folder" if source.exists() else "does not exist")
    copied = []
    for path in sorted(source.iterdir()):
        is_index = path.name.endswith(".index.json")
        if (
            path.is_file()
            and path.suffix in _SIDE_SUFFIXES
            and not is_index
            and path.name not in _CONFIG_FILES
        ):
            copy_file(path, out / path.name)
            copied.append(path.name)
        elif path.is_dir() and path.name in _SIDE_FOLDERS:
            shutil.copytree(path, out / path.name, copy_function=copy_file)
            for folder in (out / path.name, *filter(Path.is_dir, (out / path.name).rglob("*"))):
                sync_folder(folder)
            copied.append(path.name)
    if not copied and not any((source / name).is_file() for name in _CONFIG_FILES):
        raise _no_side_files(source, "holds no tokenizer, config or similar file")
    return copied


def read_config(path: Path) -> dict[str, JsonValue]:
    """Read a JSON config file.

    Raises:
        CheckpointError: It is not a JSON object.
    """
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _no_config(path, str(error)) from error
    if not isinstance(config, dict):
        raise _no_config(path, "it is not a JSON object")
    return config


def _outermost(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if _is_transformers_config(getattr(module, "config", None)):
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from _outermost(child, f"{prefix}{name}.")


def _is_transformers_config(config: object) -> bool:
    return isinstance(getattr(config, "model_type", None), str) and callable(
        getattr(config, "to_json_string", None)
    )


def _config_json(module: nn.Module, attribute: str, *, use_diff: bool) -> dict[str, JsonValue] | None:
    to_json_string = getattr(getattr(module, attribute, None), "to_json_string", None)
    if not callable(to_json_string):
        return None
    loaded = json.loads(to_json_string(use_diff=use_diff))  # resolves dtypes and nested configs
    return loaded if isinstance(loaded, dict) else None


def _trainable_numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters() if param.requires_grad)


def _no_side_files(source: Path, why: str) -> CheckpointError:
    return CheckpointError(
        what=f"No Hugging Face files can be copied from {source}.",
        why=f"It {why}.",
        fix="Pass the folder into which tokenizer.save_pretrained() wrote, or leave --hf-files out.",
    )


def _no_config(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        what=f"{path} cannot be used as a config.", why=f"{why}.", fix="Repair the file, or remove it."
    )
