"""The command `zero-strategy`: what it understands and how it reports.

Owns argument parsing, exit codes and what is printed; the work is done elsewhere, and imported only when a
command needs it, so that `--help` answers at once. A user's mistake ends in one message with what, why and
fix on stderr and exit code 2, without a traceback.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zero_strategy.errors import ConfigError, ZeroError

if TYPE_CHECKING:
    import torch

EXIT_OK, EXIT_ERROR = 0, 2  # 2 is what argparse itself uses
MAX_LISTED_PARAMS = 40  # lines; a screenful, `--all` shows the rest

CHECKPOINT_HELP = "the checkpoint's folder, or one of several with a file `latest`; only read"

_DTYPE_SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
}
_SIZE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

_CONSOLIDATE_EXAMPLES = """
examples:
  zero-strategy consolidate runs/step-1000 exported
  zero-strategy consolidate runs/step-1000 exported --dtype bf16 --hf-files my-tokenizer
  zero-strategy consolidate runs/step-1000 exported --strip-prefix model. --max-shard-size 2GB
  zero-strategy consolidate runs/step-1000 exported --format torch

Then, without zero_strategy:
  AutoModelForCausalLM.from_pretrained("exported")
  model.load_state_dict(torch.load("exported/pytorch_model.bin", mmap=True))
"""
_INSPECT_EXAMPLES = """
examples:
  zero-strategy inspect runs/step-1000
  zero-strategy inspect runs
  zero-strategy inspect runs/step-1000 --json
"""
_VERIFY_EXAMPLES = """
examples:
  zero-strategy verify runs/step-1000
  zero-strategy verify runs || echo "the latest checkpoint is damaged"
"""
_IMPORT_EXAMPLES = """
examples:
  zero-strategy import deepspeed-run imported
  zero-strategy import deepspeed-run/global_step500 imported
  zero-strategy import deepspeed-run imported --tag global_step400 --optimizer AdamW
  zero-strategy import deepspeed-run imported --weights-only

Then, at any number of ranks and any stage, with the same model and optimizer:
  extra = engine.load_checkpoint("imported")
"""
_EXPLAIN_EXAMPLES = """
examples:
  zero-strategy explain ds_config.json
  zero-strategy explain ds_config.json --world-size 8
  zero-strategy explain ds_config.json --json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Without the program's name; None: those of the process.

    Returns:
        The exit code: 0, or 2 after a mistake that was explained on stderr.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if given[:1] == ["launch"]:  # its arguments are Accelerate's, and parsed there
            return _launch(given[1:])
        parsed = _build_parser().parse_args(given)
        return int(parsed.run(parsed))  # each command sets its own `run`, which returns the exit code
    except ZeroError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except BrokenPipeError:
        # `zero-strategy inspect ... | head`: no mistake. Closing here keeps the interpreter quiet about it.
        sys.stderr.close()
        return EXIT_OK


# -- commands --


def _consolidate(parsed: argparse.Namespace) -> int:
    from zero_strategy.checkpoint.consolidate import consolidate
    from zero_strategy.checkpoint.export import ExportOptions

    options = ExportOptions(
        dtype=_parse_dtype(parsed.dtype) if parsed.dtype else None,
        max_shard_size_bytes=parse_size_bytes(parsed.max_shard_size),
        trainable_only=parsed.trainable_only,
        strip_prefix=parsed.strip_prefix,
        hf_files=parsed.hf_files,
        force=parsed.force,
        format=parsed.format,
    )
    report = consolidate(parsed.checkpoint, parsed.out, options)
    print(f"wrote {report.num_tensors} tensors, {report.num_bytes:,} bytes, to {report.out}")
    for name in report.files:
        print(f"  {name}")
    if report.tied:
        print(f"tied, written once: {', '.join(f'{alias} = {name}' for alias, name in report.tied.items())}")
    if report.left_out:
        print(f"left out, as outside the prefix or no tensor: {', '.join(report.left_out)}")
    if "config.json" not in report.files:
        print("no config.json: these are not a Hugging Face model's own names; --hf-files can supply one")
    return EXIT_OK


