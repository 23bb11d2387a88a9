"""Checkpoints in DeepSpeed's own format that a full disk, a crash or a flipped bit cannot turn into a wrong run.

A checkpoint goes to a folder of its own; every file is flushed to the disk and read back; only when all ranks have
done so does `latest` move, in one atomic step. Beside DeepSpeed's files lie `manifest.json` with the size and
checksum of each file, and the random state of each rank.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from ext.core.errors import CheckpointError, ConfigError
from gpt import device
from gpt.together import from_first, raise_first, together

logger = logging.getLogger(__name__)

LATEST = "latest"  # DeepSpeed's name
MANIFEST = "manifest.json"
_TAG = re.compile(r"step_\d+")


@dataclass(frozen=True)
class WrittenFile:
    """What a file must still be when it is read again."""

    size: int
    checksum: int

    @classmethod
    def of(cls, path: Path) -> WrittenFile:
        """Read the whole file."""
        size = checksum = 0
        with path.open("rb") as file:
            while block := file.read(2**22):
                size += len(block)
                checksum = zlib.crc32(block, checksum)
        return cls(size, checksum)


class DurableCheckpointEngine(TorchCheckpointEngine):
    """DeepSpeed's writer, but each file is on the disk when `save` returns, and failures are kept, not raised.

    A rank that raised inside `engine.save_checkpoint` would leave the others waiting in its barrier.
    """

    def __init__(self, config_params: Any) -> None:
        super().__init__(config_params)
        self.written: dict[Path, WrittenFile] = {}
        self.failure: CheckpointError | None = None

    def begin(self) -> None:
        """Forget the checkpoint before."""
        self.written = {}
        self.failure = None

    def save(self, state_dict: Any, path: str) -> None:
        if self.failure is not None:
            return
        try:
            with open(path, "wb") as file:
                torch.save(state_dict, file, _use_new_zipfile_serialization=self.zipfile_serialization)
                file.flush()
                os.fsync(file.fileno())
            self.written[Path(path)] = WrittenFile.of(Path(path))
        except (OSError, RuntimeError) as error:
            self.failure = CheckpointError(f"{path} cannot be written: {_cause(error)}")


class Checkpoints:
    """The checkpoints of one run.

    Args:
        engine: DeepSpeed's engine; its writer is replaced by `DurableCheckpointEngine`.
        folder: where the checkpoints lie, the same for all ranks.
        settings: what a checkpoint can only be loaded with, such as the sizes of the model.
        keep: how many checkpoints stay.

    Raises:
        ConfigError: the ds_config chooses a writer of its own (asynchronous ones finish when nobody looks).
    """

    def __init__(self, engine: Any, folder: Path, settings: Mapping[str, Any], keep: int) -> None:
        if type(engine.checkpoint_engine) is not TorchCheckpointEngine:
            raise ConfigError(
                f"checkpoint: this job cannot verify what {type(engine.checkpoint_engine).__name__} writes. "
                f"Remove the key that chooses it from the ds_config."
            )
        self._engine = engine
        self._writer = engine.checkpoint_engine = DurableCheckpointEngine(engine._config)
        self._folder = folder
        self._settings = dict(settings)
        self._keep = keep

    def save(self, step: int) -> Path:
        """Write the state after `step` steps. Collective over all ranks.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: on every rank, if any file could not be written; the checkpoints before stay as they are.
        """
        tag = f"step_{step:08d}"
        target = self._folder / tag
        from_first(lambda: _make_empty(target))
        self._writer.begin()
        self._engine.save_checkpoint(str(self._folder), tag=tag, save_latest=False)
        self._writer.save(device.random_state(), str(target / _random_file()))
        try:
            raise_first(self._writer.failure)
            self._commit(step, tag)
        except CheckpointError as error:
            good = self._last_good()
            if dist.get_rank() == 0 and good != target:
                shutil.rmtree(target, ignore_errors=True)
            raise CheckpointError(f"{error}. The last good checkpoint: {good or 'none'}.") from error
        if dist.get_rank() == 0:
            self._prune(target)
        return target

    def load(self, intact: Intact) -> int:
        """Load a checkpoint that `find_intact` found. Collective over all ranks.

        Returns:
            The number of steps it was written after.
        """
        self._engine.load_checkpoint(str(self._folder), tag=intact.folder.name)
        state = torch.load(intact.folder / _random_file(), map_location="cpu", weights_only=True)
        device.restore_random_state(state)
        return intact.step

    def _commit(self, step: int, tag: str) -> None:
        """Write the manifest and move `latest`, once every rank has written its files."""
        everyone: list[Any] = [None] * dist.get_world_size()
        mine = {path.name: vars(file) for path, file in self._writer.written.items()}
        dist.all_gather_object(everyone, mine)
        files = {
            name: {"rank": rank, **file} for rank, written in enumerate(everyone) for name, file in written.items()
        }
        manifest = {"step": step, "settings": self._settings, "files": files}

        def write() -> None:
            try:
                _write_durably(self._folder / tag / MANIFEST, json.dumps(manifest, indent=1))
                _write_durably(self._folder / LATEST, tag)
            except OSError as error:
                raise CheckpointError(f"{error.filename or self._folder} cannot be written: {error}") from error

        from_first(write)

    def _last_good(self) -> Path | None:
        try:
            return self._folder / (self._folder / LATEST).read_text(encoding="utf-8").strip()
        except OSError:
            return None

    def _prune(self, newest: Path) -> None:
        """Remove the checkpoints written longest ago, and with them what a crash left half-written."""
        others = [path for path in self._folder.iterdir() if _TAG.fullmatch(path.name) and path != newest]
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in others[self._keep - 1 :]:
            try:
                shutil.rmtree(path)
            except OSError as error:
                logger.warning("the old checkpoint %s cannot be removed: %s", path, error)


@dataclass(frozen=True)
class Intact:
    """A checkpoint whose files are what they were when they were written."""

    folder: Path
    step: int


def find_intact(folder: Path, settings: Mapping[str, Any]) -> Intact:
    """The checkpoint that `latest` in `folder` names, after a look at all its files. Collective over all ranks.

    Raises:
        CheckpointError: there is none, or a file of it is missing or damaged.
        ConfigError: it was written with other settings.
    """
    target, manifest = from_first(lambda: _read_manifest(folder))
    _compare(manifest["settings"], settings, target)
    together(lambda: _verify(target, manifest["files"]))
    return Intact(target, manifest["step"])


def _read_manifest(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / LATEST
    try:
        target = folder / path.read_text(encoding="utf-8").strip()
        path = target / MANIFEST
        manifest = json.loads(path.read_text(encoding="utf-8"))
        _ = manifest["step"], manifest["settings"], manifest["files"]
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}. Without it there is nothing to resume."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return target, manifest


def _verify(folder: Path, files: Mapping[str, Mapping[str, int]]) -> None:
    """This rank's share of the files is as it was written."""
    for name, expected in files.items():
        if expected["rank"] % dist.get_world_size() != dist.get_rank():
            continue
        try:
            found = WrittenFile.of(folder / name)
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error.strerror}") from error
        if found != WrittenFile(expected["size"], expected["checksum"]):
            raise CheckpointError(
                f"{folder / name} is damaged: {found.size} bytes with checksum {found.checksum}, "
                f"written were {expected['size']} bytes with checksum {expected['checksum']}. "
                f"Put another checkpoint's name into {folder.parent / LATEST} to use that one."
            )


def _compare(written: Mapping[str, Any], current: Mapping[str, Any], folder: Path) -> None:
    problems = [
        f"{folder} was written with {name} {written.get(name)}, this run has {current.get(name)}"
        for name in {**current, **written}
        if written.get(name) != current.get(name)
    ]
    if problems:
        raise ConfigError(*problems)


def _cause(error: BaseException) -> BaseException:
    """The system's own error, which torch's writer may hide behind its own."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, OSError):
        inner = inner.__context__
    return inner or error


def _make_empty(folder: Path) -> None:
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made: {error.strerror}") from error


def _write_durably(path: Path, text: str) -> None:
    """Replace the file in one step: after a crash it holds the old text or the new one."""
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    parent = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _random_file() -> str:
    return f"random_state_rank_{dist.get_rank():05d}.pt"
