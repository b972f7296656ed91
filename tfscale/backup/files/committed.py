"""A backup: files, and a manifest that is written last.

    backup-00000120-6f1c.../          step 120; `backup-...-fit-2` of a
                                      second `fit` of the program
        parts.index, parts.data-...   tensors, in shards
        state.json                    the rest of the state
        parts-1.*, state-1.json       what only a second worker has
        MANIFEST.json                 sizes and SHA-256 of these, and its own

A backup exists if its manifest verifies. Nothing is renamed: a file UNFINISHED
is beside the others until all are written, and while they are removed. If a
manifest is missing without UNFINISHED, it was lost.
"""

import dataclasses
import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.backup.files.storage import storage_of
from tfscale.backup.files.tensor_shards import TensorShard
from tfscale.backup.files.tensor_shards import read_shard
from tfscale.backup.files.tensor_shards import write_shards
from tfscale.variables.sharding import Sharding

FORMAT = 3
_MANIFEST = "MANIFEST.json"
_STATE = "state.json"
_REASON = "REASON"
_UNFINISHED = "UNFINISHED"
# Other names in a folder of backups belong to other programs.
_NAME = re.compile(r"backup-(\d{8,})-[0-9a-f]{32}(?:-fit-(\d+))?")
_DAMAGED_NAME = re.compile(rf"damaged-{_NAME.pattern}(-\d+)?")
_FILE_NAME = re.compile(
    r"(parts|state)(-\d+)?(\.json|\.index|\.data-\d{5}-of-\d{5})"
)


class DamagedBackupError(Exception):
    """A backup is not what was written."""


@dataclasses.dataclass(frozen=True)
class Backup:
    """A backup that verified."""

    path: str
    step: int  # of the run, over all epochs
    state: Mapping[str, Any]  # all but the tensors: JSON
    # `{"shape": ..., "dtype": ...}` of each tensor, by key.
    tensors: Mapping[str, Mapping[str, Any]]
    files: frozenset[str]  # names

    def state_of(self, worker: int) -> Mapping[str, Any]:
        """The state of a worker; an added worker has that of the first."""
        name = f"{_name('state', worker)}.json"
        if not worker or name not in self.files:
            return self.state
        return json.loads(storage_of(self.path).read(name))

    def read(self, key: str, sharding: Sharding, replica_and_rank) -> tf.Tensor:
        """The shard of a tensor on a device; see `read_shard`."""
        return read_shard(
            storage_of(self.path).path_of(self.tensors[key].get("in", "parts")),
            key,
            tf.as_dtype(self.tensors[key]["dtype"]),
            sharding,
            replica_and_rank,
        )

    def read_whole(self, key: str) -> tf.Tensor:
        """A tensor."""
        entry = self.tensors[key]
        size = tf.as_dtype(entry["dtype"]).size
        return self.read(key, Sharding(tuple(entry["shape"]), size), (0, 0))


def begin(folder: str, step: int, fit: int = 1) -> str:
    """Creates the folder of a backup; returns its path."""
    of_fit = f"-fit-{fit}" if fit > 1 else ""
    name = f"backup-{step:08d}-{uuid.uuid4().hex}{of_fit}"
    path = storage_of(folder).path_of(name)
    storage_of(path).make_folder()
    storage_of(path).write(_UNFINISHED, b"")
    return path


def write_files(
    path: str,
    shards: list[TensorShard],
    state: Mapping[str, Any],
    worker: int = 0,
) -> dict[str, Any]:
    """Writes the files of a worker; returns their contents, JSON for `seal`.

    Removes each of `shards` once written.
    """
    storage, name = storage_of(path), _name("parts", worker)
    tensors = {
        shard.key: {
            "shape": list(shard.sharding.shape),
            "dtype": shard.value.dtype.name,
            **({"in": name} if worker else {}),
        }
        for shard in shards
    }
    names = []
    if shards:
        write_shards(storage.path_of(name), shards)
        names = sorted(n for n in storage.names() if n.startswith(f"{name}."))
        storage.flush(names)
    names.append(f"{_name('state', worker)}.json")
    storage.write(names[-1], json.dumps(state).encode())
    files = {name: storage.size_and_digest(name) for name in names}
    return {"files": files, "tensors": tensors}


def _name(kind, worker):
    return f"{kind}-{worker}" if worker else kind


def seal(path: str, step: int, contents: Sequence[Mapping[str, Any]]) -> None:
    """Writes the manifest, which completes the backup; all files are there."""
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for content in contents:
        files |= content["files"]
        tensors |= content["tensors"]
    storage = storage_of(path)
    for name, (size, _) in files.items():
        if not storage.is_file(name) or storage.size(name) != size:
            raise FileNotFoundError(
                f"{storage.path_of(name)!r}, which a worker has written, is "
                "not there"
            )
    text = json.dumps(
        {"format": FORMAT, "step": step, "files": files, "tensors": tensors}
    )
    manifest = json.dumps({"digest": _digest(text), "manifest": text})
    storage.write(_MANIFEST, manifest.encode())
    storage.remove_file(_UNFINISHED)


