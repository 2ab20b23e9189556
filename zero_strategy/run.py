"""`python -m zero_strategy.run train.py`: runs a script that uses Accelerate, unchanged, on sharded models.

To be started by `accelerate launch ... -m zero_strategy.run train.py`, by torchrun in the same way, by
`zero-strategy launch`, or alone. It finds out what its launcher was asked for, says what Accelerate's
launcher leaves out, puts `ZeroAccelerator` under Accelerate's name, and runs the script as Python would.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from zero_strategy.errors import ZeroError
from zero_strategy.log import get_launched_world_size, log_event

EXIT_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a script.

    Args:
        arguments: Without the program's name; None: those of the process.

    Returns:
        The exit code: 0, or 2 after a mistake that was explained on stderr. What the script raises, its own
        exit code included, is raised.
    """
    parser = _build_parser()
    parsed = parser.parse_args(arguments)
    if not parsed.script:
        parser.error("name the script to run")
    if not parsed.module and not Path(parsed.script[0]).is_file():
        parser.error(f"there is no script {parsed.script[0]!r}")
    try:
        _prepare(parsed)
    except ZeroError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    _run(parsed)
    from zero_strategy.accelerate.rebinding import was_used

    if not was_used():
        log_event(
            f"{parsed.script[0]} has made no Accelerator, so nothing was sharded. One that it has imported "
            f"under another name, or from a copy, cannot be replaced: use zero_strategy.accelerate."
        )
    return 0


def _prepare(parsed: argparse.Namespace) -> None:
    """Say to Accelerate what its launcher leaves out, and put ours in its place."""
    import torch

    from zero_strategy.accelerate import environment, rebinding
    from zero_strategy.accelerate.launch_block import FILE_KEY, Launch
    from zero_strategy.accelerate.launcher import find_launcher
    from zero_strategy.accelerate.plugin import ZeroPlugin
    from zero_strategy.transformers import rebinding as trainers

    launch = environment.find_launch() or find_launcher()
    options = {"zero_stage": parsed.zero_stage, FILE_KEY: parsed.config}
    given = {key: value for key, value in options.items() if value is not None}
    if given and launch is None:
        launch = Launch(given, "command line", None)
    elif given and launch is not None:
        launch = launch._replace(block={**launch.block, **given})
    environment.check_num_processes(launch)
    environment.drop_deepspeed()
    if launch is not None:
        ZeroPlugin.of_launch(launch)  # raises before the script begins
        environment.pass_on(launch)
    if get_launched_world_size() > 1 and not torch.accelerator.is_available():
        environment.use_cpu()
    rebinding.install()
    trainers.install()


def _run(parsed: argparse.Namespace) -> None:
    """Run the script as `python script.py` or `python -m module` would."""
    name, *rest = parsed.script
    if parsed.module:
        sys.argv = [name, *rest]
        sys.path[0] = os.getcwd()
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    sys.argv = [name, *rest]
    sys.path[0] = str(Path(name).resolve().parent)
    runpy.run_path(name, run_name="__main__")


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zero_strategy.run",
        description="Run a script that uses Accelerate, unchanged, on sharded models.",
    )
    parser.add_argument(
        "--stage",
        dest="zero_stage",
        type=int,
        choices=range(4),
        help="ZeRO stage (default: the launcher's, or 3)",
    )
    parser.add_argument("--config", metavar="FILE", help="a ds_config.json")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", nargs=argparse.REMAINDER, help="and its arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
