"""The real classes of transformers at a tiny size, with odd dims and random weights.

Dropout is off, since a recomputed mask would depend on the order of random draws. They draw from torch's
generator: seed it to have the same on every rank.
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

VOCAB = 67


def llama(**changes: Any) -> nn.Module:
    """Two layers, untied; any of it may be changed by a keyword of the config."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 20,
        "intermediate_size": 29,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | changes))


def mixtral() -> nn.Module:
    """Stored expert by expert, and stacked as it is loaded."""
    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=20,
        intermediate_size=29,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        max_position_embeddings=32,
    )
    return transformers.MixtralForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=32,
        n_embd=18,
        n_layer=3,
        n_head=3,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config)


def t5(**changes: Any) -> nn.Module:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "d_model": 18,
        "d_kv": 5,
        "d_ff": 23,
        "num_layers": 2,
        "num_heads": 2,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes | changes))


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=18,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=23,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)
