"""What a user wrote: files, dicts and keywords as one mapping of dotted keys, judged by the table of keys.

Owns reading (`read_file`, `flatten`, `read_keywords`), judging (`check_keys` sorts settings into honoured,
"auto", replaced and faulty ones, `complete_batch_numbers` derives and compares) and the one error that lists
all faults. Called by `config.py` only, which passes in the honoured keys. Must not know pydantic or torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from zero_strategy.config_keys import (
    AUTO,
    AUTO_HINTS,
    KEY_RULES,
    SHORTHAND_FIELD,
    ZERO_BLOCK,
    first_unknown_part,
    nearest_known,
    parent_blocks,
)
from zero_strategy.errors import ConfigError


class Setting(NamedTuple):
    """One value somebody wrote, and where: a file's path, "config dict", "keyword" or "front end"."""

    value: object
    origin: str


TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
BATCH_KEYS = (TOTAL, MICRO, STEPS)

Settings = dict[str, Setting]  # dotted key -> setting, leaves only


class Fault(NamedTuple):
    """One thing wrong with a config; all of them are raised together."""

    what: str
    why: str
    fix: str
    key: str = ""  # the dotted key at fault, if it is one


class CheckedSettings(NamedTuple):
    """Settings, sorted."""

    honoured: Settings  # dotted keys that are fields
    auto_keys: tuple[str, ...]  # dotted keys of fields that are "auto"
    notices: tuple[str, ...]  # one line for each thing that replaces keys
    faults: tuple[Fault, ...]


# -- reading --


def read_file(path: str | os.PathLike[str]) -> Settings:
    """Read a `ds_config.json` into settings.

    Whole lines beginning with `//` or `#` are comments, as in the files DeepSpeed accepts (it reads Hjson).

    Args:
        path: The file. Its path becomes the origin of every setting.

    Returns:
        The settings of the file.

    Raises:
        ConfigError: The file is missing, no JSON object, or names a key twice.
    """
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, ValueError) as error:  # ValueError: the text is no UTF-8, or the path no path
        raise ConfigError(
            what=f"The config file {name!r} cannot be read: {error}.",
            why="A config is the path of a ds_config.json, a dict, or keywords.",
            fix="Check the path, which is relative to the working directory " + repr(os.getcwd()) + ".",
        ) from error
    text = "\n".join("" if line.lstrip().startswith(("//", "#")) else line for line in lines)
    try:
        content = json.loads(text, object_pairs_hook=_reject_duplicate_keys)
    except _DuplicateKeyError as error:
        numbers = [str(number) for number, line in enumerate(lines, 1) if json.dumps(error.key) in line]
        raise ConfigError(
            what=f"In the config file {name!r} the key {error.key!r} stands twice in one block: "
            f"{error.values[0]!r} and {error.values[1]!r} (it is in lines {', '.join(numbers)}).",
            why="JSON keeps only the last of them, in silence.",
            fix="Remove one.",
        ) from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, blocks nested too deeply
        if not isinstance(error, json.JSONDecodeError):
            raise ConfigError(
                what=f"The config file {name!r} is not valid: {error}.",
                why="The file has the ds_config.json format: one JSON object, with a few blocks in it.",
                fix="Write the file anew.",
            ) from error
        raise ConfigError(
            what=f"The config file {name!r} is not valid JSON: {error.msg} in line {error.lineno}.",
            why="The file is one JSON object; whole lines beginning with // are comments.",
            fix=f"Correct line {error.lineno}, column {error.colno}.",
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            what=f"The config file {name!r} holds a {type(content).__name__}, not an object.",
            why="The file has the ds_config.json format: one JSON object.",
            fix='Write {"zero_optimization": {"stage": 2}}, for example.',
        )
    return flatten(content, name)


def flatten(block: Mapping[str, object], origin: str, prefix: str = "") -> Settings:
    """Turn nested blocks into dotted keys, copying every value.

    None stands for "not given", keys beginning with an underscore are comments, and a scalar for an
    `offload_*` block stands for its device (for `bf16` and `fp16`: for `enabled`).

    Args:
        block: Nested mapping; it is not written to.
        origin: Where it came from, for messages.
        prefix: Dotted key of `block` itself, with a trailing dot; empty for the root.

    Returns:
        Dotted keys and their settings. An empty block is a leaf with the value {}.

    Raises:
        ConfigError: A key is no string, or is given twice (nested and dotted); a value is of a type that JSON
            has no spelling for.
    """
    settings: Settings = {}
    for name, value in block.items():
        if not isinstance(name, str):
            raise ConfigError(
                what=f"The config key {name!r} (from {origin}) under {prefix or 'the top level'} is a "
                f"{type(name).__name__}.",
                why="Keys are names of the ds_config.json schema.",
                fix="Write the key as a string.",
            )
        if name.startswith("_") or value is None:
            continue
        dotted = prefix + name
        if isinstance(value, Mapping) and value:
            found = flatten(value, origin, dotted + ".")
        else:
            dotted += _shorthand_suffix(name, value)
            found = {dotted: Setting(_plain(value, dotted, origin), origin)}
        add_settings(settings, found)
    return settings


