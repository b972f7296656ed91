"""Compares what the same-numbers harness trains on two commits, bit for bit.

    python -m tests.same_bits HEAD~1 HEAD -k "ragged or momentum" tests

Each commit is checked out and runs the tests that are named after the two, by
pytest's own arguments. All weights, slots, losses and metrics of every training
have to be equal to the last bit; what is not is listed, with how far away it
is. Trainings are known by the name of the test, which may have moved.
"""

import subprocess
import sys
import tempfile

import numpy as np
import pytest


class Recorder:
    """A plugin of pytest that keeps what each training of a test gave."""

    def __init__(self):
        self.arrays = {}
        self._test = None
        self._count = 0

    def pytest_runtest_setup(self, item):
        self._test, self._count = item.nodeid.split("::", 1)[-1], 0

    def recording(self, train):
        """The function of the harness that trains, which is listened to."""

        def run(*args, **kwargs):
            outcome = train(*args, **kwargs)
            self._count += 1
            training = f"{self._test} {self._count}"
            slots = [(f"{i} {p}", v) for i, (p, v) in enumerate(outcome.slots)]
            for kind, values in (
                ("weight", outcome.variables.items()),
                ("slot", slots),
                ("log", outcome.logs.items()),
            ):
                for name, value in values:
                    self.arrays[f"{training} {kind} {name}"] = np.array(value)
            return outcome

        return run


def save(path, arguments):
    """Runs tests of this checkout and saves what they trained."""
    from tests import same_numbers

    recorder = Recorder()
    same_numbers._train = recorder.recording(same_numbers._train)
    code = pytest.main(["-q", *arguments], plugins=[recorder])
    np.savez(path, **recorder.arrays)
    return int(code)


def differences(before, after):
    """What differs, a line each; of two dicts of arrays by name."""
    found = [f"only in one: {name}" for name in sorted({*before} ^ {*after})]
    for name in sorted({*before} & {*after}):
        one, other = before[name], after[name]
        if one.shape != other.shape or one.dtype != other.dtype:
            found.append(f"{name}: another shape or dtype")
        elif one.tobytes() != other.tobytes():
            scale = np.abs(one).max(initial=1e-30)
            largest = np.abs(one - other).max() / scale
            found.append(f"{name}: {largest:.1e} of the largest element")
    return found


def main(revisions, arguments):
    """Runs and compares two commits; returns the exit status."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for number, revision in enumerate(revisions):
            tree, path = f"{folder}/{number}", f"{folder}/{number}.npz"
            git = ["git", "worktree"]
            subprocess.run(
                [*git, "add", "--quiet", "--detach", tree, revision], check=True
            )
            try:
                # Older commits have no such file: this one runs in their tree.
                command = [sys.executable, __file__, "--save", path]
                subprocess.run([*command, *arguments], cwd=tree, check=True)
            finally:
                subprocess.run([*git, "remove", "--force", tree], check=True)
            with np.load(path) as arrays:
                results.append(dict(arrays))
    found = differences(*results)
    count = len({name.split(" ")[0] for name in results[0]})
    print(*found, sep="\n")
    print(
        f"{len(results[0])} arrays of {count} tests: "
        f"{len(found)} are not equal bit for bit"
    )
    return bool(found)


if __name__ == "__main__":
    if sys.argv[1] == "--save":
        sys.path[0] = ""  # the tree that is looked at, not that of this file
        sys.exit(save(sys.argv[2], sys.argv[3:]))
    sys.exit(main(sys.argv[1:3], sys.argv[3:]))
