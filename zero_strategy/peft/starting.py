"""First values for adapters that were put around a model whose weights are still in files.

PEFT moves an adapter to the device of its layer, so on meta what it started with is gone. Its own layers are
asked to start again, in real memory. An adapter that starts from the weights of its layer cannot be helped.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel
from peft.tuners.adalora.layer import AdaLoraLayer
from peft.tuners.ia3.layer import IA3Layer
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from zero_strategy import first_weights
from zero_strategy.compat import give_memory
from zero_strategy.errors import ConfigError

_FROM_NOTHING = (True, False, "gaussian")  # values of init_lora_weights that look at no weight


def start_adapters(model: nn.Module) -> None:
    """Start the adapters of a model of `sharded_from_pretrained` as PEFT does, before it is sharded.

    LoRA, AdaLoRA and IA3 get first values, modules to save those of the modules they are copies of. The
    values may differ between ranks: those of rank 0 count. Adapters that have values keep them.
    `ZeroAccelerator` and the Trainer call this by themselves.

    Args:
        model: The `PeftModel`, or what is around it.

    Raises:
        ConfigError: An adapter starts from the weights of its layer (DoRA, PiSSA, trained tokens, ...).
    """
    configs: dict[str, Any] = next((m.peft_config for m in model.modules() if isinstance(m, PeftModel)), {})
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            _share_values(model, module)
        elif isinstance(module, BaseTunerLayer):
            for adapter in sorted(module._get_available_adapters()):
                if _is_empty(module, adapter):
                    _start(name, module, adapter, configs.get(adapter))


# -- helpers --


def _start(name: str, layer: Any, adapter: str, config: Any) -> None:
    init = getattr(config, "init_lora_weights", True)
    is_lora = isinstance(layer, LoraLayer) and not isinstance(layer, AdaLoraLayer)
    if is_lora and (init not in _FROM_NOTHING or adapter in layer.lora_variant):
        raise _needs_weights(
            name, adapter, "DoRA or another variant" if init in _FROM_NOTHING else repr(init)
        )
    if not isinstance(layer, LoraLayer | IA3Layer):
        raise _needs_weights(name, adapter, type(layer).__name__)
    for held in _held(layer, adapter):
        _give_memory(held, adapter)
    if isinstance(layer, AdaLoraLayer):
        layer.reset_lora_parameters(adapter)
    elif isinstance(layer, LoraLayer):
        layer.reset_lora_parameters(adapter, init)
    else:
        layer.reset_ia3_parameters(adapter)


def _held(layer: Any, adapter: str) -> list[Any]:
    """Return the dictionaries of a layer that have something of an adapter."""
    held = [getattr(layer, name, None) for name in layer.adapter_layer_names]
    return [each for each in held if isinstance(each, nn.ModuleDict | nn.ParameterDict) and adapter in each]


def _is_empty(layer: Any, adapter: str) -> bool:
    parts = [each[adapter] for each in _held(layer, adapter)]
    tensors = [t for part in parts for t in (part.parameters() if isinstance(part, nn.Module) else [part])]
    return any(tensor.is_meta for tensor in tensors)


def _give_memory(held: Any, adapter: str) -> None:
    """Give what an adapter has in a dictionary of its layer memory; an optimizer may hold it already."""
    part = held[adapter]
    is_module = isinstance(part, nn.Module)
    for tensor in [*part.parameters(), *part.buffers()] if is_module else [part]:
        give_memory(tensor, torch.zeros(tensor.shape, dtype=tensor.dtype))
    for module in part.modules() if is_module else []:  # what init_lora_weights=False leaves as it is
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()


def _share_values(model: nn.Module, wrapper: Any) -> None:
    """Read the copies of a module from where the module itself is read."""
    for source in first_weights.attached(model):
        for copied in wrapper.modules_to_save.values():
            pairs = zip(copied.parameters(), wrapper.original_module.parameters(), strict=True)
            for mine, original in pairs:
                if mine.is_meta and mine not in source.names and original in source.names:
                    source.share(mine, original)


def _needs_weights(name: str, adapter: str, what: str) -> ConfigError:
    return ConfigError(
        what=f"The adapter {adapter!r} of {name!r} ({what}) cannot be started on a model without values.",
        why="It starts from the weights of its layer, which are read from files when the model is sharded.",
        fix="Load the base with plain from_pretrained; or start from a saved adapter "
        "(PeftModel.from_pretrained with low_cpu_mem_usage=True keeps its values).",
    )