def nest(values: Mapping[str, object]) -> dict[str, Any]:
    """Turn dotted keys into nested blocks; the inverse of `flatten`.

    Args:
        values: Dotted keys and their values.

    Returns:
        A new nested dict.
    """
    nested: dict[str, Any] = {}
    for dotted, value in values.items():
        *blocks, name = dotted.split(".")
        block = nested
        for part in blocks:
            block = block.setdefault(part, {})
        block[name] = value
    return nested


def add_settings(settings: Settings, found: Settings) -> None:
    """Add `found` to `settings`, which come from the same origin and so must not say anything twice.

    Args:
        settings: Written to.
        found: What to add.

    Raises:
        ConfigError: A key is in both.
    """
    for dotted in found.keys() & settings.keys():
        raise ConfigError(
            what=f"{dotted} is given twice (from {found[dotted].origin}): {settings[dotted].value!r} and "
            f"{found[dotted].value!r}.",
            why="Only one of them could have an effect.",
            fix="Remove one.",
        )
    settings.update(found)


def read_keywords(keywords: Mapping[str, object], known: frozenset[str]) -> Settings:
    """Place flat keywords in the nested schema: keys of `zero_optimization` may be given without the block.

    Args:
        keywords: As the caller gave them.
        known: Every known dotted key.

    Returns:
        Dotted keys and their settings.
    """
    top_level = {key.partition(".")[0] for key in known}
    in_zero_block = {key.split(".")[1] for key in known if key.startswith(ZERO_BLOCK + ".")}
    settings: Settings = {}
    for name, value in keywords.items():
        is_flat = name in in_zero_block and name not in top_level
        add_settings(settings, flatten({name: value}, "keyword", ZERO_BLOCK + "." if is_flat else ""))
    return settings


# -- judging --


def check_keys(settings: Settings, fields: frozenset[str]) -> CheckedSettings:
    """Sort settings into honoured ones, "auto", replaced ones, and faults.

    Args:
        settings: As read.
        fields: The honoured dotted keys.

    Returns:
        The sorted settings; values of honoured keys are not checked.
    """
    known = fields | KEY_RULES.keys()
    blocks = parent_blocks(known)
    honoured: Settings = {}
    auto_keys: list[str] = []
    replaced: dict[str, list[str]] = {}  # what replaces it -> what was written
    faults: dict[str, Fault] = {}
    for dotted, setting in fold_blocks(settings, known).items():
        value, origin = setting
        rule = KEY_RULES.get(dotted)
        written = f"{dotted} = {value!r} (from {origin})"
        if value == AUTO and dotted in AUTO_HINTS:
            auto_keys += [dotted] if dotted in fields else []
        elif value == AUTO and dotted in known:
            faults[dotted] = Fault(
                f"{written} stays unresolved.",
                "No front end has a value for this key.",
                "Write a value; or remove the key, which gives it its default."
                if dotted in fields
                else "Write a value, or remove the key.",
                dotted,
            )
        elif rule is not None and not rule.asks_for_nothing(value):
            if rule.verdict == "replaced":
                replaced.setdefault(rule.reason, []).append(written)
            else:
                faults[dotted] = Fault(f"{written} is refused.", rule.reason, rule.fix, dotted)
        elif dotted in fields:
            honoured[dotted] = setting
        elif dotted in blocks and value != {}:
            fix = f"Write {dotted.rpartition('.')[2]!r}: {{...}} with the keys of that block."
            faults[dotted] = Fault(f"{written} is not a block.", "This key holds other keys.", fix, dotted)
        elif dotted not in known and dotted not in blocks:
            unknown = first_unknown_part(dotted, known)
            faults[unknown] = _unknown_fault(unknown, origin, known)
    notices = tuple(f"{', '.join(written)}: replaced. Here: {by}." for by, written in replaced.items())
    return CheckedSettings(honoured, tuple(auto_keys), notices, tuple(faults.values()))


def fold_blocks(settings: Settings, known: frozenset[str]) -> Settings:
    """Fold the settings inside a block that has one rule (such as `tensorboard`) back into one setting.

    Args:
        settings: As read.
        known: Every known dotted key.

    Returns:
        Settings of which each has a key or rule of its own, or is unknown.
    """
    folded: Settings = {}
    for dotted, setting in settings.items():
        parts = dotted.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        owner = next((prefix for prefix in prefixes if prefix in known), dotted)
        if owner == dotted:
            folded[owner] = setting
            continue
        so_far = folded[owner].value if owner in folded else {}
        members = so_far if isinstance(so_far, dict) else {}
        folded[owner] = Setting({**members, dotted[len(owner) + 1 :]: setting.value}, setting.origin)
    return folded