def open_backup(path: str, *, is_verified: bool = False) -> Backup:
    """Reads a backup, and verifies each byte unless `is_verified`.

    Raises:
        DamagedBackupError: If it is not what was written; says in which way.
        OSError: If it cannot be read, or an error of TensorFlow; it may be
            what was written.
    """
    try:
        manifest = _manifest(path)
        if not is_verified:
            _verify(path, manifest["files"])
        state = json.loads(storage_of(path).read(_STATE))
        step, tensors = manifest["step"], manifest["tensors"]
        return Backup(path, step, state, tensors, frozenset(manifest["files"]))
    except FileNotFoundError as error:
        raise DamagedBackupError(f"{error} is missing") from None
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise DamagedBackupError(
            f"its manifest cannot be read ({error!r})"
        ) from None


def _manifest(path):
    """The manifest, which may only name files of backups."""
    storage = storage_of(path)
    if _MANIFEST in storage.names() and not storage.is_file(_MANIFEST):
        raise DamagedBackupError(f"{_MANIFEST} is no regular file")
    outer = json.loads(storage.read(_MANIFEST))
    if _digest(outer["manifest"]) != outer["digest"]:
        raise DamagedBackupError("its manifest has another digest")
    manifest = json.loads(outer["manifest"])
    if manifest["format"] != FORMAT:
        raise DamagedBackupError(
            f"it has format {manifest['format']}, this version reads {FORMAT}"
        )
    files = manifest["files"]
    prefixes = {t.get("in", "parts") for t in manifest["tensors"].values()}
    for name in {_STATE, *(f"{p}.index" for p in prefixes)} - set(files):
        raise DamagedBackupError(f"its manifest does not list {name!r}")
    for name in files:
        if not _FILE_NAME.fullmatch(name):
            raise DamagedBackupError(
                f"its manifest lists {name!r}, which is no file of a backup"
            )
    return manifest


def _verify(path, files):
    storage = storage_of(path)
    for name, (size, digest) in files.items():
        if not storage.is_file(name):
            is_there = name in storage.names()
            raise DamagedBackupError(
                f"{name} is {'no regular file' if is_there else 'missing'}"
            )
        found = storage.size_and_digest(name)
        if found[0] != size:
            raise DamagedBackupError(f"{name} has {found[0]} bytes of {size}")
        if found[1] != digest:
            raise DamagedBackupError(f"{name} has another SHA-256")


def _digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def begun(folder: str, fit: int | None = None) -> list[str]:
    """Names of folders of backups, the newest first, complete or not.

    Of all calls of `fit`, or only of one.
    """

    def order(name):
        return fit_of(name), int(_NAME.fullmatch(name)[1]), name

    return sorted(_real_folders(folder, _NAME, fit), key=order, reverse=True)


def damaged(folder: str, fit: int | None = None) -> list[str]:
    """Names of folders of backups that were set aside."""
    return sorted(_real_folders(folder, _DAMAGED_NAME, fit))


def fit_of(name: str) -> int:
    """The number of the `fit` that has written a backup."""
    match = _NAME.search(name)
    return int(match[2] or 1) if match else 1


def _real_folders(folder, form, fit):
    storage = storage_of(folder)
    return [
        name
        for name in storage.names()
        if form.fullmatch(name)
        and fit in (None, fit_of(name))
        and storage.is_folder(name)
    ]


def is_complete(path: str) -> bool:
    """Whether there is a manifest; it may still not verify."""
    return _MANIFEST in storage_of(path).names()


def is_unfinished(path: str) -> bool:
    """Whether a kill left it incomplete."""
    names = storage_of(path).names()
    is_begun = _UNFINISHED in names or _STATE not in names
    return _MANIFEST not in names and is_begun


def set_aside(folder: str, name: str, reason: str) -> None:
    """Renames a damaged backup, and notes the reason."""
    storage = storage_of(folder)
    others, aside, number = storage.names(), f"damaged-{name}", 1
    while aside in others:
        number += 1
        aside = f"damaged-{name}-{number}"
    storage.rename(name, aside)
    storage_of(storage.path_of(aside)).write(_REASON, reason.encode())


def reason(path: str) -> str:
    """Why a backup was set aside."""
    try:
        return storage_of(path).read(_REASON).decode(errors="replace")
    except (OSError, tf.errors.OpError):
        return "no reason is noted"


def remove(path: str) -> None:
    """Removes a backup; a kill meanwhile leaves an unfinished one."""
    storage = storage_of(path)
    storage.write(_UNFINISHED, b"")
    for name in (_MANIFEST, _STATE):
        storage.remove_file(name)
    storage.remove_folder()
