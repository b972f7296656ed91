"""Memory while a preset is loaded onto a mesh: at the peak, and afterwards.

    python -m benchmarks.memory.loading

Resident memory of a process that loads a Llama from a folder, as multiples of
the bytes of the weights once: of all devices, and of what reads the file.
"""

import json
import resource
import sys
import tempfile

import keras
import keras_hub
from absl import app

import tfscale
from benchmarks import processes

_MESHES: dict[str, dict] = {
    "one device": {},
    "data=2": {"data": 2},
    "data=2, zero_stage=3": {"data": 2, "zero_stage": 3},
    "model=2": {"model": 2},
    "model=4": {"model": 4},
}


def _backbone():
    return keras_hub.models.Llama3Backbone(
        vocabulary_size=8000,
        num_layers=6,
        num_query_heads=8,
        num_key_value_heads=4,
        hidden_dim=1024,
        intermediate_dim=2816,
    )


def _load(config):
    """Loads the preset of a folder; returns multiples of its bytes."""
    zero_stage = config.pop("zero_stage", 0)
    folder, layouts = config.pop("folder"), config.pop("layouts")
    tfscale.use_virtual_devices(4)
    mesh = tfscale.device_mesh(**config)
    layout_map = None
    if layouts:
        layout_map = keras.distribution.LayoutMap(mesh)
        for pattern, axes in layouts.items():
            layout_map[pattern] = tuple(axes)
    before = _resident()
    strategy = tfscale.MeshStrategy(mesh, layout_map, zero_stage=zero_stage)
    with strategy.scope():
        backbone = keras_hub.models.Llama3Backbone.from_preset(folder)
    weights = sum(4 * w.value.shape.num_elements() for w in backbone.weights)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "peak": (peak - before) / weights,
        "rest": (_resident() - before) / weights,
    }


def _resident():
    """Bytes of this process in memory."""
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main(argv):
    del argv
    tfscale.use_virtual_devices(4)
    with tempfile.TemporaryDirectory() as folder:
        keras.utils.set_random_seed(0)
        _backbone().save_to_preset(folder)
        # Not where memory is measured: what it frees would be taken again.
        mesh = tfscale.device_mesh(model=2)
        layout_map = tfscale.auto_layout_map(_backbone, mesh)
        layouts = {path: layout.axes for path, layout in layout_map.items()}
        print("| mesh | peak | rest |\n|---|---|---|")
        for name, config in _MESHES.items():
            found = processes.measure(
                "benchmarks.memory.loading",
                {
                    **config,
                    "folder": folder,
                    "layouts": layouts if "model" in config else {},
                },
            )
            print(
                f"| {name} | {found['peak']:.2f} | {found['rest']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        print(json.dumps(_load(json.loads(sys.argv[1]))))
    else:
        app.run(main)
