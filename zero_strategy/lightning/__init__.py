"""Names for Lightning's Trainer: makes `Trainer(strategy="zero3")` work.

`register()` is called by `import zero_strategy`. It writes the strategy names into the registry of
`lightning.pytorch` and of `pytorch_lightning`: at once where one of them is imported already, else right
after its import (`importing.py`). Nothing here imports Lightning unless asked for the class, so `import
zero_strategy` stays cheap and works with Lightning missing. The two packages are two sets of base classes, so
each has its own `ZeroStrategy`, built by `strategy.make_strategy`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

from zero_strategy.errors import ConfigError
from zero_strategy.lightning.importing import call_after_import

if TYPE_CHECKING:
    from types import ModuleType

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")  # in order of preference

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
MISTAKEN_NAMES = ("zero", "zero0", "zero4", "zero5")

log = logging.getLogger(__name__)


def register() -> None:
    """Make the strategy names known to every Lightning namespace that is imported, now or later.

    May be called any number of times.
    """
    for namespace in NAMESPACES:
        name = f"{namespace}.strategies"
        module = sys.modules.get(name)
        if module is not None and "StrategyRegistry" in vars(module):
            register_in(module)
        else:
            call_after_import(name, register_in)


def register_in(strategies: ModuleType) -> None:
    """Write the strategy names into one namespace's registry; names another package took stay as they are.

    Args:
        strategies: The imported module `lightning.pytorch.strategies` or `pytorch_lightning.strategies`.
    """
    namespace = strategies.__name__.rpartition(".")[0]
    registry = strategies.StrategyRegistry
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


def strategy_class(namespace: str | None = None) -> Any:
    """Return the `ZeroStrategy` class of a Lightning namespace.

    Args:
        namespace: "lightning.pytorch" or "pytorch_lightning". By default the one that is imported (the first
            if both are), else the first that is installed.

    Returns:
        The class; always the same object for one namespace.

    Raises:
        ConfigError: Neither package is installed, or `namespace` is neither of the two.
    """
    if namespace is None:
        namespace = (
            next((n for n in NAMESPACES if f"{n}.strategies" in sys.modules), None) or _first_installed()
        )
    if namespace not in NAMESPACES:
        raise ConfigError(
            what=f"There is no ZeroStrategy for {namespace!r}.",
            why=f"A strategy derives from its own Lightning package: {' or '.join(NAMESPACES)}.",
            fix="Pass one of these names, or nothing to take the package that is imported.",
        )
    return _class_of(namespace)


@functools.cache
def _class_of(namespace: str) -> Any:
    from zero_strategy.lightning.strategy import make_strategy

    return make_strategy(namespace)


def _first_installed() -> str:
    for namespace in NAMESPACES:
        try:
            importlib.import_module(f"{namespace}.strategies")
        except ImportError:
            continue
        return namespace
    raise ConfigError(
        what="ZeroStrategy needs Lightning, and neither 'lightning' nor 'pytorch_lightning' can be imported.",
        why="The strategy derives from Lightning's DDPStrategy.",
        fix="pip install 'zero-strategy[lightning]', or use zero_strategy.ZeroEngine in a plain torch loop.",
    )


def _new_strategy(namespace: str, **keywords: Any) -> Any:
    return strategy_class(namespace)(**keywords)


def _refuse_name(mistaken: str) -> None:
    raise ConfigError(
        what=f"There is no strategy {mistaken!r}.",
        why="ZeRO has the stages 1, 2 and 3 (stage 0 is plain data parallelism: Lightning's own 'ddp').",
        fix=f"Use one of {', '.join(STRATEGIES)}, or ZeroStrategy(stage=...) with your own settings.",
    )


def __getattr__(name: str) -> Any:
    if name == "ZeroStrategy":  # what a LightningCLI file names as class_path
        return strategy_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
