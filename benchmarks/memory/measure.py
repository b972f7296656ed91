"""Measures one configuration in a process of its own."""

import os

from benchmarks import processes

# Its activations are small beside its weights.
GPT = {"gpt": True, "depth": 8, "width": 512, "batch": 1}
# Both count: the one on x86, the other where there is no oneDNN.
COUNTING = {"TF_ENABLE_ONEDNN_OPTS": "1", "TF_CPU_ALLOCATOR_USE_BFC": "true"}


def measure(config, **arguments):
    """What the worker says of a configuration."""
    return processes.measure(
        "benchmarks.memory.worker",
        config,
        env={**os.environ, **COUNTING},
        **arguments,
    )
