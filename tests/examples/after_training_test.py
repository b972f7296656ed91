"""The examples that shrink, export and average models run and learn."""

import os
import re

import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_python
from tests.source_files import REPOSITORY

SMALL = ("--num_rows=256", "--num_epochs=2")


def run(module, *arguments):
    """What an example prints."""
    command = ["-m", f"examples.{module}", *arguments, *SMALL]
    done = forked_python.run(command, REPOSITORY, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(pattern, text):
    return [float(x) for x in re.findall(pattern, text)]


class AfterTrainingTest(parameterized.TestCase):
    @parameterized.parameters(
        (("--flagfile=configs/distill.flags",), 3, 0.5),
        (("--flagfile=configs/distill_noisy.flags",), 2, 0.9),
        (("--offline", "--num_replicas=2"), 3, 0.5),
    )
    @pytest.mark.crossing
    def test_distill(self, arguments, count, least):
        found = numbers(r"accuracy (\S+)", run("distill", *arguments))
        self.assertLen(found, count)
        self.assertGreater(found[-1], least)  # of guessing it is 0.25

    @parameterized.parameters(
        ("--flagfile=configs/compress.flags",), ("--model_parallel=2",)
    )
    @pytest.mark.crossing
    def test_compress(self, *arguments):
        text = run("compress", *arguments)
        base, _, tuned = numbers(r"accuracy (\S+)", text)
        self.assertGreater(tuned, base - 0.02)
        before, after, _ = numbers(r": (\d+) parameters", text)
        self.assertLess(after, before / 2)
        if arguments[0].startswith("--flagfile"):
            # Of networks of classes as stages only logits are sent.
            received = numbers(r"receives (\d+) numbers", text)
            self.assertEqual(received, [0, 2])

    @pytest.mark.crossing
    def test_export_litert(self):
        folder = self.create_tempdir().full_path
        text = run(
            "export_litert",
            "--flagfile=configs/export_litert.flags",
            f"--folder={folder}",
        )
        whole, dynamic, full = numbers(r"error (\S+)", text)
        self.assertLess(whole, 1e-5)
        self.assertLess(max(dynamic, full), 0.05)
        sizes = [
            os.path.getsize(os.path.join(folder, f"{kind}.tflite"))
            for kind in ("float", "dynamic_int8", "full_int8")
        ]
        self.assertLess(max(sizes[1:]), 0.35 * sizes[0])

    @parameterized.parameters(False, True)
    @pytest.mark.crossing
    def test_clients_in_turn_or_as_processes(self, launched):
        flags = ("--num_clients=2", "--num_rounds=2", "--one_step")
        in_turn = numbers(r"sum (\S+)", run("train_federated", *flags))
        self.assertLen(in_turn, 2)
        if not launched:
            return
        done = forked_python.run(
            [
                *("-m", "tfscale.launch", "--num_workers=2"),
                *("--module=true", "examples.train_federated", *flags, *SMALL),
            ],
            REPOSITORY,
            timeout=200,
        )
        text = done.stdout + done.stderr
        self.assertEqual(done.returncode, 0, text)
        found = numbers(r"sum (\S+)", text)
        self.assertLen(found, 4)
        for value in found:
            self.assertTrue(
                any(abs(value - x) < 1e-5 * x for x in in_turn), text
            )


if __name__ == "__main__":
    absltest.main()
