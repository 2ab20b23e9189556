"""Accelerate's own command line and yaml files, read by its own parser.

Called by `zero-strategy launch`, which starts processes, and by `zero_strategy.run` in a process that
`accelerate launch` has started, to find out what that was asked for. It must not know the engine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from accelerate.commands.config import config_args
from accelerate.commands.launch import launch_command_parser

from zero_strategy.accelerate.launch_block import BLOCK_KEYS, Launch, unknown_keys
from zero_strategy.config_source import Fault, error_of
from zero_strategy.errors import ConfigError

_MAX_ANCESTORS = 4  # the launcher is the parent, or above a shell or mpirun
# A block whose keys are options under a prefix that may be left out.
_PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of `accelerate launch`."""
    parsed: argparse.Namespace = launch_command_parser().parse_args(list(arguments))
    return parsed


def load_yaml(parsed: argparse.Namespace) -> Any:
    """Return Accelerate's record of the yaml that a launch reads, None if there is none.

    Raises:
        ConfigError: It is missing, is none of Accelerate's, or has keys that nobody would read.
    """
    if parsed.config_file is None and not os.path.isfile(config_args.default_config_file):
        return None
    path = parsed.config_file or config_args.default_config_file
    try:
        record = config_args.load_config_from_file(parsed.config_file)
    except Exception as error:
        raise ConfigError(
            what=f"The Accelerate config {path!r} cannot be read: {error}",
            why="It is what --config_file names, or else what `accelerate config` has written.",
            fix="Correct the path or the file.",
        ) from error
    faults = _unknown_in(record, parsed, path)
    if faults:
        raise error_of(faults)
    return record


def describe(parsed: argparse.Namespace, record: Any) -> Launch:
    """Return what a launch asks for: the yaml, and options that beat it."""
    options: set[str] = getattr(parsed, "nondefault", set())
    block = dict(getattr(record, "deepspeed_config", None) or {})
    block |= {key: getattr(parsed, key) for key in BLOCK_KEYS if key in options}
    path = parsed.config_file or config_args.default_config_file
    asked = parsed.num_processes if "num_processes" in options else getattr(record, "num_processes", None)
    known = asked if isinstance(asked, int) and asked > 0 else None
    return Launch(block, "command line" if record is None else str(path), known)


def find_launcher() -> Launch | None:
    """Return what the `accelerate launch` that has started this process was asked for, None if none has."""
    for ancestor in psutil.Process().parents()[:_MAX_ANCESTORS]:
        try:
            arguments = launch_arguments(ancestor.cmdline())
            folder = ancestor.cwd() if arguments is not None else ""
        except psutil.Error:
            return None
        if arguments is not None:
            parsed = launch_command_parser().parse_known_args(arguments)[0]
            if parsed.config_file is not None:  # relative to where the launcher was started
                parsed.config_file = str(Path(folder, parsed.config_file))
            return describe(parsed, load_yaml(parsed))
    return None


def launch_arguments(command: Sequence[str]) -> list[str] | None:
    """Return what follows `accelerate launch` in a command line, None if that is not what it is."""
    for position, word in enumerate(command[:4]):
        name = Path(word).name
        if name == "accelerate-launch" or word == "accelerate.commands.launch":
            return list(command[position + 1 :])
        if name in ("accelerate", "accelerate.commands.accelerate_cli", "accelerate_cli.py"):
            return (
                list(command[position + 2 :]) if command[position + 1 : position + 2] == ["launch"] else None
            )
        if word.endswith("accelerate/commands/launch.py"):
            return list(command[position + 1 :])
    return None


def _unknown_in(record: Any, parsed: argparse.Namespace, path: str) -> list[Fault]:
    """Return the faults of nested keys, which Accelerate's own check leaves out."""
    known = vars(parsed).keys()
    faults = []
    for name, block in vars(record).items():
        if isinstance(block, dict) and name != "deepspeed_config":
            prefix = _PREFIXES.get(name, "")
            spelled = {key: key if key.startswith(prefix) else prefix + key for key in block}
            faults += [
                fault
                for key, option in spelled.items()
                if option not in known
                for fault in unknown_keys([key], [n.removeprefix(prefix) for n in known], f"{name} of {path}")
            ]
        elif isinstance(block, dict):
            faults += unknown_keys(block, BLOCK_KEYS, f"{name} of {path}")
    return faults
