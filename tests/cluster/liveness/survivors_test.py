"""Those of a cluster who are there go on, if all of them say the same."""

import threading

from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_processes
from tfscale.cluster import Cluster
from tfscale.cluster.liveness.survivors import survivors


class SurvivorsTest(parameterized.TestCase):
    @parameterized.parameters((3, 3, 2), (3, 2, 2), (3, 2, 3), (2, 1, 2))
    def test_enough_of_them_are_there_or_it_is_an_error(
        self, count, there, least
    ):
        addresses = forked_processes.free_addresses(count)
        found = [None] * there

        def run(index):
            cluster = Cluster({"worker": addresses}, "worker", index)
            try:
                left = survivors(cluster, {}, least=least, timeout=1.5, say=len)
                found[index] = (left.addresses, left.address)
            except ConnectionError as error:
                found[index] = str(error)

        threads = [
            threading.Thread(target=run, args=(index,))
            for index in range(there)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index in range(there):
            if there >= least:
                expected = tuple(addresses[:there]), addresses[index]
                self.assertEqual(found[index], expected)
            else:
                self.assertIn(f"still missing: {addresses[-1]}", found[index])


if __name__ == "__main__":
    absltest.main()
