import dataclasses

from absl.testing import absltest
from absl.testing import parameterized

from tfscale.planner.device import DEVICES
from tfscale.planner.device import get_device


class DeviceTest(parameterized.TestCase):
    @parameterized.parameters(
        ("A100", "A100"), ("h200", "H200"), ("v5e", "TPU v5e")
    )
    def test_presets_go_by_their_names(self, name, found):
        self.assertIs(get_device(name), DEVICES[found])

    def test_a_device_is_taken_as_it_is(self):
        device = dataclasses.replace(DEVICES["H100"], memory=1e9)
        self.assertIs(get_device(device), device)

    def test_an_unknown_name_is_refused_with_the_nearest(self):
        with self.assertRaisesRegex(
            ValueError, "one of 'A100', .*device='H10'. Did you mean 'H100'"
        ):
            get_device("H10")

    def test_anything_else_is_refused(self):
        with self.assertRaisesRegex(TypeError, "Received: device=8"):
            get_device(8)

    @parameterized.parameters("memory", "flops", "latency")
    def test_figures_are_above_0(self, name):
        with self.assertRaisesRegex(ValueError, f"`{name}` of a device must"):
            dataclasses.replace(DEVICES["H100"], **{name: -1.0})

    def test_a_device_that_is_alone_is_no_slower(self):
        with self.assertRaisesRegex(ValueError, "1 or more. .*speed_alone=0"):
            dataclasses.replace(DEVICES["H100"], speed_alone=0.9)


if __name__ == "__main__":
    absltest.main()
