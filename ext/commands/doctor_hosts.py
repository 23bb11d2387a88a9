"""Doctor's look at what is installed. It reads metadata and files, and imports none of it."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

import ext
from ext.adapters.megatron.apex import OFFERED, is_nvidias
from ext.commands.findings import Finding
from ext.core.versions import NEWEST_TESTED, OLDEST, deepspeed_refusal, is_newer, is_older

DISTRIBUTION = "megatron-deepspeed-ext"
MEGATRON_LM = "https://github.com/NVIDIA/Megatron-LM"


def package() -> Iterator[Finding]:
    """This package: the version that runs against the one that is installed."""
    folder = Path(ext.__file__).parent
    try:
        installed = version(DISTRIBUTION)
    except PackageNotFoundError:
        yield Finding("ok", f"{DISTRIBUTION} {ext.__version__}, run from {folder.parent}, not installed")
        return
    if installed != ext.__version__:
        yield Finding(
            "warning",
            f"{DISTRIBUTION} {ext.__version__} runs from {folder.parent}, but {installed} is installed",
            f"pip install -e {folder.parent}, or run from another folder",
        )
    else:
        yield Finding("ok", f"{DISTRIBUTION} {ext.__version__}")


def python() -> Iterator[Finding]:
    """The interpreter."""
    yield _in_range("python", platform.python_version(), "install a newer Python")


def torch() -> Iterator[Finding]:
    """PyTorch's release."""
    installed = installed_version("torch")
    if installed is None:
        yield Finding("error", "torch is not installed", "pip install torch (pytorch.org names the build for a GPU)")
    else:
        yield _in_range("torch", installed, f"pip install 'torch>={OLDEST['torch']}'")


def deepspeed() -> Iterator[Finding]:
    """DeepSpeed's release."""
    installed = installed_version("deepspeed")
    if installed is None:
        yield Finding("error", "deepspeed is not installed", f"pip install 'deepspeed>={OLDEST['deepspeed']}'")
        return
    refusal = deepspeed_refusal(installed)
    if refusal:
        what, _, fix = refusal.partition(" Run: ")
        yield Finding("error", what.rstrip("."), fix)
    else:
        yield _in_range("deepspeed", installed, "")


def megatron(environ: Mapping[str, str]) -> Iterator[Finding]:
    """megatron-core, and the checkout of Megatron-LM that brings the training code its wheel does not have."""
    installed = installed_version("megatron-core")
    if installed is None:
        yield Finding("info", "megatron-core is not installed; only Megatron runs need it", "pip install megatron-core")
    else:
        yield _in_range("megatron-core", installed, f"pip install 'megatron-core>={OLDEST['megatron-core']}'")
    given = environ.get("MEGATRON_LM")
    if given:
        yield from checkout_findings(Path(given), installed)
    elif installed is not None and not _has_training_code():
        yield Finding("info", *without_training_code(installed))


def without_training_code(installed: str) -> tuple[str, str]:
    """What a run of pretrain_gpt.py says where only the wheel is there, and the fix."""
    return (
        f"megatron-core {installed} has no training code: the wheel holds megatron.core only, without "
        "megatron.training and pretrain_gpt.py",
        f"git clone --branch core_v{installed} {MEGATRON_LM}, then export MEGATRON_LM=<its folder> "
        "or pass --megatron <its folder>",
    )


def checkout_findings(folder: Path, installed: str | None) -> Iterator[Finding]:
    """Whether ``folder`` is a checkout of Megatron-LM of the installed megatron-core's release."""
    missing = [
        name for name in ("pretrain_gpt.py", "megatron/training", "megatron/core") if not (folder / name).exists()
    ]
    if missing:
        yield Finding(
            "error",
            f"{folder} is no checkout of Megatron-LM: it has no {', '.join(missing)}",
            f"git clone --branch core_v{installed or OLDEST['megatron-core']} {MEGATRON_LM}, and name that folder in "
            "MEGATRON_LM or --megatron",
        )
        return
    found = checkout_version(folder)
    if found is None:
        yield Finding(
            "warning",
            f"the release of the Megatron-LM checkout {folder} cannot be read from megatron/core/package_info.py",
            f"use a checkout of the tag core_v{installed or OLDEST['megatron-core']}",
        )
    elif installed is not None and found != installed:
        yield Finding(
            "warning",
            f"megatron-core {installed} is installed, the Megatron-LM checkout {folder} is {found}",
            f"git -C {folder} checkout core_v{installed}, or pip install megatron-core=={found}",
        )
    else:
        yield Finding("ok", f"Megatron-LM checkout {folder}, release {found}")


def checkout_version(folder: Path) -> str | None:
    """The release in a checkout's ``megatron/core/package_info.py``, read without importing it."""
    try:
        text = (folder / "megatron" / "core" / "package_info.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    parts = [re.search(rf"^{name}\s*=\s*(\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    pre_release = re.search(r"^PRE_RELEASE\s*=\s*['\"](\w*)['\"]", text, re.MULTILINE)
    numbers = [part[1] for part in parts if part]
    return ".".join(numbers) + (pre_release[1] if pre_release else "") if len(numbers) == 3 else None


def apex() -> Iterator[Finding]:
    """Whether a package `apex` is NVIDIA's; PyPI's is a web framework of that name."""
    folders = _folders_of("apex")
    if folders is None:
        yield Finding("ok", "apex is not installed; it is optional, torch's own layers are used")
        return
    if is_nvidias(folders):
        yield Finding("ok", f"NVIDIA apex in {_joined(folders)}")
        return
    try:
        what = f"apex {version('apex')}"
        summary = distribution("apex").metadata.json.get("summary")
    except PackageNotFoundError:
        what, summary = "a package apex", None
    yield Finding(
        "warning",
        f"{what} in {_joined(folders)} is not NVIDIA apex: it offers none of {', '.join(f'apex.{n}' for n in OFFERED)}"
        f"{f' (it calls itself: {summary})' if summary else ''}. This package works without it; a host that imports "
        "apex may fail",
        "pip uninstall apex; NVIDIA's is built from https://github.com/NVIDIA/apex and is not on PyPI",
    )


def installed_version(name: str) -> str | None:
    """The release of an installed distribution."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _in_range(name: str, found: str, fix: str) -> Finding:
    oldest, newest = OLDEST[name], NEWEST_TESTED[name]
    if is_older(found, oldest):
        return Finding("error", f"{name} {found} is too old, {oldest} or newer is needed", fix)
    if is_newer(found, newest):
        return Finding("info", f"{name} {found} is newer than the newest tested one, {newest}")
    return Finding("ok", f"{name} {found} (needed: {oldest} or newer, tested up to {newest})")


def _has_training_code() -> bool:
    return any((folder / "training").is_dir() for folder in _folders_of("megatron") or ())


def _folders_of(name: str) -> list[Path] | None:
    """Where the top-level module ``name`` lies, found without importing it; None where there is none."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations is not None:
        return [Path(folder) for folder in spec.submodule_search_locations]
    return [Path(spec.origin)] if spec.origin else []


def _joined(folders: list[Path]) -> str:
    return ", ".join(map(str, folders)) or "an unknown place"
