"""Speed and memory of a device and its links, of data sheets or measured."""

import dataclasses
import difflib


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of device, and the links between several of it.

    The defaults say how much of a data sheet a step reaches. They are fitted
    to table 1 of Narayanan et al. 2021, "Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM" (A100).

    Args:
        name: Name of the device.
        flops: Peak FLOP/s of dense products in 16 bits.
        float32_flops: The same in float32 (TF32 where TensorFlow uses that).
        memory: Bytes.
        memory_bandwidth: Bytes per second.
        link_bandwidth: Bytes per second to another device of its machine.
        network_bandwidth: Bytes per second to another machine.
        devices_per_machine: Number of devices that fast links join.
        efficiency: Fraction of the peak that a large matrix product reaches.
        startup: Seconds of overhead of each product.
        link_efficiency: Fraction of a link's bandwidth that is reached.
        passes: How many times an activation is read or written in a
            forward, and again in a backward.
        weight_passes: How many times a weight or its gradient goes through
            memory in a forward and its backward while nothing is computed:
            none if products hide that, 3 to 5 on CPUs.
        random_bytes: Bytes that memory moves in the time in which a random
            number is drawn.
        latency: Seconds of a message, whatever its size.
        update_bytes: Bytes that the update of a weight reads and writes: 28 if
            one program does it, more if each operation of it is one.
        small_update_bytes: The same where tensors of weights have less than
            `tfscale.planner.layers.LARGE_WEIGHT` elements: caches hold what
            one operation of an update hands to the next.
        speed_alone: How many times as fast it computes while all others wait,
            as virtual devices do, which share cores.

    Raises:
        ValueError: If a figure is not above 0, or `speed_alone` less than 1;
            `startup`, `latency`, `weight_passes` and `random_bytes` may be 0.

    Example: an H100 with half of its memory.

    >>> import dataclasses
    >>> from tfscale.planner import DEVICES
    >>> device = dataclasses.replace(DEVICES["H100"], memory=40e9)
    """

    name: str
    flops: float
    float32_flops: float
    memory: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    devices_per_machine: int = 8
    efficiency: float = 0.7
    startup: float = 2e-4
    link_efficiency: float = 0.9
    passes: float = 3.0
    weight_passes: float = 0.0
    random_bytes: float = 0.0
    latency: float = 1e-5
    update_bytes: float = 28.0
    small_update_bytes: float = 28.0
    speed_alone: float = 1.0

    @property
    def usable_memory(self) -> float:
        """Bytes that a plan may use; the rest is lost to the allocator."""
        return 0.9 * self.memory

    def __post_init__(self):
        leasts = {"startup": 0, "weight_passes": 0, "random_bytes": 0}
        leasts |= {"latency": 0, "speed_alone": 1}
        for name, value in dataclasses.asdict(self).items():
            if name != "name" and not value >= leasts.get(name, 1e-9):
                rule = (
                    f"{leasts[name]} or more" if name in leasts else "above 0"
                )
                raise ValueError(
                    f"`{name}` of a device must be {rule}. Received: "
                    f"{name}={value!r}."
                )


# Dense peaks in 16 bits and float32, bytes, and bytes per second (of links in
# one direction): memory, machine, network.
# https://www.nvidia.com/en-us/data-center/a100/ (SXM, 80 GB), .../h100/ (SXM)
# and .../h200/; in a DGX each has a network card of 200 and 400 Gb/s.
# https://cloud.google.com/tpu/docs/v5e and .../v6e: a pod is one machine.
DEVICES = {
    device.name: device
    for device in (
        Device("A100", 312e12, 156e12, 80e9, 2.039e12, 300e9, 25e9),
        Device("H100", 989e12, 494e12, 80e9, 3.35e12, 450e9, 50e9),
        Device("H200", 989e12, 494e12, 141e9, 4.8e12, 450e9, 50e9),
        Device("TPU v5e", 197e12, 197e12, 16e9, 819e9, 200e9, 3.1e9, 256),
        Device("TPU v6e", 918e12, 918e12, 32e9, 1.638e12, 400e9, 12.5e9, 256),
    )
}


def get_device(device: str | Device) -> Device:
    """The preset of that name, or the given device."""
    if isinstance(device, Device):
        return device
    if not isinstance(device, str):
        raise TypeError(
            "`device` must be the name of a preset, 'measure', or a "
            "`tfscale.planner.Device`. Received: "
            f"device={device!r}."
        )
    by_key = {_key(name): found for name, found in DEVICES.items()}
    if (found := by_key.get(_key(device))) is not None:
        return found
    close = difflib.get_close_matches(_key(device), by_key, n=1)
    hint = f" Did you mean {by_key[close[0]].name!r}?" if close else ""
    raise ValueError(
        f"`device` must be 'measure', one of {', '.join(map(repr, DEVICES))}, "
        f"or a custom `Device`. Received: device={device!r}.{hint}"
    )


def _key(name):
    return "".join(c for c in name.lower() if c.isalnum()).removeprefix("tpu")
