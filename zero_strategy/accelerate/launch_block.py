"""What an Accelerate yaml says of DeepSpeed, read as a config: its block `deepspeed_config`, and the launch.

The block stands in yaml files of `distributed_type: DEEPSPEED` and, with the same keys, in ours. Accelerate's
launcher hands unknown keys of it to nobody, so here they are faults. Called by the launcher and, in the
processes it has started, by the plugin. It must not know Accelerate's classes, nor the engine.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from zero_strategy.config_source import Fault, Setting, Settings, read_file
from zero_strategy.log import log_once

ZERO = "zero_optimization."
FILE_KEY = "deepspeed_config_file"
DEFAULT_STAGE = 2  # of Accelerate, where neither the block nor its file has one
DEFAULT_ORIGIN = "Accelerate's default"


class Launch(NamedTuple):
    """What a launcher was asked for; passed on to the processes it starts, as JSON."""

    block: dict[str, Any]  # keys of `deepspeed_config`, command line options included
    origin: str  # for messages: a file's path, or "command line"
    num_processes: int | None  # None: not said

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> Launch:
        """Undo `to_json`."""
        return cls(**json.loads(text))


def _device(value: Any) -> Any:
    return None if str(value).lower() == "none" else str(value).lower()


def _path(value: Any) -> Any:
    return None if str(value).lower() == "none" else str(value)


def _flag(value: Any) -> Any:
    return str(value).lower() == "true"


def _number(value: Any) -> Any:
    text = str(value).lower()
    if text in ("auto", "none"):
        return None if text == "none" else "auto"
    return float(text) if "." in text or "e" in text else int(text)


def _classes(value: Any) -> Any:
    return [name.strip() for name in str(value).split(",")]


# Key of the block -> key of ds_config.json, and how its value is read.
_TRANSLATED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "zero_stage": (f"{ZERO}stage", _number),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", _number),
    "gradient_clipping": ("gradient_clipping", _number),
    "offload_optimizer_device": (f"{ZERO}offload_optimizer.device", _device),
    "offload_param_device": (f"{ZERO}offload_param.device", _device),
    "offload_optimizer_nvme_path": (f"{ZERO}offload_optimizer.nvme_path", _path),
    "offload_param_nvme_path": (f"{ZERO}offload_param.nvme_path", _path),
    "zero3_save_16bit_model": (f"{ZERO}stage3_gather_16bit_weights_on_model_save", _flag),
    "deepspeed_moe_layer_cls_names": (f"{ZERO}leaf_module.classes", _classes),
}
_REPLACED = {
    "zero3_init_flag": "the model is built as it is, or on meta, and sharded when it is prepared",
    "deepspeed_multinode_launcher": "processes are started by torchrun, as Accelerate's 'standard' does",
    "deepspeed_hostfile": "processes are started by torchrun on each machine",
}
_REFUSED = {
    "deepspeed_inclusion_filter": "Which GPUs are used is said by gpu_ids.",
    "deepspeed_exclusion_filter": "Which GPUs are used is said by gpu_ids.",
}
BLOCK_KEYS = (FILE_KEY, *_TRANSLATED, *_REPLACED, *_REFUSED)


def settings_of_block(block: Mapping[str, Any], origin: str) -> tuple[Settings, list[Fault]]:
    """Return what a block says as settings of a config, and what is wrong with it.

    Args:
        block: As in the yaml; None counts as not given.
        origin: Where it stands.

    Returns:
        The settings: of the block's file, if it names one, completed by the block. Without a file the
        precision of parameters is "auto", as for DeepSpeed: bf16 or fp16 if Accelerate's is. Then the faults.
    """
    given = {key: value for key, value in block.items() if value is not None}
    faults = [_refused(key, given[key], origin) for key in given if key in _REFUSED]
    faults += unknown_keys(given, BLOCK_KEYS, f"deepspeed_config of {origin}")
    for key in given:
        if key in _REPLACED:
            log_once(f"{key} = {given[key]!r} (from {origin}): replaced. Here: {_REPLACED[key]}.")
    path = given.get(FILE_KEY)
    settings: Settings = read_file(path) if path else {}
    for key, (dotted, read) in _TRANSLATED.items():
        if key not in given:
            continue
        try:
            value = read(given[key])
        except ValueError:
            faults.append(_unreadable(key, given[key], origin))
            continue
        in_file = settings.get(dotted)
        if value is None or (value == "auto" and in_file is not None):
            continue
        if in_file is None or in_file.value == "auto":
            settings[dotted] = Setting(value, f"{key} in {origin}")
        elif in_file.value != value:
            faults.append(_clash(key, value, origin, dotted, in_file))
    if not path:
        for dotted in ("bf16.enabled", "fp16.enabled"):
            settings[dotted] = Setting("auto", origin)
        settings.setdefault(f"{ZERO}stage", Setting(DEFAULT_STAGE, DEFAULT_ORIGIN))
    return settings, faults


def unknown_keys(given: Iterable[str], known: Iterable[str], where: str) -> list[Fault]:
    """Return a fault for each key that nobody reads.

    Args:
        given: What was written.
        known: What is read.
        where: The block and its file.
    """
    known = list(known)
    faults = []
    for key in given:
        if key in known:
            continue
        nearest = difflib.get_close_matches(key, known, n=1)
        faults.append(
            Fault(
                f"Unknown key {key!r} in {where}.",
                "Accelerate's launcher hands such a key to nobody, and says nothing.",
                f"Did you mean {nearest[0]}?"
                if nearest
                else f"Remove it, or put it into a ds_config.json that {FILE_KEY} names.",
            )
        )
    return faults


def _refused(key: str, value: Any, origin: str) -> Fault:
    return Fault(f"{key} = {value!r} (from {origin}) is refused.", _REFUSED[key], "Remove it.")


def _unreadable(key: str, value: Any, origin: str) -> Fault:
    return Fault(
        f"{key} = {value!r} (from {origin}) is no number.",
        f"It stands for {_TRANSLATED[key][0]} of a ds_config.json.",
        "Write a number, or 'auto'.",
    )


def _clash(key: str, value: Any, origin: str, dotted: str, in_file: Setting) -> Fault:
    return Fault(
        f"{key} = {value!r} (from {origin}) and {dotted} = {in_file.value!r} (from {in_file.origin}) "
        f"contradict one another.",
        "Only one of them could have an effect.",
        f"Remove one, or write {dotted}: 'auto' in the file, and the other counts.",
    )
