"""A backup: files, and a manifest that is written last and vouches for them.

    backup-00000120-6f1c.../          step 120
        parts.index, parts.data-...   tensors, in parts
        state.json                    all that is no tensor
        parts-1.*, state-1.json       what a second worker has of its own
        MANIFEST.json                 sizes and SHA-256 of these, and its own

It exists if its manifest verifies. Nothing is renamed: whatever was going on
when a process was killed leaves a folder without a manifest.
"""

import dataclasses
import hashlib
import json
import uuid
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.backup import storage
from tfscale.backup.pace import at_once
from tfscale.backup.parts import Part
from tfscale.backup.parts import read_part
from tfscale.backup.parts import write_parts
from tfscale.sharding.sharding import Sharding

FORMAT = 1
_MANIFEST = "MANIFEST.json"
_PREFIX = "backup-"


class DamagedBackupError(Exception):
    """A backup is not what was written."""


@dataclasses.dataclass(frozen=True)
class Backup:
    """A backup that verified.

    Attributes:
        path: Its folder.
        step: Steps that the run had made, over all epochs.
        state: What is no tensor: JSON.
        tensors: Of each tensor by key `{"shape": ..., "dtype": ...}`.
    """

    path: str
    step: int
    state: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, Any]]

    def state_of(self, worker: int) -> Mapping[str, Any]:
        """What is no tensor, of a worker; of one more, as of the first."""
        path = storage.join(self.path, f"{_name('state', worker)}.json")
        try:
            return json.loads(storage.read(path)) if worker else self.state
        except FileNotFoundError:
            return self.state

    def read(self, key: str, sharding: Sharding, place) -> tf.Tensor:
        """The part of a tensor that a device has; see `read_part`."""
        return read_part(
            storage.join(self.path, self.tensors[key].get("in", "parts")),
            key,
            tf.as_dtype(self.tensors[key]["dtype"]),
            sharding,
            place,
        )

    def read_whole(self, key: str) -> tf.Tensor:
        """A tensor."""
        entry = self.tensors[key]
        size = tf.as_dtype(entry["dtype"]).size
        return self.read(key, Sharding(tuple(entry["shape"]), size), (0, 0))


def begin(folder: str, step: int) -> str:
    """Makes the folder of a backup; returns its path.

    Args:
        folder: Where backups are.
        step: Steps that the run has made.
    """
    path = storage.join(folder, f"{_PREFIX}{step:08d}-{uuid.uuid4().hex}")
    storage.make_folder(path)
    return path


def write_files(
    path: str,
    parts: list[Part],
    state: Mapping[str, Any],
    worker: int = 0,
    did: Callable[[int], None] = at_once,
) -> dict[str, Any]:
    """Writes the files of a worker.

    Args:
        path: What `begin` returned.
        parts: Parts of tensors, each once; is empty in the end.
        state: JSON.
        worker: Which one of the workers it is.
        did: Is told of bytes, once when they are written and once when their
            digest is known; see `Pace.did`.

    Returns:
        What is in them, JSON for `seal`.
    """
    name = _name("parts", worker)
    tensors = {
        part.key: {
            "shape": list(part.sharding.shape),
            "dtype": part.value.dtype.name,
            **({"in": name} if worker else {}),
        }
        for part in parts
    }
    files = []
    if parts:
        write_parts(storage.join(path, name), parts, did)
        files = [n for n in storage.names(path) if n.startswith(f"{name}.")]
        storage.flush([storage.join(path, n) for n in sorted(files)])
    text = f"{_name('state', worker)}.json"
    storage.write(storage.join(path, text), json.dumps(state).encode())
    return {
        "files": {
            n: storage.size_and_digest(storage.join(path, n), did)
            for n in [*sorted(files), text]
        },
        "tensors": tensors,
    }


def _name(kind, worker):
    return f"{kind}-{worker}" if worker else kind


def seal(path: str, step: int, contents: Sequence[Mapping[str, Any]]) -> None:
    """Writes the manifest, by which the backup is there.

    Args:
        path: What `begin` returned.
        step: Steps that the run has made.
        contents: What `write_files` returned, of each worker.
    """
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "files": {},
        "tensors": {},
    }
    for content in contents:
        manifest["files"].update(content["files"])
        manifest["tensors"].update(content["tensors"])
    text = json.dumps(manifest)
    storage.write(
        storage.join(path, _MANIFEST),
        json.dumps({"digest": _digest(text), "manifest": text}).encode(),
    )


def open_backup(path: str, *, is_verified: bool = False) -> Backup:
    """Reads a backup, and each byte of it once.

    Args:
        path: Its folder.
        is_verified: Whether somebody has read all of it already.

    Raises:
        DamagedBackupError: If it is not what was written; says in which way.
    """
    try:
        outer = json.loads(storage.read(storage.join(path, _MANIFEST)))
        text = outer["manifest"]
        if _digest(text) != outer["digest"]:
            raise DamagedBackupError("its manifest has another digest")
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            raise DamagedBackupError(
                f"it has format {manifest['format']}, this version reads "
                f"{FORMAT}"
            )
        for name, expected in manifest["files"].items():
            if is_verified:
                break
            found = storage.size_and_digest(storage.join(path, name))
            if found[0] != expected[0]:
                raise DamagedBackupError(
                    f"{name} has {found[0]} bytes of {expected[0]}"
                )
            if found[1] != expected[1]:
                raise DamagedBackupError(f"{name} has another SHA-256")
        state = json.loads(storage.read(storage.join(path, "state.json")))
    except FileNotFoundError as error:
        raise DamagedBackupError(f"{error} is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedBackupError(
            f"its manifest cannot be read ({error!r})"
        ) from None
    return Backup(path, manifest["step"], state, manifest["tensors"])


def _digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def begun(folder: str) -> list[str]:
    """Names of folders of backups, the newest first, complete or not."""
    found = [n for n in storage.names(folder) if n.startswith(_PREFIX)]
    return sorted(found, reverse=True)


def is_complete(path: str) -> bool:
    """Whether a manifest is there; it may still not verify."""
    return _MANIFEST in storage.names(path)


def remove(path: str) -> None:
    """Removes a backup; what a kill leaves of it is none."""
    storage.remove_file(storage.join(path, _MANIFEST))
    storage.remove_folder(path)
