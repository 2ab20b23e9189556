"""What becomes of keys: of those in a file, for `zero-strategy explain`, and of all, for docs/config.md.

Reads the schema and the table of keys, and adds no knowledge of its own. Called by the command line and by
the test that holds the page against the table. Must not know engines or models.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

from zero_strategy.config import DEFAULTS, FIELD_KEYS, FIELDS, KNOWN_KEYS, examine
from zero_strategy.config_blocks import UNWRITTEN
from zero_strategy.config_keys import AUTO, AUTO_HINTS, KEY_RULES, STAGES_OF_KEY, ZERO_BLOCK
from zero_strategy.config_source import (
    BATCH_KEYS,
    Fault,
    Settings,
    complete_batch_numbers,
    fold_blocks,
)

Verdict = Literal["honoured", "replaced", "no effect", "auto", "refused", "fault"]
DOES_NOT_LOAD = ("refused", "fault")

_PAGE_HEAD = """# Keys of `ds_config.json`

Every key of DeepSpeed's configuration reference, and a few of our own. *Honoured*: it does what the last
column says. *Replaced*: it loads, and one line of the log says what does its work here. *Refused*: loading is
an error with this reason. A key that is not listed is an error that names the nearest known one.
`zero-strategy explain ds_config.json` says the same of the keys of a file. This page is written by
`zero-strategy explain --keys`.

`"auto"` may stand wherever a front end (the Trainer, Fabric, Accelerate) has a value of its own; without one
it is an error that says what to write. Keys that begin with an underscore are comments. `"bf16": true` stands
for `{"enabled": true}`. The batch numbers are checked when the number of ranks is known: by the engine, a
front end, or `explain --world-size N`.
"""


class KeyLine(NamedTuple):
    """What becomes of one key of a file."""

    key: str
    value: object
    verdict: Verdict
    text: str


class Explanation(NamedTuple):
    """What becomes of a file."""

    lines: list[KeyLine]
    problems: list[Fault]  # what no one key is to blame for

    @property
    def loads(self) -> bool:
        """Whether the file loads, under a front end if it says "auto"."""
        return not self.problems and all(line.verdict not in DOES_NOT_LOAD for line in self.lines)


def explain(settings: Settings, world_size: int = 0) -> Explanation:
    """Say of each setting what becomes of it.

    Args:
        settings: As read from a file.
        world_size: Number of ranks; 0: unknown, and the batch numbers are not checked.

    Returns:
        A line per setting, in the order of the file, and the rest of what is wrong.
    """
    examination = examine(settings)
    by_key = {fault.key: fault for fault in examination.faults if fault.key}
    problems = [fault for fault in examination.faults if not fault.key]
    if world_size:
        written = {key: setting.value for key, setting in settings.items() if setting.value != AUTO}
        problems += complete_batch_numbers(written, world_size)
    # What has no effect is known of valid settings only.
    faulty = {key for key in settings for name in _prefixes(key) if name in by_key}
    idle = examine({key: setting for key, setting in settings.items() if key not in faulty}).idle
    lines = []
    for key, (value, _) in fold_blocks(settings, KNOWN_KEYS).items():
        fault = next((by_key[name] for name in _prefixes(key) if name in by_key), None)
        verdict, text = _judge(key, value, fault, idle.get(key))
        lines.append(KeyLine(key, value, verdict, text))
    return Explanation(lines, problems)


def render(explanation: Explanation) -> str:
    """Lay an explanation out as plain text, a line or two per key."""
    lines = []
    for key, value, verdict, text in explanation.lines:
        lines += [f"{verdict:<10}{key} = {json.dumps(value)}", f"{'':<10}{text}"]
    for fault in explanation.problems:
        lines += [f"{'fault':<10}{fault.what}", f"{'':<10}{fault.why} {fault.fix}"]
    return "\n".join([*lines, _summary(explanation)])


def _summary(explanation: Explanation) -> str:
    """Say in one line how many keys there are of each verdict, and whether the file loads."""
    counts = Counter(line.verdict for line in explanation.lines)
    counts["fault"] += len(explanation.problems)
    found = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    ending = "The file loads." if explanation.loads else "The file does not load."
    return f"{len(explanation.lines)} keys: {found}. {ending}" if found else f"No keys. {ending}"


def config_page() -> str:
    """Return docs/config.md: all keys, block by block."""
    keys = dict.fromkeys((*FIELDS, *KEY_RULES))
    blocks: dict[str, list[str]] = {"": []}
    for key in keys:
        blocks.setdefault(_block_of(key), []).append(key)
    parts = [_PAGE_HEAD]
    for block, members in blocks.items():
        parts += [
            f"\n## {f'`{block}`' if block else 'Top level'}\n\n",
            "| key | | default | |\n|---|---|---|---|\n",
        ]
        parts += [_row(key, key.removeprefix(f"{block}.")) for key in sorted(members, key=_rank)]
    return "".join(parts)


# -- helpers --


def _judge(key: str, value: object, fault: Fault | None, idle: str | None) -> tuple[Verdict, str]:
    rule = KEY_RULES.get(key)
    if fault is not None and rule is not None and rule.verdict == "refused":
        return "refused", f"{fault.why} {fault.fix}"
    if fault is not None:
        return "fault", f"{fault.what} {fault.why} {fault.fix}"
    if value == AUTO:
        return "auto", f"A front end has a value for it; without one write {AUTO_HINTS[key]}."
    if idle is not None:
        return "no effect", f"It {idle}."
    if rule is None:
        return "honoured", _text_of(key) if key in FIELDS else "An empty block."
    if rule.asks_for_nothing(value):
        return "no effect", "It asks for what happens anyway."
    return "replaced", f"Here: {rule.reason}."


def _prefixes(key: str) -> Iterable[str]:
    parts = key.split(".")
    return (".".join(parts[:length]) for length in range(len(parts), 0, -1))


def _block_of(key: str) -> str:
    block = key.rpartition(".")[0]
    return ZERO_BLOCK if block.startswith(ZERO_BLOCK) else block


def _rank(key: str) -> tuple[int, str]:
    """Honoured keys first, in the order of the schema; then the others by verdict and name."""
    if key in FIELD_KEYS:
        return list(FIELDS).index(key), ""
    return len(FIELDS) + (KEY_RULES[key].verdict == "refused"), key


def _text_of(key: str) -> str:
    return " ".join((FIELDS[key].description or "").split())


def _row(key: str, name: str) -> str:
    if key in FIELD_KEYS:
        default = DEFAULTS[key]
        is_left_out = default in UNWRITTEN or key in BATCH_KEYS  # which are 1 because nobody said
        shown = "left out" if is_left_out else f"`{json.dumps(default)}`"
        stages = STAGES_OF_KEY.get(key)
        only = f" (Stages: {', '.join(map(str, stages))}.)" if stages else ""
        return f"| `{name}` | honoured | {shown} | {_text_of(key)}{only} |\n"
    rule = KEY_RULES[key]
    text = f"Here: {rule.reason}." if rule.verdict == "replaced" else f"{rule.reason} {rule.fix}"
    return f"| `{name}` | {rule.verdict} | | {text} |\n"
