"""Apply, undo and list patches."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet

from ext.core.errors import PatchError, nearest


@dataclass(frozen=True)
class Patch:
    """One host name and what replaces it while the patch is applied.

    Attributes:
        name: of this patch, the name of its file.
        target: where the host defines the name, ``"module:attribute"``.
        places: every place that holds the name and that the host looks it up in, ``target`` included if it does.
        distribution: of the host.
        versions: releases of the host it was tested with, as a version specifier.
        signature: of the target as tested; another one is refused.
        replacement: ``"module:attribute"``, imported when the patch is applied.
        reason: why neither a subclass nor a hook would do.
        importers: more places, in modules that import the name from one of ``places`` when they are loaded. Those
            loaded by then are replaced too, the others take the replacement over; none needs to exist.
    """

    name: str
    target: str
    places: tuple[str, ...]
    distribution: str
    versions: str
    signature: str
    replacement: str
    reason: str
    importers: tuple[str, ...] = ()


_originals: dict[str, list[tuple[str, Any]]] = {}


def all_patches() -> dict[str, Patch]:
    """Every patch of this package, by name."""
    import patches

    found = {}
    for module_info in pkgutil.iter_modules(patches.__path__):
        if module_info.name not in ("manager", "__main__"):
            found[module_info.name] = importlib.import_module(f"patches.{module_info.name}").PATCH
    return found


def is_applied(name: str) -> bool:
    """Whether the patch is in force."""
    return name in _originals


def apply(name: str) -> None:
    """Put the replacement in every place. Does nothing where it is in force; a failure half-way undoes itself.

    Raises:
        PatchError: the host is missing, of an untested version, lacks the name, or changed its signature.
    """
    if is_applied(name):
        return
    patch = _find(name)
    _check_version(patch)
    original = _read(patch, patch.target)
    _check_signature(patch, original)
    places = (*patch.places, *(place for place in patch.importers if _is_loaded(place)))
    for place in places:
        if _read(patch, place) is not original:
            raise PatchError(f"patch {name}: {place} is not {patch.target}; something else has replaced it already.")
    replacement = _read(patch, patch.replacement)
    done: list[tuple[str, Any]] = []
    try:
        for place in places:
            _write(place, replacement)
            done.append((place, original))
    except (AttributeError, TypeError) as error:
        failed = places[len(done)]
        for place, value in reversed(done):
            _write(place, value)
        raise PatchError(f"patch {name}: {failed} cannot be replaced: {error}") from error
    _originals[name] = done


def undo(name: str) -> None:
    """Put the originals back. Does nothing where the patch is not in force."""
    patch = _find(name)
    done = _originals.pop(name, [])
    if not done:
        return
    replacement, original = _read(patch, patch.replacement), done[0][1]
    done += [(p, original) for p in patch.importers if _is_loaded(p) and _read(patch, p) is replacement]
    for place, value in reversed(done):
        _write(place, value)


@contextmanager
def applied(name: str) -> Iterator[None]:
    """The patch is in force inside; afterwards all is as it was before."""
    before = is_applied(name)
    apply(name)
    try:
        yield
    finally:
        if not before:
            undo(name)


def _find(name: str) -> Patch:
    patches = all_patches()
    if name not in patches:
        raise PatchError(f"unknown patch '{name}'.{nearest(name, patches)} Known: {', '.join(sorted(patches))}.")
    return patches[name]


def _check_version(patch: Patch) -> None:
    try:
        version = importlib.metadata.version(patch.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise PatchError(f"patch {patch.name}: {patch.distribution} is not installed.") from None
    if not SpecifierSet(patch.versions).contains(version, prereleases=True):
        raise PatchError(
            f"patch {patch.name}: {patch.distribution} {version} is installed, tested are {patch.versions}. "
            f"Install one of these, or a release of this package that knows {version}."
        )


def _check_signature(patch: Patch, original: Any) -> None:
    found = signature_of(original)
    if found != patch.signature:
        raise PatchError(
            f"patch {patch.name}: the signature of {patch.target} is {found}, tested is {patch.signature}; the host "
            "has changed. Install a release of this package that knows it."
        )


def signature_of(target: Any) -> str:
    """The parameter names of a function or class, as patches note them."""
    return f"({', '.join(inspect.signature(target).parameters)})"


def _is_loaded(place: str) -> bool:
    module_name, _, attribute = place.partition(":")
    return hasattr(sys.modules.get(module_name), attribute)


def _read(patch: Patch, place: str) -> Any:
    module_name, _, attribute = place.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise PatchError(f"patch {patch.name}: {place} cannot be found: {error}") from error


def _write(place: str, value: Any) -> None:
    module_name, _, attribute = place.partition(":")
    setattr(importlib.import_module(module_name), attribute, value)
