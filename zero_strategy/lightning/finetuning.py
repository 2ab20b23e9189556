"""Lightning's finetuning callbacks, which add param groups during a run, when such a run is resumed.

They put the groups back in `on_fit_start`, from state of their own that other strategies have loaded by then.
Here weights need the engine, so everything is loaded later, and they are called again. Called by the
checkpoint hooks; it must not know how a checkpoint is read.
"""

from __future__ import annotations

import importlib
from typing import Any


def restore_param_groups(trainer: Any, namespace: str) -> None:
    """Let the finetuning callbacks that have just loaded their state put the param groups back. Collective.

    Args:
        trainer: Whose callbacks.
        namespace: Of the Trainer's Lightning, such as "pytorch_lightning".
    """
    finetuning = importlib.import_module(f"{namespace}.callbacks").BaseFinetuning
    for callback in trainer.callbacks:
        if isinstance(callback, finetuning) and callback._restarting:
            callback.on_fit_start(trainer, trainer.lightning_module)