def complete_batch_numbers(values: dict[str, object], world_size: int) -> list[Fault]:
    """Derive the missing batch numbers, or say why they contradict one another.

    Args:
        values: Dotted honoured keys and their values; the derived numbers are added.
        world_size: Number of ranks that share the batch.

    Returns:
        No fault, or one that names the three numbers, the world size and what to change.
    """
    given = {key: values[key] for key in BATCH_KEYS if key in values}
    numbers = {
        key: int(value)
        for key, value in given.items()
        if isinstance(value, (int, float)) and _is_count(value)
    }
    if not numbers or len(numbers) < len(given):
        return []  # nothing to derive, or a wrong value that the field's own check reports
    if TOTAL not in numbers:
        numbers.setdefault(STEPS, 1)
        if MICRO in numbers:
            numbers[TOTAL] = numbers[MICRO] * numbers[STEPS] * world_size
    elif len(numbers) == 1:
        numbers[STEPS] = 1
    divisor = numbers.get(MICRO, 1) * numbers.get(STEPS, 1) * world_size
    total = numbers.get(TOTAL, divisor)
    is_complete = len(numbers) == len(BATCH_KEYS)
    if total % divisor or (is_complete and total != divisor):
        return [_batch_fault(given, numbers, world_size)]
    if TOTAL in numbers:
        numbers.setdefault(MICRO, total // divisor)
        numbers.setdefault(STEPS, total // divisor)
    values |= numbers
    return []


def error_of(faults: list[Fault]) -> ConfigError:
    """Build one error out of all faults, numbered if there are several.

    Args:
        faults: At least one.

    Returns:
        The error, to be raised.
    """
    if len(faults) == 1:
        return ConfigError(what=faults[0].what, why=faults[0].why, fix=faults[0].fix)
    numbered = [Fault(*(f"({number}) {part}" for part in fault)) for number, fault in enumerate(faults, 1)]
    return ConfigError(
        what=f"The config has {len(faults)} faults. " + " ".join(fault.what for fault in numbered),
        why=" ".join(fault.why for fault in numbered),
        fix=" ".join(fault.fix for fault in numbered),
    )


def _batch_fault(given: Mapping[str, object], numbers: Mapping[str, int], world_size: int) -> Fault:
    said = ", ".join(f"{key} = {given.get(key, 'not given')}" for key in BATCH_KEYS)
    total, micro, steps = numbers[TOTAL], numbers.get(MICRO, 1), numbers.get(STEPS, 1)
    product = micro * steps * world_size
    is_complete = MICRO in numbers and STEPS in numbers
    changes = [f"{TOTAL} to {product if is_complete else max(1, round(total / product)) * product}"]
    if is_complete and total % (micro * world_size) == 0:
        changes.append(f"{STEPS} to {total // (micro * world_size)}")
    if is_complete and total % (steps * world_size) == 0:
        changes.append(f"{MICRO} to {total // (steps * world_size)}")
    return Fault(
        f"The batch numbers do not fit world size {world_size}: {said}.",
        f"{TOTAL} = {MICRO} x {STEPS} x world size, which "
        f"{'makes' if is_complete else 'needs a multiple of'} {product}, not {total}.",
        f"Set {', or '.join(changes)}; or leave {TOTAL} out.",
    )


def _unknown_fault(dotted: str, origin: str, known: frozenset[str]) -> Fault:
    nearest = nearest_known(dotted, known)
    return Fault(
        f"Unknown config key {dotted} (from {origin}).",
        "A key that is not known would be ignored in silence.",
        f"Did you mean {nearest}?" if nearest else "Remove it; a leading underscore makes a key a comment.",
        dotted,
    )


def _plain(value: object, dotted: str, origin: str) -> object:
    """Return a copy of a value made of what JSON has, and of paths; refuse anything else.

    A tensor or an array answers comparisons by another one, and a lock cannot be copied.
    """
    if isinstance(value, Mapping):
        return {name: _plain(part, dotted, origin) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_plain(part, dotted, origin) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if value is None or isinstance(value, (str, int, float, os.PathLike)):
        return value
    raise ConfigError(
        what=f"{dotted} = {value!r} (from {origin}) is not valid: it is of type {type(value).__name__}.",
        why="Values are those of a ds_config.json: numbers, true and false, strings, lists and blocks.",
        fix=f"Write {dotted} as one of these (a tensor's or an array's number by .item()), or remove it.",
    )


def _is_count(value: object) -> bool:
    """Tell whether a value is a whole number above 0, however it is spelled."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return value >= 1 and (isinstance(value, int) or value.is_integer())


def _shorthand_suffix(name: str, value: object) -> str:
    return f".{SHORTHAND_FIELD[name]}" if name in SHORTHAND_FIELD and isinstance(value, (str, bool)) else ""


class _DuplicateKeyError(Exception):
    """Two keys of one name in one block of a file."""

    def __init__(self, key: str, values: tuple[object, object]) -> None:
        super().__init__(key)
        self.key = key
        self.values = values


def _reject_duplicate_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    block: dict[str, object] = {}
    for name, value in pairs:
        if name in block and not name.startswith("_"):
            raise _DuplicateKeyError(name, (block[name], value))
        block[name] = value
    return block
