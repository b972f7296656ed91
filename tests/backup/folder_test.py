"""A backup is there whole or not at all; a bad one is set aside, with why."""

import concurrent.futures
import ctypes
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time
import unittest

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests.source_files import REPOSITORY
from tfscale.backup import committed
from tfscale.backup.folder import BackupFolder
from tfscale.backup.parts import Part
from tfscale.sharding.sharding import Sharding

FILES = ("parts.index", "parts.data-00000-of-00001", "state.json")
MANIFEST = "MANIFEST.json"


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut(path, size):
    content = path.read_bytes()
    path.write_bytes(content[: size(len(content))])


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


DAMAGES = {
    "nothing left": lambda path: cut(path, lambda n: 0),
    "half": lambda path: cut(path, lambda n: n // 2),
    "ten bytes short": lambda path: cut(path, lambda n: n - 10),
    "one bit": flip,
    "missing": lambda path: path.unlink(),
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
        part = Part("v", Sharding((5,), 4), (0, 0), value)
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
        unfinished = name == MANIFEST and damage == "missing"
        if unfinished:  # as a kill leaves it
            self.assertEqual(self.folder.newest().step, 1)
        else:
            with self.assertLogs(level="WARNING") as logs:
                self.assertEqual(self.folder.newest().step, 1)
            self.assertRegex(logs.output[0], "is set aside: ")
        aside = [n for n in os.listdir(self.path) if n.startswith("damaged-")]
        self.assertLen(aside, 0 if unfinished else 1)

    def test_with_nothing_left_it_is_an_error_again_and_again(self):
        self.commit(2)
        flip(self.newest_file("state.json"))
        for _ in range(2):
            with self.assertRaisesRegex(
                committed.DamagedBackupError,
                "Received: 1 in .* state.json has another SHA-256. Remove",
            ):
                self.folder.newest()

    def test_a_full_disk_leaves_the_backups_before(self):
        self.commit(1)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, before)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        self.addCleanup(signal.signal, signal.SIGXFSZ, handler)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        with self.assertRaisesRegex(
            OSError, "File too large.*, after 2 steps, .* Free some room"
        ):
            self.commit(2)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        self.assertEqual(self.folder.newest().step, 1)

    def test_a_read_only_folder_is_said_and_its_backups_are_read(self):
        self.commit(1)
        other = self.create_tempdir().full_path

        def look():
            make_read_only(self.path)
            make_read_only(other)
            with self.assertRaisesRegex(
                OSError, "after 2 steps, in .* or make it writable"
            ):
                self.commit(2)
            self.assertEqual(self.folder.newest().step, 1)
            with self.assertRaisesRegex(
                OSError, "must be a folder that can be written to. Received: "
            ):
                BackupFolder(other, keep=1).acquire()

        # A thread can have mounts of its own.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            thread.submit(look).result()

    def test_a_folder_of_another_job_is_refused(self):
        with self.assertRaisesRegex(BlockingIOError, "in use by this process"):
            BackupFolder(self.path, keep=1).acquire()

    def test_a_lock_dies_with_its_owner_though_a_forked_child_lives(self):
        path = self.create_tempdir().full_path
        owner = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"""
import os, sys, time
from tfscale.backup.storage import FolderLock
lock = FolderLock({path!r})
if not os.fork():
    time.sleep(60)
print("locked", flush=True)
time.sleep(60)
""",
            ],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.addCleanup(os.killpg, owner.pid, 9)
        self.addCleanup(owner.stdout.close)
        self.assertEqual(owner.stdout.readline(), b"locked\n")
        with self.assertRaisesRegex(BlockingIOError, f"process {owner.pid}"):
            BackupFolder(path, keep=1).acquire()
        owner.kill()
        owner.wait()
        time.sleep(0.1)
        folder = BackupFolder(path, keep=1)
        folder.acquire()
        folder.release()

    def test_a_file_system_of_tensorflow_works(self):
        folder = BackupFolder("ram://backups/run", keep=1)
        folder.acquire()
        for step in (1, 2):
            value = tf.constant([float(step)])
            part = Part("v", Sharding((1,), 4), (0, 0), value)
            folder.commit(step, [part], {})
        self.assertAllEqual(folder.newest().read_whole("v"), [2.0])
        self.assertLen(committed.begun(folder.path), 1)
        folder.clear()
        self.assertIsNone(folder.newest())


if __name__ == "__main__":
    tf.test.main()
