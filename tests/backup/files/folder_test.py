"""A backup is there whole or not at all; a bad one is set aside, with why."""

import concurrent.futures
import ctypes
import errno
import fcntl
import hashlib
import itertools
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import unittest
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfscale.backup.files import committed
from tfscale.backup.files import folder as folder_module
from tfscale.backup.files import storage
from tfscale.backup.files.folder import BackupFolder
from tfscale.backup.files.storage import storage_of
from tfscale.backup.files.tensor_shards import TensorShard
from tfscale.variables.sharding import Sharding

FILES = ("parts.index", "parts.data-00000-of-00001", "state.json")
MANIFEST = "MANIFEST.json"


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut(path, size):
    content = path.read_bytes()
    path.write_bytes(content[: size(len(content))])


def in_place_of(make):
    def damage(path):
        path.unlink()
        make(path)

    return damage


_CLONE_NEWNS = 0x20000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND = 1, 32, 4096
_MS_REC, _MS_PRIVATE = 16384, 1 << 18


def make_read_only(path):
    """For this thread: by a mount, since root may write whatever the mode."""
    if os.geteuid():
        os.chmod(path, 0o500)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    target = path.encode()
    for result in (
        libc.unshare(_CLONE_NEWNS),
        libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None),
        libc.mount(target, target, None, _MS_BIND, None),
        libc.mount(
            None, target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY, None
        ),
    ):
        if result:
            raise unittest.SkipTest("Root may not mount here.")