def _inspect(parsed: argparse.Namespace) -> int:
    from zero_strategy.checkpoint.format import CheckpointReader
    from zero_strategy.checkpoint.inspection import render, summarize

    with CheckpointReader(parsed.checkpoint) as reader:
        if parsed.json:
            summary = summarize(reader)._asdict()
            summary["optimizers"] = [optimizer._asdict() for optimizer in summary["optimizers"]]
            print(json.dumps({"folder": str(reader.folder), **summary}, indent=2))
        else:
            print(render(reader, max_params=None if parsed.all else MAX_LISTED_PARAMS))
    return EXIT_OK


def _verify(parsed: argparse.Namespace) -> int:
    from zero_strategy.checkpoint.format import CheckpointReader
    from zero_strategy.checkpoint.inspection import find_damage

    with CheckpointReader(parsed.checkpoint, check_files=False) as reader:
        damage = find_damage(reader)
    num_bytes = sum(record.num_bytes for record in reader.manifest.files.values())
    if parsed.json:
        found = [part._asdict() for part in damage]
        print(json.dumps({"folder": str(reader.folder), "num_bytes": num_bytes, "damage": found}, indent=2))
    elif not damage:
        print(f"{reader.folder}: all {num_bytes:,} bytes are as they were written")
    for part in damage:
        print(f"damaged: {part}", file=sys.stderr)
    return EXIT_ERROR if damage else EXIT_OK


def _import(parsed: argparse.Namespace) -> int:
    from zero_strategy.checkpoint.importers.run import ImportOptions, import_checkpoint

    options = ImportOptions(
        tag=parsed.tag,
        optimizer=parsed.optimizer,
        weights_only=parsed.weights_only,
        force=parsed.force,
        drop_unknown=parsed.drop_unknown,
    )
    report = import_checkpoint(parsed.source, parsed.out, options)
    print(f"read {', '.join(f'{key} {value}' for key, value in report.source.items())}")
    print(f"wrote {report.num_params} parameters, {report.num_bytes:,} bytes, to {report.out}")
    print(f"optimizer: {report.optimizer or 'none, weights only'}")
    for note in report.notes:
        print(f"note: {note}")
    return EXIT_OK


def _explain(parsed: argparse.Namespace) -> int:
    from zero_strategy.config_explain import config_page, explain, render
    from zero_strategy.config_source import read_file

    if parsed.keys:
        print(config_page(), end="")
        return EXIT_OK
    explanation = explain(read_file(parsed.config), parsed.world_size)
    if parsed.json:
        content = {"loads": explanation.loads, "keys": [line._asdict() for line in explanation.lines]}
        content["problems"] = [fault._asdict() for fault in explanation.problems]
        print(json.dumps(content, indent=2))
    else:
        print(render(explanation))
    return EXIT_OK if explanation.loads else EXIT_ERROR


def _launch(arguments: list[str]) -> int:
    from zero_strategy.accelerate.launch import launch

    return launch(arguments)


# -- arguments --


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zero-strategy",
        description="Work with checkpoints and configs of zero_strategy, offline and without a GPU; start "
        "scripts.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_consolidate(commands)
    _add_inspect(commands)
    _add_verify(commands)
    _add_import(commands)
    _add_explain(commands)
    commands.add_parser(
        "launch",
        help="start a script that uses Accelerate, sharded; takes the arguments and yaml files of "
        "`accelerate launch`, those for DeepSpeed too",
    )
    return parser


def _add_consolidate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "consolidate",
        help="write a checkpoint as one folder of whole weights",
        description="Write a sharded checkpoint as a folder that transformers' from_pretrained() loads, or "
        "torch.load(). Needs less than 64 MiB of memory, whatever the size of the model.",
        epilog=_CONSOLIDATE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("checkpoint", metavar="CKPT", type=Path, help=CHECKPOINT_HELP)
    command.add_argument(
        "out", metavar="OUT", type=Path, help="the folder to write: new, empty, or an earlier output of CKPT"
    )
    command.add_argument(
        "--format",
        choices=("safetensors", "torch"),
        default="safetensors",
        help="of the weights: model.safetensors (default), or pytorch_model.bin with every name of the model",
    )
    command.add_argument("--dtype", help="of the weights: bf16, fp16, fp32 (default: each parameter's own)")
    command.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file (default: 5GB)")
    command.add_argument(
        "--trainable-only", action="store_true", help="leave frozen parameters and buffers out"
    )
    command.add_argument(
        "--strip-prefix",
        metavar="P",
        help="write what lies below this prefix of parameter names, without it (default: where the Hugging "
        "Face model was found, for torch none; '' writes everything)",
    )
    command.add_argument(
        "--hf-files",
        metavar="FOLDER",
        type=Path,
        help="copy tokenizer and similar files from here, no weights",
    )
    command.add_argument("--force", action="store_true", help="write into a folder that holds anything else")
    command.set_defaults(run=_consolidate)


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "inspect",
        help="show what a checkpoint holds",
        description="Show parameters, optimizers and files of a checkpoint. All file headers are checked.",
        epilog=_INSPECT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("checkpoint", metavar="CKPT", type=Path, help=CHECKPOINT_HELP)
    command.add_argument("--json", action="store_true", help="print a JSON object instead of a table")
    command.add_argument("--all", action="store_true", help=f"list more than {MAX_LISTED_PARAMS} parameters")
    command.set_defaults(run=_inspect)


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "verify",
        help="read every byte of a checkpoint and compare all checksums",
        description="Say which elements of which tensor in which file are not as they were written. The exit "
        "code is 2 if there are any.",
        epilog=_VERIFY_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("checkpoint", metavar="CKPT", type=Path, help=CHECKPOINT_HELP)
    command.add_argument("--json", action="store_true", help="print a JSON object")
    command.set_defaults(run=_verify)


