"""PEFT: adapters on a model that an engine shards, saved and loaded as PEFT does, and AdaLoRA's ranks.

Training needs nothing from here. A script that is changed imports these; under `ZeroAccelerator` and the
Trainer AdaLoRA's own `update_and_allocate` works as it is. Nothing of PEFT's is patched by importing this.
"""

from __future__ import annotations

from zero_strategy.peft.adalora import update_and_allocate
from zero_strategy.peft.adapters import adapter_state_dict, load_adapter, save_adapters
from zero_strategy.peft.starting import start_adapters

__all__ = ["adapter_state_dict", "load_adapter", "save_adapters", "start_adapters", "update_and_allocate"]
