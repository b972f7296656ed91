import os

import pytest
from absl.testing import absltest

from tests import forked_python
from tests.source_files import REPOSITORY


class DrawTimelineTest(absltest.TestCase):
    @pytest.mark.crossing
    def test_it_draws_what_was_predicted_and_measured(self):
        output = os.path.join(self.create_tempdir().full_path, "timeline.png")
        process = forked_python.run(
            [
                *("-m", "examples.draw_timeline", f"--output={output}"),
                *("--num_blocks=2", "--width=16", "--sequence_length=8"),
                *("--batch_size=4", "--num_microbatches=2"),
            ],
            REPOSITORY,
        )
        self.assertEqual(process.returncode, 0, process.stderr)
        self.assertRegex(process.stdout, "predicted: (.|\n)*measured: ")
        with open(output, "rb") as file:
            self.assertEqual(file.read(4), b"\x89PNG")


if __name__ == "__main__":
    absltest.main()
