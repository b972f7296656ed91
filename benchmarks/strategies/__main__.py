"""Rows per second of one model under every strategy, against one device.

    python -m benchmarks.strategies
    python -m benchmarks.strategies --only=mesh_data,servers_2

By `tfscale.benchmark`, which says how it measures.
"""

import pathlib

from absl import app
from absl import flags

import tfscale
from benchmarks import gpt_flags
from benchmarks.strategies import jobs

_ROUNDS = flags.DEFINE_integer("rounds", 5, "How often each takes its turn.")
_STEPS = flags.DEFINE_integer("steps", 4, "Steps of one turn.")
_ONLY = flags.DEFINE_list("only", None, "Which strategies, by name.")
_JSON = flags.DEFINE_string("json", None, "A file for the figures as JSON.")


def main(argv):
    del argv
    build_model, dataset, strategies = jobs.jobs(**gpt_flags.sizes())
    names = _ONLY.value or list(strategies)
    unknown = set(names) - set(strategies)
    if unknown:
        raise app.UsageError(
            f"--only is of {', '.join(strategies)}. Received: {unknown}."
        )
    report = tfscale.benchmark(
        build_model,
        dataset,
        {name: strategies[name] for name in names},
        one_device=jobs.one_device,
        launch={
            name: jobs.LAUNCH[name] for name in names if name in jobs.LAUNCH
        },
        steps=_STEPS.value,
        rounds=_ROUNDS.value,
    )
    print(report.table())
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(report.to_json())


if __name__ == "__main__":
    app.run(main)
