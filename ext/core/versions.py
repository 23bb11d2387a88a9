"""Releases of the hosts that this package needs and was tested with, and why older ones are refused."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

OLDEST = {"python": "3.10", "torch": "2.6", "deepspeed": "0.19.8", "megatron-core": "0.16.1"}
NEWEST_TESTED = {"python": "3.11", "torch": "2.13", "deepspeed": "0.19.8", "megatron-core": "0.16.1"}

# Gradients of a two-stage pipeline with 4 micro-batches against the mean over one process, SGD in fp32.
_PIPELINE_GRADIENTS = {
    "0.17.6": "this release multiplies them by 4",
    "0.18.2": "this release multiplies them by 4",
    "0.18.4": "this release crashes in fp32",
    "0.19.2": "this release multiplies those of stage 0 by 0.25",
}


def deepspeed_refusal(version: str) -> str | None:
    """Why this release of DeepSpeed cannot be used, and the fix; None where it can."""
    if not is_older(version, OLDEST["deepspeed"]):
        return None
    measured = _PIPELINE_GRADIENTS.get(version)
    return (
        f"deepspeed {version} is installed, {OLDEST['deepspeed']} or newer is needed: older releases scale the "
        f"gradients of pipeline stages wrongly{f' ({measured})' if measured else ''}. "
        f"Run: pip install 'deepspeed>={OLDEST['deepspeed']}'"
    )


def is_older(version: str, than: str) -> bool:
    """Whether ``version`` comes before ``than``; False for text that is no version."""
    try:
        return Version(version) < Version(than)
    except InvalidVersion:
        return False


def is_newer(version: str, than: str) -> bool:
    """Whether ``version`` is beyond every release of the series ``than``: 2.13.1 is not beyond 2.13."""
    try:
        release, series = Version(version).release, Version(than).release
    except InvalidVersion:
        return False
    return release[: len(series)] > series
