"""How a front end writes down the names of a framework that it builds on, and refuses versions it never met.

Each front end keeps such names in one table (`upstream.py` in its folder); a test holds that against what is
installed. It must not import a framework before it is asked for one of its names.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from zero_strategy.errors import ConfigError

Version = tuple[int, int]  # major and minor
Stock = Callable[..., Any]  # a framework's method, bound, that a function of ours stands in for


class Name(NamedTuple):
    """A name of a framework's."""

    module: str
    path: str  # within the module
    file: str  # in the folder of the package
    line: int  # of the definition, in the last version that was tested
    signature: str  # with annotations left out
    why: str

    def found(self) -> Any:
        """Return what has the name now."""
        thing: Any = importlib.import_module(self.module)
        for part in self.path.split("."):
            thing = inspect.getattr_static(thing, part) if inspect.isclass(thing) else getattr(thing, part)
        return thing.__func__ if isinstance(thing, staticmethod) else thing


def signature_of(thing: Any) -> str:
    """Return the names of the parameters of a function, as the tables write them."""
    marks: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(thing).parameters.values()
    return f"({', '.join(marks.get(p.kind, '') + p.name for p in parameters)})"


class Tested(NamedTuple):
    """The versions of a package that a front end was run with."""

    package: str
    first: Version
    last: Version

    def covers_installed(self) -> bool:
        """Whether the installed version is one of them."""
        return self.first <= self._installed()[1] <= self.last

    def require(self, who: str) -> None:
        """Refuse another version.

        Args:
            who: What of ours needs it, for the message.

        Raises:
            ConfigError: Another one is installed.
        """
        if self.covers_installed():
            return
        lower, upper = (".".join(map(str, bound)) for bound in (self.first, self.last))
        raise ConfigError(
            what=f"{who} needs {self.package} {lower}..{upper}, and {self._installed()[0]} is installed.",
            why=f"It stands in for methods of {self.package}, and was run with those versions.",
            fix=f"pip install '{self.package}>={lower},<{self.last[0]}.{self.last[1] + 1}'.",
        )

    def _installed(self) -> tuple[str, Version]:
        version = importlib.metadata.version(self.package)
        major, minor = (int(part) for part in version.split(".")[:2])
        return version, (major, minor)
