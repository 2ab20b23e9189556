"""Weights that are in files while their parameters are on the meta device, until the model is sharded.

A front end builds a model on meta and attaches a source to it; the engine, once, reads this rank's part of
every parameter from there (materialize.py). The model may be put into other modules meanwhile: a source knows
its parameters as objects, not by name. It must not know files, buckets or frameworks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from zero_strategy.errors import ConfigError

_ATTRIBUTE = "_zero_strategy_first_weights"  # of the module that a source was attached to


class WeightSource(Protocol):
    """Reads ranges of the values of parameters."""

    @property
    def names(self) -> Mapping[nn.Parameter, str]:
        """The parameters whose values it has, each with its name in messages."""

    def share(self, copied: nn.Parameter, original: nn.Parameter) -> None:
        """Give a copy, made of a parameter while it had no values, the same values."""

    def read(self, param: nn.Parameter, start: int, out: Tensor) -> None:
        """Write the elements of a parameter from `start` on into `out`, [numel] of any floating dtype.

        Raises:
            CheckpointError: They cannot be read.
        """

    def describe(self) -> list[str]:
        """Return lines that must be the same on all ranks, or they would read parts of different models."""

    def close(self) -> None:
        """Let go of files; `read` opens them again."""


class FirstWeights:
    """All that was attached within a model."""

    def __init__(self, model: nn.Module) -> None:
        """Look for sources; nothing is read."""
        holders = [module for module in model.modules() if _ATTRIBUTE in vars(module)]
        self._holders = holders
        self._sources: list[WeightSource] = [vars(module)[_ATTRIBUTE] for module in holders]
        self._source_of = {param: source for source in self._sources for param in source.names}

    def __contains__(self, param: object) -> bool:
        return param in self._source_of

    def __bool__(self) -> bool:
        return bool(self._sources)

    def check(self, model: nn.Module) -> ConfigError | None:
        """Return why the model is no longer what was to be loaded, or None."""
        present = set(model.parameters())
        for param, source in self._source_of.items():
            what = f"Parameter {source.names[param]!r}, whose values are to be read from a file, "
            if param not in present:
                return _changed(what + "is no longer part of the model.")
            if not param.is_meta:
                return _changed(what + "has got memory meanwhile.")
        return None

    def describe(self) -> list[str]:
        """Return lines that must be the same on all ranks."""
        return [line for source in self._sources for line in source.describe()]

    def read(self, param: nn.Parameter, start: int, out: Tensor) -> None:
        """Write the elements of a parameter from `start` on into `out`, [numel].

        Raises:
            CheckpointError: They cannot be read.
        """
        self._source_of[param].read(param, start, out)

    def close(self) -> None:
        """Take the sources off the model, which has its values now."""
        for source in self._sources:
            source.close()
        for module in self._holders:
            delattr(module, _ATTRIBUTE)


def attach(model: nn.Module, source: WeightSource) -> None:
    """Have a source fill the parameters it knows when the model, or one around it, is sharded."""
    setattr(model, _ATTRIBUTE, source)


def attached(model: nn.Module) -> list[WeightSource]:
    """Return the sources within a model that has not been sharded yet."""
    return [vars(module)[_ATTRIBUTE] for module in model.modules() if _ATTRIBUTE in vars(module)]


def _changed(what: str) -> ConfigError:
    return ConfigError(
        what=what,
        why="A model that is loaded without copies has no values until it is sharded: what resizes or "
        "replaces a weight before (resize_token_embeddings) finds none, and what fills one would be "
        "overwritten.",
        fix="Load it with plain from_pretrained, change it, save_pretrained() it once, and load that.",
    )
