"""The front end for transformers: `Trainer` and `Seq2SeqTrainer` on sharded models, with ZeRO stages 0 to 3.

    class MyTrainer(ZeroTrainerMixin, Trainer): ...

    MyTrainer(model, args, train_dataset=data, zero_plugin=ZeroPlugin(stage=3)).train()

For scripts that are not changed there are `python -m zero_strategy.run` and `zero-strategy launch`.

Modules, in the order in which they may import one another:
    upstream        every name of transformers' that is rebound or taken for granted
    plugin          what is sharded, agreed with the `TrainingArguments`
    accelerator     the Accelerator that a Trainer makes
    saving          what a Trainer saves and loads
    arguments       TrainingArguments that take deepspeed= without deepspeed
    configured      the optimizer and the schedule that a config describes
    methods         what stands in for methods of Trainer
    trainer         a mixin for one's own Trainer
    recorded        tensors without values that remember how these come out of files
    stored_params   the parameters of a model that are in files
    loading         from_pretrained over them, so that no rank holds a copy
    rebinding       puts ours under transformers' names, when asked to
"""

import importlib
from typing import TYPE_CHECKING, Any

from zero_strategy.accelerate.plugin import ZeroPlugin

if TYPE_CHECKING:
    from zero_strategy.transformers.arguments import ZeroArgumentsMixin
    from zero_strategy.transformers.loading import sharded_from_pretrained
    from zero_strategy.transformers.trainer import ZeroTrainerMixin

__all__ = ["ZeroArgumentsMixin", "ZeroPlugin", "ZeroTrainerMixin", "sharded_from_pretrained"]
_HOMES = {
    "ZeroArgumentsMixin": "arguments",
    "ZeroTrainerMixin": "trainer",
    "sharded_from_pretrained": "loading",
}


def __getattr__(name: str) -> Any:
    # Not above: `rebinding` must be importable before the script has imported transformers.
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
