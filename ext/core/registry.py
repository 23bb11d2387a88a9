"""One registry class for schedules, recompute policies and dispatchers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from ext.core.errors import ConfigError, nearest

T = TypeVar("T")
C = TypeVar("C", bound=type)


class Registry(Generic[T]):
    """Names to classes of one kind.

    A second registration of a name raises; an unknown name raises with the nearest one. A name with a
    colon, ``"my_pkg.mod:MySchedule"``, is imported instead, so that users need no registration.
    """

    def __init__(self, kind: str, base: type[T], builtins: tuple[str, ...] = ()) -> None:
        """``kind`` names the entries in messages; ``builtins`` are modules imported on first use."""
        self.kind = kind
        self._base = base
        self._builtins = builtins
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Class decorator that enters the class under ``name``."""

        def enter(cls: C) -> C:
            if not issubclass(cls, self._base):
                raise TypeError(f"{cls.__qualname__} is no {self._base.__qualname__}")
            known = self._classes.get(name)
            if known is not None:
                raise ValueError(f"{self.kind} '{name}' is taken by {known.__module__}.{known.__qualname__}")
            self._classes[name] = cls
            return cls

        return enter

    def get(self, name: str) -> type[T]:
        """The class registered or importable under ``name``.

        Raises:
            ConfigError: no such name, or the import path does not lead to a class of this kind.
        """
        if ":" in name:
            return self._import(name)
        self._load_builtins()
        if name not in self._classes:
            raise ConfigError(
                f"unknown {self.kind} '{name}'.{nearest(name, self._classes)} Known: {', '.join(sorted(self))}."
            )
        return self._classes[name]

    def __iter__(self) -> Iterator[str]:
        self._load_builtins()
        return iter(sorted(self._classes))

    def __contains__(self, name: object) -> bool:
        self._load_builtins()
        return name in self._classes

    def _load_builtins(self) -> None:
        for module in self._builtins:
            importlib.import_module(module)

    def _import(self, path: str) -> type[T]:
        module_name, _, attribute = path.partition(":")
        try:
            cls = getattr(importlib.import_module(module_name), attribute)
        except Exception as error:
            raise ConfigError(f"{self.kind} '{path}' cannot be imported: {error}") from error
        if not (isinstance(cls, type) and issubclass(cls, self._base)):
            raise ConfigError(f"{self.kind} '{path}' is no subclass of {self._base.__qualname__}")
        return cls