def _add_import(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "import",
        help="turn a checkpoint of DeepSpeed into one of zero_strategy",
        description="Turn a checkpoint of DeepSpeed (ZeRO stage 1, 2 or 3, any number of ranks) into a "
        "folder that engine.load_checkpoint takes: weights, frozen ones too, buffers, optimizer, loss scale. "
        "DeepSpeed need not be installed, and nothing that the files name is run.",
        epilog=_IMPORT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "source", metavar="SRC", type=Path, help="the checkpoint folder, or the folder of a tag; only read"
    )
    command.add_argument(
        "out", metavar="OUT", type=Path, help="the folder to write: new, empty, or an earlier output of SRC"
    )
    command.add_argument("--tag", help="the save in SRC to take (default: the one its file 'latest' names)")
    command.add_argument(
        "--optimizer",
        metavar="CLASS",
        help="the class of the optimizer that goes on, such as AdamW (default: as the checkpoint says)",
    )
    command.add_argument("--weights-only", action="store_true", help="leave the optimizer out")
    command.add_argument("--force", action="store_true", help="replace another checkpoint in OUT")
    command.add_argument(
        "--drop-unknown",
        action="store_true",
        help="leave out objects of unknown classes, say in client_state, instead of refusing the file",
    )
    command.set_defaults(run=_import)


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "explain",
        help="say what becomes of every key of a ds_config.json",
        description="Say of every key of a ds_config.json whether it is honoured, replaced (by what), "
        "without effect or refused (why). The exit code is 2 if the file would not load.",
        epilog=_EXPLAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("config", metavar="CONFIG", nargs="?", type=Path, help="the file; only read")
    what.add_argument("--keys", action="store_true", help="say it of all keys there are, as Markdown")
    command.add_argument(
        "--world-size",
        type=_parse_world_size,
        default=0,
        metavar="N",
        help="check the batch numbers for N ranks",
    )
    command.add_argument("--json", action="store_true", help="print a JSON object")
    command.set_defaults(run=_explain)


def _parse_world_size(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks: write 1 or more")
    return int(text)


def parse_size_bytes(text: str) -> int:
    """Read a size: "5GB" (powers of ten), "512MiB" (powers of two), "1000000" (bytes).

    Raises:
        ConfigError: It is not a positive size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if (
        match is None
        or match[2] not in _SIZE_UNITS
        or not (size := int(float(match[1]) * _SIZE_UNITS[match[2]]))
    ):
        raise ConfigError(
            what=f"{text!r} is not a size.",
            why="A size is a positive number with a unit: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB.",
            fix="Write, for example, --max-shard-size 5GB.",
        )
    return size


def _parse_dtype(text: str) -> torch.dtype:
    from zero_strategy.checkpoint.elements import DTYPES

    dtype = DTYPES.get(_DTYPE_SHORT.get(text.lower(), text.lower()))
    if dtype is None or not dtype.is_floating_point or dtype.itemsize < 2:  # 8 bits need scales
        raise ConfigError(
            what=f"{text!r} is not a dtype that weights can be written in.",
            why="Weights are floating-point numbers of a width that safetensors and torch both have.",
            fix="Use bf16, fp16 or fp32, or leave --dtype out to keep each parameter's own.",
        )
    return dtype
