import json
import os
import re

import numpy as np
import pytest
from absl import app
from absl.testing import absltest
from absl.testing import parameterized

from examples import passages
from tests import forked_python
from tests.source_files import REPOSITORY

PRESET = """
import sys
import keras_hub
from examples import passages

models = keras_hub.models
backbone = models.BertBackbone(
    vocabulary_size=len(passages.vocabulary()), num_layers=int(sys.argv[2]),
    num_heads=2, hidden_dim=8, intermediate_dim=16, dropout=0.0,
    max_sequence_length=40)
backbone.save_to_preset(sys.argv[1])
models.BertTokenizer(vocabulary=passages.vocabulary()).save_to_preset(sys.argv[1])
"""


def run(*arguments):
    return forked_python.run(
        ["-m", "examples.finetune_bert", *arguments], REPOSITORY
    )


class FinetuneBertTest(parameterized.TestCase):
    def _train(self, *arguments):
        """What a run that ends well prints, and the losses of its epochs."""
        folder = self.create_tempdir().full_path
        process = run(*arguments, f"--model_file={folder}/bert.keras")
        self.assertEqual(process.returncode, 0, process.stderr)
        self.assertTrue(os.path.exists(f"{folder}/bert.keras"))
        losses = re.findall(r" - loss: (\S+)", process.stdout)
        return process.stdout, [float(loss) for loss in losses]

    @pytest.mark.crossing
    def test_it_answers_questions_about_passages_that_it_has_not_seen(self):
        output, _ = self._train("--flagfile=configs/finetune_bert.flags")
        before, after = map(float, re.findall(r"xact match.*: (\S+)", output))
        self.assertLess(before, 0.2)
        self.assertGreater(after, 0.9)
        self.assertIn("Who is Packt? publisher\n", output)

    def _small(self, num_layers):
        """Arguments of a short run, with a preset of so many blocks."""
        preset = f"{self.create_tempdir().full_path}/preset"
        done = forked_python.run(
            ["-c", PRESET, preset, str(num_layers)], REPOSITORY
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return (
            f"--preset={preset}",
            *("--num_passages=8", "--num_epochs=2", "--batch_size=16"),
        )

    @pytest.mark.crossing
    def test_replicas_learn_with_a_preset(self):
        _, losses = self._train(*self._small(1), "--num_replicas=2")
        self.assertLen(losses, 2)
        self.assertLess(losses[1], losses[0])

    @parameterized.parameters(
        ("--num_replicas=2",),
        ("--num_stages=2",),
        ("--model_parallel=2",),
        ("--mesh=auto",),
    )
    @pytest.mark.crossing
    def test_any_mesh_has_the_losses_of_one_device(self, mesh):
        arguments = self._small(2)
        _, expected = self._train(*arguments)
        _, losses = self._train(*arguments, mesh)
        self.assertLen(losses, 2)
        np.testing.assert_allclose(losses, expected, atol=2e-4)

    def test_a_preset_that_is_not_there(self):
        process = run("--preset=no_such_folder/preset")
        self.assertEqual(process.returncode, 1)
        self.assertIn("--preset=no_such_folder/preset", process.stderr)
        self.assertIn("save_to_preset", process.stderr)


class PassagesTest(parameterized.TestCase):
    def test_answers_stand_in_the_passages(self):
        questions = passages.built_in(50, seed=3)
        self.assertLen(questions, 200)
        vocabulary = set(passages.vocabulary())
        for q in questions:
            self.assertNotIn(q.passage[q.start], q.question)
            self.assertContainsSubset(q.passage + q.question, vocabulary)

    def test_rows_of_squad(self):
        context = "Oxygen (O) has the number 8."
        path = self.create_tempfile(
            content=json.dumps(
                {
                    "data": [
                        {
                            "paragraphs": [
                                {
                                    "context": context,
                                    "qas": [
                                        {
                                            "question": "Which number?",
                                            "answers": [
                                                {
                                                    "text": "8",
                                                    "answer_start": 26,
                                                }
                                            ],
                                        },
                                        {"question": "Whose?", "answers": []},
                                        {
                                            "question": "What is O?",
                                            "answers": [
                                                {
                                                    "text": "Oxygen (O)",
                                                    "answer_start": 0,
                                                }
                                            ],
                                        },
                                    ],
                                }
                            ]
                        }
                    ]
                }
            )
        ).full_path
        questions = passages.squad(path)
        self.assertEqual(
            [(q.start, q.end) for q in questions],
            [(7, 7), (None, None), (0, 3)],
        )
        words = {w for q in questions for w in q.question + q.passage}
        tokens_of = {w: [10 + len(w)] * len(w) for w in words}
        ids = {"[CLS]": 1, "[SEP]": 2, "[PAD]": 0}
        inputs, targets, words_of = passages.encode(
            questions, tokens_of, 60, ids
        )
        self.assertEqual(inputs["token_ids"].shape, (3, 60))
        self.assertEqual(targets["start"][1], 0)
        start, end = targets["start"][2], targets["end"][2]
        self.assertEqual(
            list(words_of[2][start : end + 1]), [0] * 6 + [1, 2, 3]
        )
        # Logits that are certain of an answer give it back.
        spans = passages.best_spans(
            np.eye(60)[targets["start"]], np.eye(60)[targets["end"]], words_of
        )
        np.testing.assert_array_equal(
            spans, np.stack([targets["start"], targets["end"]], 1)
        )
        # An answer that does not fit leaves its question out.
        short = passages.encode(questions, tokens_of, 30, ids)
        self.assertLen(short[2], 2)

    @parameterized.parameters("not JSON", '{"data": [{"paragraphs": 3}]}')
    def test_a_file_of_another_format(self, content):
        path = self.create_tempfile(content=content).full_path
        with self.assertRaisesRegex(app.UsageError, re.escape(path)):
            passages.squad(path)


if __name__ == "__main__":
    absltest.main()
