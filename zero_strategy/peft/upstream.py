"""Every name of PEFT's that an instance is given another of, or that is taken for granted.

File and line are those of peft 0.21.2; a test holds the table against what is installed. Beside these:
`base_layer` and `original_module` are the children that PEFT's layers are put around (`bucketing.ADAPTED`).
"""

from __future__ import annotations

from zero_strategy.front_ends.upstream import Name, Tested

TESTED = Tested("peft", (0, 21), (0, 21))

# An AdaLoRA model under `ZeroAccelerator` or a Trainer has ours of this name, as an attribute of its own.
REPLACED = (
    Name(
        "peft.tuners.adalora.model",
        "AdaLoraModel.update_and_allocate",
        "tuners/adalora/model.py",
        328,
        "(self, global_step)",
        "reads whole weights and gradients",
    ),
)

# Called as they are.
USED = (
    Name(
        "peft.utils.save_and_load",
        "get_peft_model_state_dict",
        "utils/save_and_load.py",
        148,
        "(model, state_dict, adapter_name, unwrap_compiled, save_embedding_layers)",
        "says what belongs to an adapter",
    ),
    Name(
        "peft.utils.save_and_load",
        "load_peft_weights",
        "utils/save_and_load.py",
        682,
        "(model_id, device, key_mapping, **hf_hub_download_kwargs)",
        "reads an adapter",
    ),
    Name(
        "peft.peft_model",
        "PeftModel.save_pretrained",
        "peft_model.py",
        238,
        "(self, save_directory, safe_serialization, selected_adapters, save_embedding_layers, "
        "is_main_process, path_initial_model_for_weight_conversion, **kwargs)",
        "writes adapters from a state that it is given",
    ),
    Name(
        "peft.tuners.lora.layer",
        "LoraLayer.reset_lora_parameters",
        "tuners/lora/layer.py",
        332,
        "(self, adapter_name, init_lora_weights)",
        "starts an adapter",
    ),
    Name(
        "peft.tuners.adalora.layer",
        "AdaLoraLayer.reset_lora_parameters",
        "tuners/adalora/layer.py",
        92,
        "(self, adapter_name)",
        "starts an adapter",
    ),
    Name(
        "peft.tuners.ia3.layer",
        "IA3Layer.reset_ia3_parameters",
        "tuners/ia3/layer.py",
        72,
        "(self, adapter_name)",
        "starts an adapter",
    ),
    Name(
        "peft.tuners.tuners_utils",
        "BaseTunerLayer._get_available_adapters",
        "tuners/tuners_utils.py",
        1983,
        "(self)",
        "names the adapters of a layer",
    ),
)
