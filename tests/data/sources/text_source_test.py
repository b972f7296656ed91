"""Text: what a tokenizer and its files may be, and errors that name a file."""

import os

import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tfscale import data


def _ids(text):
    return [ord(c) for c in text]


class TextTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.path = os.path.join(self.create_tempdir().full_path, "a.txt")
        tf.io.write_file(self.path, "hello world")

    @parameterized.named_parameters(
        ("dict", lambda text: {"input_ids": _ids(text)}, "a dict"),
        ("nothing", lambda text: None, "a NoneType"),
        # They were cut to integers.
        ("fractions", lambda text: [1.5, 2.9] * 9, "dtype float64"),
        ("whole floats", lambda text: [1.0, 2.0] * 9, "dtype float64"),
        ("words", lambda text: text.split(), "dtype <U5"),
        ("booleans", lambda text: [True, False] * 9, "dtype bool"),
        ("a number", lambda text: 7, r"an? int of shape \(\)"),
        ("rows", lambda text: [_ids(text)] * 2, r"shape \(2, 11\)"),
        ("lists", lambda text: [[1], [2, 3]], "a list"),
        ("large", lambda text: [2**31] * 9, "2147483648"),
    )
    def test_what_is_no_row_of_integers_is_refused(self, tokenizer, received):
        with self.assertRaisesRegex(ValueError, received) as caught:
            data.text(self.path, 4, tokenizer=tokenizer)
        self.assertIn(self.path, str(caught.exception))

    @parameterized.parameters(np.int32, np.uint8, np.int64)
    def test_arrays_of_integers_are_tokens(self, dtype):
        source = data.text(
            self.path, 4, tokenizer=lambda text: np.array(_ids(text), dtype)
        )
        self.assertAllEqual(source.read(0)[0], _ids("hell"))

    def test_a_file_without_a_token_among_others(self):
        tf.io.write_file(self.path + "2", "")
        source = data.text(self.path + "*", 4, tokenizer=_ids)
        self.assertEqual(source.num_records, 2)

    def test_a_file_of_another_encoding_is_named(self):
        with open(self.path, "wb") as file:
            file.write(b"abc" + "äöü".encode("latin-1"))
        with self.assertRaisesRegex(
            tf.errors.DataLossError, f"{self.path}.* byte 3"
        ):
            data.text(self.path, 4, tokenizer=_ids)
        self.assertEqual(data.text(self.path, 2).num_records, 2)

    def test_negative_tokens(self):
        # A tokenizer's -1 for an unknown word trained the last row of a table.
        with self.assertRaisesRegex(ValueError, f"{self.path} with -1 to 2"):
            data.text(self.path, 2, tokenizer=lambda text: [2, 1, -1, 0])
        with self.assertRaisesRegex(ValueError, "ids.* with -100 to 3"):
            data.tokens(np.array([3, -100, 1], "int32"), 1)
        with self.assertRaisesRegex(ValueError, "document 1 with -1 to -1"):
            data.pack([[1, 2], [-1]], 4)

    def test_the_file_on_which_a_tokenizer_fails_is_noted(self):
        def tokenizer(text):
            raise KeyError(text)

        with self.assertRaises(KeyError) as caught:
            data.text(self.path, 4, tokenizer=tokenizer)
        self.assertIn(self.path, caught.exception.__notes__[0])


if __name__ == "__main__":
    absltest.main()
