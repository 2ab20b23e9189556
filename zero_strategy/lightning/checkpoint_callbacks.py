"""What Lightning's ModelCheckpoint must wait with, or must know, while a checkpoint is being written.

It goes by what it finds in the file system the moment a save has returned. An asynchronous save has not put
its folder there yet, so a link to it would lead nowhere, also after a crash, and its name would look free.
Used by the checkpoint hooks of the Trainer; it knows nothing of what is in a checkpoint. Deletions are the
strategy's own `remove_checkpoint`.

[Note: Methods of a callback]
ModelCheckpoint makes its link, and asks for a name that is free, without a word to the strategy. So two of
its methods are replaced on the callback itself while a fit with asynchronous saves runs. Both are called on
all ranks.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from zero_strategy.checkpoint.saves import Saves
from zero_strategy.lightning import checkpoint_files

_LINK, _EXISTS = "_link_checkpoint", "file_exists"


class CheckpointCallbacks:
    """What a fit's ModelCheckpoints have in place of two methods. See [Note: Methods of a callback]."""

    def __init__(self, trainer: Any, namespace: str, saves: Saves) -> None:
        """Replace them.

        Args:
            trainer: The Trainer, its callbacks complete.
            namespace: "lightning.pytorch" or "pytorch_lightning".
            saves: Tells which save goes on.
        """
        stock = importlib.import_module(f"{namespace}.callbacks").ModelCheckpoint
        self._saves = saves
        self._callbacks = [found for found in trainer.checkpoint_callbacks if isinstance(found, stock)]
        for callback in self._callbacks:
            setattr(callback, _EXISTS, partial(self._exists, getattr(callback, _EXISTS)))
            setattr(callback, _LINK, self._link)

    def end(self) -> None:
        """Give the callbacks their own methods back."""
        for callback in self._callbacks:
            for name in (_EXISTS, _LINK):
                vars(callback).pop(name, None)
        self._callbacks = []

    def _link(self, trainer: Any, filepath: str, linkpath: str) -> None:
        """Link to a checkpoint when it is complete; until then the link leads to what it led to."""
        if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
            # Before the checkpoint is deleted that the link leads to now.
            self._saves.after(partial(checkpoint_files.link, filepath, linkpath), comes_first=True)
        trainer.strategy.barrier()

    def _exists(self, stock: Callable[[str, Any], bool], filepath: str, trainer: Any) -> bool:
        """Tell whether a name is taken, or will be when the save that goes on is complete."""
        pending = self._saves.path
        will_exist = pending is not None and os.path.abspath(filepath) == os.path.abspath(pending)
        return stock(filepath, trainer) or will_exist


def is_amid_fit(trainer: Any, path: Any) -> bool:
    """Whether training goes on after a save, so that it need not be waited for.

    Args:
        trainer: The Trainer. A run that has ended, or ends by an exception, makes no further step.
        path: What is saved. SLURM ends the job as soon as Lightning has saved to `hpc_ckpt_N.ckpt`.
    """
    is_last = os.path.basename(os.fspath(path)).startswith("hpc_ckpt_")
    return trainer.state.fn == "fit" and trainer.state.status == "running" and not is_last
