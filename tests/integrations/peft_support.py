"""What the PEFT tests share: a tiny Llama of transformers, adapters of every kind on it, a loop, its data.

Nothing is persistent at stage 3 unless a test says so, and buckets are small: the base and the adapters are
really sharded, which `assert_engine` checks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import zero_strategy as zs
from tests.harness import rank, world_size
from tests.integrations import tiny_models
from tests.integrations.tiny_models import VOCAB

STAGES = (1, 2, 3)
SMALL_BUCKETS = {"reduce_bucket_size": 700, "stage3_param_persistence_threshold": 0}
Batch = dict[str, Tensor]


def llama(dtype: torch.dtype = torch.float32, *, tied: bool = False, width: int = 20) -> nn.Module:
    """The base model, the same on every rank."""
    torch.manual_seed(0)
    return tiny_models.llama(hidden_size=width, tie_word_embeddings=tied).to(dtype)


def adapted(base: nn.Module, config: Any, **others: Any) -> Any:
    """Put adapters on a base, with B away from zero, so that every one of them counts from the start.

    Args:
        base: From `llama`.
        config: Of the adapter "default".
        **others: Configs of further adapters, by name.
    """
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PEFT says of ties and of its own plans
        model = peft.get_peft_model(base, config)
        for name, other in others.items():
            model.add_adapter(name, other)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name or "lora_E" in name or "lora_embedding_A" in name:
                param.normal_(std=0.05)
    return model.train()


def lora(**keywords: Any) -> Any:
    """A LoRA on two matrices of every layer, dropout off."""
    settings: dict[str, Any] = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
    return peft.LoraConfig(task_type="CAUSAL_LM", **(settings | keywords))


KINDS: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "lora, everywhere": lambda: lora(target_modules=["v_proj", "embed_tokens", "lm_head"], bias="lora_only"),
    "dora": lambda: lora(use_dora=True),
    "dora, everywhere": lambda: lora(use_dora=True, target_modules=["o_proj", "embed_tokens", "lm_head"]),
    "modules to save": lambda: lora(modules_to_save=["lm_head", "input_layernorm"]),
    "trainable tokens": lambda: lora(trainable_token_indices={"embed_tokens": [3, 5, 66]}),
    "only trainable tokens": lambda: peft.TrainableTokensConfig(
        task_type="CAUSAL_LM", target_modules=["embed_tokens"], token_indices=[3, 5, 66]
    ),
    "pissa": lambda: lora(init_lora_weights="pissa"),
    "rslora, olora": lambda: lora(init_lora_weights="olora", use_rslora=True),
    "ia3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}


def batch_of(step: int, of_rank: int) -> Batch:
    """Tokens with labels, every trained token among them."""
    generator = torch.Generator().manual_seed(100 * of_rank + step)
    tokens = torch.randint(3, VOCAB, (2, 7), generator=generator)
    tokens[0, :3] = torch.tensor([3, 5, 66])
    return {"input_ids": tokens, "labels": tokens.clone()}


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def shard(model: nn.Module, stage: int, **settings: Any) -> tuple[zs.ZeroEngine, Optimizer]:
    """An engine over a model, and AdamW over what is trained."""
    engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=stage, **(SMALL_BUCKETS | settings)))
    return engine, engine.shard_optimizer(torch.optim.AdamW(trained(model), lr=1e-2))


def train(
    module: nn.Module, optimizer: Optimizer, num_steps: int = 3, *, start: int = 0, of_rank: int | None = None
) -> list[float]:
    """Train on this rank's batches; return the losses."""
    losses = []
    for step in range(start, start + num_steps):
        loss = module(**batch_of(step, rank() if of_rank is None else of_rank)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def train_ddp(model: nn.Module, num_steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """Train under DDP; return losses and weights."""
    module = DistributedDataParallel(model, find_unused_parameters=True)
    losses = train(module, torch.optim.AdamW(trained(model), lr=1e-2), num_steps)
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def assert_engine(engine: zs.ZeroEngine, stage: int) -> None:
    """The engine is in use: its stage, a share of states and weights on this rank, bytes that were sent."""
    assert engine.config.stage == stage
    params = list(engine.model.parameters())
    num_trained = sum(p.numel() for optimizer in engine.optimizers for p in optimizer.params())
    memory, comm = engine.ledger.memory, engine.ledger.comm
    states = torch.tensor([memory["optimizer"]])
    dist.all_reduce(states)
    assert states.item() == 2 * 4 * num_trained, "two moments of every element, on one rank each"
    assert comm["reduce_scatter"]["bytes_sent"] > 0 and comm["all_gather"]["bytes_sent"] > 0
    if stage == 3:
        whole_bytes = sum(p.numel() * p.element_size() for p in params)
        assert memory["params"] < 0.8 * whole_bytes, (memory, whole_bytes)
        assert memory["unsharded"] == 0
    assert world_size() > 1 and all(param.grad is None for param in params)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """On rank 0, which has them: the same names and bits."""
    if rank() != 0:
        return
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), f"{name}: {(found[name] - value).abs().max():.3g}"
