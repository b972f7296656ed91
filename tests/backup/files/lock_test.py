"""A folder of backups is of one job, for as long as that has it."""

import os
import shutil
import signal
import subprocess

from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_python
from tests.source_files import REPOSITORY
from tfscale.backup.files.lock import FolderLock

_SECONDS = 60
# Says that it is there, and ends when nobody has the other end of its pipe.
_PROGRAM = """
import os, shutil, sys
from tfscale.backup.files.lock import FolderLock

lock = FolderLock(sys.argv[1])
{}
print("locked", os.getpid(), flush=True)
sys.stdin.read()
"""


class FolderLockTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.path = self.create_tempdir().full_path

    def owner(self, then=""):
        """The id of a process that has the lock, and has done something."""
        owner = subprocess.Popen(
            [
                *(forked_python.executable(), "-c", _PROGRAM.format(then)),
                self.path,
            ],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.addCleanup(owner.wait, _SECONDS)
        self.addCleanup(owner.kill)
        self.addCleanup(owner.stdout.close)
        self.addCleanup(owner.stdin.close)
        said, _, number = owner.stdout.readline().partition(b" ")
        self.assertEqual(said, b"locked")
        return int(number), owner

    def test_a_second_one_in_the_process_is_refused(self):
        lock = FolderLock(self.path)
        with self.assertRaisesRegex(BlockingIOError, "in use by this process"):
            FolderLock(self.path)
        lock.release()
        FolderLock(self.path).release()

    @parameterized.named_parameters(
        ("nothing", ""),
        # As a callback that copies backups elsewhere, which ended `lockf`.
        ("a copy", "shutil.copytree(sys.argv[1], sys.argv[1] + '-copy')"),
        ("a look", "open(sys.argv[1] + '/LOCK').close()"),
        ("a forked child that ends", "os.fork() or sys.exit(); os.wait()"),
    )
    def test_it_is_held_whatever_the_process_does(self, then):
        number, _ = self.owner(then)
        with self.assertRaisesRegex(BlockingIOError, f"process {number}"):
            FolderLock(self.path)

    def test_it_ends_with_its_owner_though_a_forked_child_lives(self):
        # The child ends with this test: it reads what nobody writes.
        number, owner = self.owner(
            "os.fork() or (sys.stdin.read(), os._exit(0))"
        )
        os.kill(number, signal.SIGKILL)
        owner.wait(_SECONDS)
        FolderLock(self.path).release()

    def test_it_is_removed_when_it_is_released(self):
        FolderLock(self.path).release()
        self.assertEmpty(os.listdir(self.path))

    def test_it_is_not_held_once_the_folder_is_another_one(self):
        lock = FolderLock(self.path)
        self.assertTrue(lock.is_held)
        shutil.rmtree(self.path)
        self.assertFalse(lock.is_held)
        os.mkdir(self.path)
        other = FolderLock(self.path)
        lock.release()  # and takes nothing from the other one
        self.assertTrue(other.is_held)
        self.assertFalse(lock.is_held)
        other.release()

    def test_what_a_link_leads_to_is_left_alone(self):
        file = self.create_tempfile(content="precious").full_path
        os.symlink(file, f"{self.path}/LOCK")
        with self.assertRaises(OSError):
            FolderLock(self.path)
        with open(file) as found:
            self.assertEqual(found.read(), "precious")


if __name__ == "__main__":
    absltest.main()
