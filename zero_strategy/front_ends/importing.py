"""Runs a function right after a module is first imported, without importing it.

Used by `lightning.register` for frameworks that the user imports after `zero_strategy`. It must never change
whether or how an import succeeds: the module is found and executed by whoever would have done so, a failing
function is reported as a warning, and the finder leaves `sys.meta_path` as soon as its module is imported.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def call_when_imported(name: str, function: Callable[[ModuleType], None]) -> None:
    """Call `function(module)` now if the module `name` is there, else once it is.

    Args:
        name: Full name of a module.
        function: Gets the module; may be called again for one that it has had.
    """
    module = sys.modules.get(name)
    if module is None:
        call_after_import(name, function)
    else:
        function(module)


def call_after_import(name: str, function: Callable[[ModuleType], None]) -> None:
    """Call `function(module)` once, after the module `name` has been executed for the first time from now.

    Args:
        name: Full name of a module that is not imported yet. A second call for the same name and function is
            ignored.
        function: Gets the executed module. What it raises becomes a warning.
    """
    finder = _PostImportFinder(name, function)
    if finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)


class _PostImportFinder:
    """A meta path finder that finds nothing itself: it lends the real loader one more action."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.function = function

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _PostImportFinder) and (other.name, other.function) == (
            self.name,
            self.function,
        )

    def __hash__(self) -> int:
        return hash((self.name, self.function))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        # Those before this one have declined. Another of ours may follow and adds its own action.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._extend_loader(spec)
                return spec
        return None

    def _extend_loader(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        # Namespace packages and built-in modules: nothing of ours.
        if loader is None or isinstance(loader, type):
            return
        exec_module = loader.exec_module

        def exec_module_and_call(module: ModuleType) -> None:
            # The loader belongs to this one module and stays its `__loader__`: leave it as it was.
            vars(loader).pop("exec_module", None)
            exec_module(module)
            # Not earlier: asking for the spec alone, as availability checks do, must not use the finder up.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            try:
                self.function(module)
            except Exception as error:
                warnings.warn(f"zero_strategy could not extend {self.name}: {error!r}", stacklevel=2)

        try:
            loader.exec_module = exec_module_and_call  # type: ignore[method-assign]
        except AttributeError:  # a loader with slots: give the module up rather than the import
            warnings.warn(f"zero_strategy could not extend {self.name}: its loader is closed", stacklevel=2)