# What is said of each.
WORDS = {**{name: name for name in FILES}, MANIFEST: "(MANIFEST|manifest)"}
DAMAGES = {
    "nothing left": lambda path: cut(path, lambda n: 0),
    "half": lambda path: cut(path, lambda n: n // 2),
    "ten bytes short": lambda path: cut(path, lambda n: n - 10),
    "one bit": flip,
    "missing": lambda path: path.unlink(),
    "a folder": in_place_of(lambda path: path.mkdir()),
    "a link": in_place_of(lambda path: path.symlink_to("/dev/zero")),
    "a pipe": in_place_of(os.mkfifo),
}


class FolderTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.path = self.create_tempdir().full_path
        self.folder = BackupFolder(self.path, keep=2)
        self.folder.acquire()
        self.addCleanup(self.folder.release)

    def commit(self, step):
        value = tf.constant(np.full([5], step, np.float32))
        part = TensorShard("v", Sharding((5,), 4), (0, 0), value)
        self.folder.commit(step, [part], {"text": f"step {step}"})

    def newest_file(self, name):
        (newest,) = [
            n for n in os.listdir(self.path) if n.startswith("backup-00000002")
        ]
        return pathlib.Path(self.path, newest, name)

    def test_the_newest_is_read(self):
        for step in (1, 2, 3):
            self.commit(step)
        backup = self.folder.newest()
        self.assertEqual((backup.step, backup.state["text"]), (3, "step 3"))
        self.assertAllEqual(backup.read_whole("v"), [3.0] * 5)

    def test_no_more_are_kept_than_asked_for(self):
        for step in range(5):
            self.commit(step)
        self.assertLen(committed.begun(self.path), 2)

    def test_without_any_there_is_none(self):
        self.assertIsNone(self.folder.newest())

    @parameterized.product(name=[*FILES, MANIFEST], damage=list(DAMAGES))
    def test_damage_falls_back_to_the_one_before(self, name, damage):
        self.commit(1)
        self.commit(2)
        DAMAGES[damage](self.newest_file(name))
        with self.assertLogs(level="WARNING") as logs:
            self.assertEqual(self.folder.newest().step, 1)
        self.assertRegex(logs.output[0], f"is set aside: .*{WORDS[name]}")
        self.assertLen(committed.damaged(self.path), 1)

    def test_who_changes_no_file_falls_back_with_a_word_too(self):
        # `export_backup` wrote an older model and said nothing.
        self.commit(1)
        self.commit(2)
        flip(self.newest_file("state.json"))
        with self.assertLogs(level="WARNING") as logs:
            newest = self.folder.newest(leave_damaged=True)
        self.assertEqual(newest.step, 1)
        self.assertRegex(logs.output[0], "is left out: .*another SHA-256")
        self.assertEmpty(committed.damaged(self.path))

    def test_with_nothing_left_it_is_an_error_again_and_again(self):
        self.commit(2)
        flip(self.newest_file("state.json"))
        for _ in range(2):
            with self.assertRaisesRegex(
                committed.DamagedBackupError,
                "Received: 1 damaged .* state.json has another SHA-256. Remove",
            ):
                self.folder.newest()

    @parameterized.product(
        error=(
            OSError(errno.EIO, "Input/output error"),
            PermissionError(errno.EACCES, "Permission denied"),
            tf.errors.UnavailableError(None, None, "503"),
        ),
        method=("names", "is_file", "read", "size_and_digest"),
        leave_damaged=(False, True),
    )
    def test_errors_of_reading_are_tried_again_and_leave_all_as_it_is(
        self, error, method, leave_damaged
    ):
        # All backups were renamed, and the next start refused them.
        self.commit(1)
        self.commit(2)
        names = sorted(os.listdir(self.path))
        original = getattr(storage.LocalStorage, method)
        failures = itertools.count()

        def fail(of, *arguments):
            if self.path in of.path_of("") and next(failures) < number:
                raise error
            return original(of, *arguments)

        with (
            mock.patch.object(folder_module, "_WAITS", (0.0, 0.0)),
            mock.patch.object(storage.LocalStorage, method, fail),
        ):
            number = 2
            newest = self.folder.newest(leave_damaged=leave_damaged)
            self.assertEqual(newest.step, 2)
            number = 1_000
            message = re.escape(f"backup_dir={self.path!r}: {error}")
            with self.assertRaisesRegex(OSError, message):
                self.folder.newest(leave_damaged=leave_damaged)
        self.assertEqual(sorted(os.listdir(self.path)), names)
        self.assertEqual(self.folder.newest().step, 2)

    def test_each_fit_of_a_program_has_backups_of_its_own(self):
        second = BackupFolder(self.path, keep=1, fit=2)
        for step in (7, 8, 9):
            self.commit(step)
            second.commit(step - 5, [], {})
        self.assertLen(committed.begun(self.path), 3)
        self.assertEqual(self.folder.newest().step, 9)
        self.assertEqual(second.newest().step, 4)
        of_all = BackupFolder(self.path, keep=1, fit=None)
        self.assertEqual(of_all.newest(leave_damaged=True).step, 4)
        with self.assertLogs(level="WARNING") as logs:
            self.folder.newest()
        self.assertRegex(logs.output[0], "number 2 .* number 1 ")
        flip(pathlib.Path(second.newest().path, "state.json"))
        with self.assertRaisesRegex(
            committed.DamagedBackupError, "Received: 1 damaged"
        ):
            second.newest()
        self.assertEqual(self.folder.newest().step, 9)
        self.folder.clear()
        self.assertLen(committed.damaged(self.path), 1)
        second.clear()
        self.assertEqual(os.listdir(self.path), ["LOCK"])

    @parameterized.parameters(
        *("run[1]", "lr=[0.1,0.2]", "[", "]", "back\\slash", "a*b?c{d}"),
        *("two\nlines", " spaces ", "größe", "per%20cent", "~", "#a&b;c$d'\""),
        *("s://t", "-x", "a" * 200),
    )
    def test_any_path_of_the_file_system_is_written_and_read(self, name):
        # TensorFlow took brackets for a pattern, and found no file.
        for path in (f"{self.path}/{name}", f"file://{self.path}/{name}/b"):
            folder = BackupFolder(path, keep=1)
            folder.acquire()
            value = tf.constant([1.0, 2.0])
            shard = TensorShard("v", Sharding((2,), 4), (0, 0), value)
            folder.commit(1, [shard], {})
            self.assertAllEqual(folder.newest().read_whole("v"), value)
            self.assertIsInstance(storage_of(path), storage.LocalStorage)
            with self.assertRaises(BlockingIOError):
                BackupFolder(path, keep=1).acquire()
            folder.release()
        self.assertTrue(os.path.exists(f"{self.path}/{name}/b"))

    @parameterized.parameters("nul\0", "\udcff", "a" * 300)
    def test_a_path_that_it_does_not_take_is_refused(self, name):
        with self.assertRaisesRegex(OSError, "`backup_dir` must be writable"):
            BackupFolder(f"{self.path}/{name}", keep=1).acquire()

    @parameterized.parameters("ram://run[1]", "gs://a/b\\c")
    def test_a_remote_path_that_tensorflow_cannot_read_is_refused(self, path):
        with self.assertRaisesRegex(ValueError, "Received: backup_dir="):
            BackupFolder(path, keep=1)

    def test_what_a_kill_left_is_removed_and_no_error(self):
        self.commit(1)
        path = committed.begin(self.path, 2)
        committed.write_files(path, [], {})
        self.assertEqual(self.folder.newest().step, 1)
        self.assertLen(committed.begun(self.path), 1)

    @parameterized.parameters("one manifest", "all manifests")
    def test_a_lost_manifest_removes_no_tensors(self, lost):
        self.commit(1)
        self.commit(2)
        for path in list(pathlib.Path(self.path).glob(f"backup-*/{MANIFEST}")):
            if lost == "all manifests" or "backup-00000002" in str(path):
                path.unlink()
        if lost == "one manifest":
            self.assertEqual(self.folder.newest().step, 1)
        else:
            with self.assertRaisesRegex(
                committed.DamagedBackupError, "MANIFEST.json is missing"
            ):
                self.folder.newest()
        self.assertLen(list(pathlib.Path(self.path).glob("*/parts.index")), 2)

    def test_what_somebody_else_has_there_stays(self):
        """Names that begin alike were removed, through links as well."""
        elsewhere = pathlib.Path(self.create_tempdir().full_path)
        (elsewhere / "data").write_text("precious")
        own = pathlib.Path(self.path)
        names = ("backup-2024-thesis", "damaged-goods", "backup-1-abc")
        for name in names:
            (own / name).mkdir()
            (own / name / "thesis.tex").write_text("years of work")
        (own / "backup-notes.txt").write_text("notes")
        for name in ("backup-latest", f"backup-00000009-{'a' * 32}"):
            (own / name).symlink_to(elsewhere)
        before = sorted(os.listdir(self.path))
        self.commit(1)
        (backup,) = committed.begun(self.path)
        (own / backup / "linked").symlink_to(elsewhere)
        self.assertEqual(self.folder.newest().step, 1)
        self.commit(2)
        self.folder.clear()
        self.assertEqual(sorted(os.listdir(self.path)), before)
        self.assertEqual((elsewhere / "data").read_text(), "precious")
        for name in names:
            self.assertTrue((own / name / "thesis.tex").exists())

    @parameterized.parameters(
        (lambda m: m["files"].update({"../../x": [0, ""]}), "'../../x', which"),
        (lambda m: m["files"].update({"/dev/zero": [0, ""]}), "'/dev/zero'"),
        (lambda m: m["files"].update(notes=[0, ""]), "lists 'notes', which"),
        (lambda m: m["files"].clear(), "does not list '"),
        (lambda m: m["files"].pop("state.json"), "not list 'state.json'"),
        (lambda m: m["tensors"]["v"].update({"in": "../x/parts"}), "not list"),
        (lambda m: m.update(files=3), "cannot be read"),
    )
    def test_a_manifest_lists_what_a_backup_has(self, change, message):
        """It was read whatever it named: a device for ever."""
        self.commit(1)
        self.commit(2)
        path = self.newest_file(MANIFEST)
        manifest = json.loads(json.loads(path.read_text())["manifest"])
        change(manifest)
        text = json.dumps(manifest)
        digest = hashlib.sha256(text.encode()).hexdigest()
        path.write_text(json.dumps({"digest": digest, "manifest": text}))
        with self.assertLogs(level="WARNING") as logs:
            self.assertEqual(self.folder.newest().step, 1)
        self.assertIn(message, logs.output[0])

    def test_a_name_that_is_taken_is_no_reason_to_fail(self):
        self.commit(1)
        self.commit(2)
        path = self.newest_file("state.json")
        os.mkdir(f"{self.path}/damaged-{path.parent.name}")
        flip(path)
        self.assertEqual(self.folder.newest().step, 1)
        self.assertLen(committed.damaged(self.path), 2)

    def test_newer_is_who_has_more_steps(self):
        for step in (99_999_999, 100_000_000):
            self.commit(step)
        self.assertEqual(self.folder.newest().step, 100_000_000)

    def test_files_of_a_worker_that_are_not_there_are_said(self):
        path = committed.begin(self.path, 1)
        content = committed.write_files(path, [], {}, worker=1)
        os.remove(f"{path}/state-1.json")
        with self.assertRaisesRegex(FileNotFoundError, "state-1.json"):
            committed.seal(path, 1, [content])

    def test_a_folder_that_was_removed_comes_back_with_its_lock(self):
        self.commit(1)
        shutil.rmtree(self.path)
        self.commit(2)
        self.assertEqual(self.folder.newest().step, 2)
        with self.assertRaisesRegex(BlockingIOError, "in use by this process"):
            BackupFolder(self.path, keep=1).acquire()

    def test_one_that_another_job_has_made_by_then_is_its_own(self):
        shutil.rmtree(self.path)
        other = BackupFolder(self.path, keep=1)
        other.acquire()
        self.addCleanup(other.release)
        with self.assertRaisesRegex(BlockingIOError, "in use by"):
            self.commit(1)
        self.assertEqual(os.listdir(self.path), ["LOCK"])

    def test_a_file_system_without_locks_is_said_and_used(self):
        # Such as Lustre by default: it was refused as one that is read-only.
        folder = BackupFolder(self.create_tempdir().full_path, keep=1)
        error = OSError(errno.ENOSYS, "Function not implemented")
        with (
            mock.patch.object(fcntl, "flock", side_effect=error),
            self.assertLogs(level="WARNING") as logs,
        ):
            folder.acquire()
        self.assertIn("has no locks (Function not imp", logs.output[0])
        folder.commit(1, [], {})
        self.assertLen(committed.begun(folder.path), 1)
        folder.release()

    def test_a_folder_may_be_in_one_that_nobody_may_list(self):
        # As those of the users of a cluster: it was refused as read-only.
        folder = BackupFolder(self.create_tempdir().full_path, keep=1)
        with mock.patch.object(storage, "_sync", side_effect=PermissionError):
            folder.acquire()
        folder.release()

    def test_a_full_disk_leaves_the_backups_before(self):
        self.commit(1)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, before)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        self.addCleanup(signal.signal, signal.SIGXFSZ, handler)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        with self.assertRaisesRegex(
            OSError, "File too large.*, after 2 steps, .* Free space"
        ):
            self.commit(2)
        # What could not be completed makes room again.
        self.assertLen(committed.begun(self.path), 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        self.assertEqual(self.folder.newest().step, 1)

    def test_a_read_only_folder_is_said_and_its_backups_are_read(self):
        self.commit(1)
        other = self.create_tempdir().full_path

        def look():
            make_read_only(self.path)
            make_read_only(other)
            with self.assertRaisesRegex(
                OSError, "after 2 steps, in .* or make the folder writable"
            ):
                self.commit(2)
            self.assertEqual(self.folder.newest().step, 1)
            with self.assertRaisesRegex(
                OSError, "`backup_dir` must be writable. Received: "
            ):
                BackupFolder(other, keep=1).acquire()

        # A thread can have mounts of its own.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            thread.submit(look).result()

    def test_a_file_system_of_tensorflow_works(self):
        folder = BackupFolder("ram://backups/run", keep=1)
        folder.acquire()
        for step in (1, 2):
            value = tf.constant([float(step)])
            part = TensorShard("v", Sharding((1,), 4), (0, 0), value)
            folder.commit(step, [part], {})
        self.assertAllEqual(folder.newest().read_whole("v"), [2.0])
        self.assertLen(committed.begun(folder.path), 1)
        folder.clear()
        self.assertIsNone(folder.newest())


if __name__ == "__main__":
    tf.test.main()
