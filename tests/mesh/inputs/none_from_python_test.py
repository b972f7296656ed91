"""None among the tensors of a generator's batches, as in `none_test.py`.

Keras does not take a `PyDataset` with None.
"""

import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests.mesh.inputs import none_test


class GeneratorTest(none_test.NoneCase):
    @parameterized.product(
        case=list(none_test.CASES), mesh=list(none_test.MESHES)
    )
    @pytest.mark.crossing(every=44)
    def test_is_as_on_one_device(self, case, mesh):
        case, mesh = none_test.CASES[case], none_test.MESHES[mesh]
        self.assert_same(*none_test.outcomes(case, mesh, "batches"))


if __name__ == "__main__":
    tf.test.main()
