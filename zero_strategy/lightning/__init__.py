"""Names for Lightning: makes `Trainer(strategy="zero3")` and `Fabric(strategy="zero3")` work.

`register()` is called by `import zero_strategy`. It writes the strategy names into the registries of
`lightning.pytorch`, `pytorch_lightning`, `lightning.fabric` and `lightning_fabric`: at once where one of them
is imported already, else right after its import (`importing.py`). Nothing here imports Lightning unless asked
for a class, so `import zero_strategy` stays cheap and works with Lightning missing. The four packages are
four sets of base classes, so each has a class of its own, built by `strategy_class`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

from zero_strategy.errors import ConfigError
from zero_strategy.front_ends.importing import call_after_import

if TYPE_CHECKING:
    from types import ModuleType

# In order of preference.
TRAINERS = ("lightning.pytorch", "pytorch_lightning")
FABRICS = ("lightning.fabric", "lightning_fabric")

# name -> keywords of ZeroStrategy
STRATEGIES: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero2_offload": {"stage": 2, "offload_optimizer": "cpu"},
    "zero3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    "zero3_nvme": {"stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme"},
}

# Lightning's own message for an unknown name lists its own strategies only: these likely slips do answer.
_BETWEEN = ("_", "-", " ", "_stage_", "_stage", "-stage-", " stage ")
MISTAKEN_NAMES = ["zero", "zero0", "zero4", "zero5", *(f"zero{b}{n}" for n in (1, 2, 3) for b in _BETWEEN)]

log = logging.getLogger(__name__)


def register() -> None:
    """Make the strategy names known to every Lightning namespace that is imported, now or later.

    May be called any number of times.
    """
    for namespace in TRAINERS + FABRICS:
        name = f"{namespace}.strategies"
        module = sys.modules.get(name)
        if module is not None and _registry_name(namespace) in vars(module):
            register_in(module)
        else:
            call_after_import(name, register_in)


def register_in(strategies: ModuleType) -> None:
    """Write the strategy names into one namespace's registry; names another package took stay as they are.

    Args:
        strategies: The imported module `strategies` of one of the four namespaces.
    """
    namespace = strategies.__name__.rpartition(".")[0]
    registry = vars(strategies)[_registry_name(namespace)]
    for name, keywords in STRATEGIES.items():
        if name not in registry:
            # A function, not the class: importing Lightning must not import the engine.
            registry.register(
                name, _new_strategy, description=f"ZeRO ({name})", namespace=namespace, **keywords
            )
        elif registry[name]["strategy"] is not _new_strategy:
            log.warning(
                "strategy name %r is taken by %r; use zero_strategy.ZeroStrategy", name, registry[name]
            )
    for name in MISTAKEN_NAMES:
        if name not in registry:
            registry.register(
                name, _refuse_name, description="not a strategy: answers with the right names", mistaken=name
            )


def strategy_class(namespace: str) -> Any:
    """Return the strategy class of a Lightning namespace.

    Args:
        namespace: "lightning.pytorch" or "pytorch_lightning" for the Trainer, "lightning.fabric" or
            "lightning_fabric" for Fabric.

    Returns:
        The class; always the same object for one namespace.

    Raises:
        ConfigError: `namespace` is none of the four.
    """
    if namespace not in TRAINERS + FABRICS:
        raise ConfigError(
            what=f"There is no ZeroStrategy for {namespace!r}.",
            why=f"A strategy derives from its own Lightning package: {', '.join(TRAINERS + FABRICS)}.",
            fix="Pass one of these names.",
        )
    return _class_of(namespace)


@functools.cache
def _class_of(namespace: str) -> Any:
    from zero_strategy.lightning.base import derive

    if namespace in FABRICS:
        from zero_strategy.lightning.fabric import FabricHooks

        return derive(FabricHooks, namespace, "FabricZeroStrategy")
    from zero_strategy.lightning.strategy import TrainerHooks

    return derive(TrainerHooks, namespace, "ZeroStrategy")


def ema_class(namespace: str) -> Any:
    """Return the callback `ZeroEMA` of a Lightning namespace.

    Args:
        namespace: "lightning.pytorch" or "pytorch_lightning".

    Returns:
        The class; always the same object for one namespace.
    """
    return _ema_class_of(namespace)


@functools.cache
def _ema_class_of(namespace: str) -> Any:
    from zero_strategy.lightning.callbacks import derive_callback

    return derive_callback(namespace)


def _preferred(namespaces: tuple[str, ...]) -> str:
    """Return the namespace that is imported, the first if both are, else the first that is installed."""
    for namespace in namespaces:
        if f"{namespace}.strategies" in sys.modules:
            return namespace
    for namespace in namespaces:
        try:
            importlib.import_module(f"{namespace}.strategies")
        except ImportError:
            continue
        return namespace
    raise ConfigError(
        what=f"This strategy needs Lightning, and neither of {', '.join(namespaces)} can be imported.",
        why="It derives from Lightning's DDPStrategy.",
        fix="pip install 'zero-strategy[lightning]', or use zero_strategy.ZeroEngine in a plain torch loop.",
    )


def _registry_name(namespace: str) -> str:
    return "STRATEGY_REGISTRY" if namespace in FABRICS else "StrategyRegistry"


def _new_strategy(namespace: str, **keywords: Any) -> Any:
    return strategy_class(namespace)(**keywords)


def _refuse_name(mistaken: str) -> None:
    meant = f"zero{mistaken[-1]}"
    working = [name for name, keywords in STRATEGIES.items() if set(keywords) == {"stage"}]  # no offload yet
    raise ConfigError(
        what=f"There is no strategy {mistaken!r}.",
        why="ZeRO has the stages 1, 2 and 3 (stage 0 is plain data parallelism: Lightning's own 'ddp').",
        fix=f"Use {meant!r}."
        if meant in working
        else f"Use one of {', '.join(working)}, or ZeroStrategy(stage=...) with your own settings.",
    )


def __getattr__(name: str) -> Any:
    if name == "ZeroStrategy":  # what a LightningCLI file names as class_path
        return strategy_class(_preferred(TRAINERS))
    if name == "FabricZeroStrategy":
        return strategy_class(_preferred(FABRICS))
    if name == "ZeroEMA":
        return ema_class(_preferred(TRAINERS))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
