"""Makes a trained network smaller: keeps neurons, rebuilds, fine-tunes.

    python -m examples.compress --flagfile=configs/compress.flags

`--criterion=norm` keeps the neurons with the largest weights; `apoz` those that
fire: sensAI (Wang et al. 2021) leaves out what is zero for more than 73 % of
the rows and has a mean below 0.01. `--subnets` makes one network for each
class, of the neurons that fire for it. They need nothing of each other: with
`--num_stages=2` half of them are on each device, and only logits are sent. For
layers in sequence; where neurons are added by skip connections, all that meet
must keep the same ones.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from absl import app
from absl import flags

from examples import finite_float
from examples import mlp

flags.adopt_module_key_flags(mlp)

CRITERION = flags.DEFINE_enum(
    "criterion", "norm", ["norm", "apoz"], "Which neurons are kept."
)
KEEP = finite_float.define(
    "keep",
    0.25,
    "Share of the neurons to keep at most.",
    lower_bound=0.01,
    upper_bound=1.0,
)
SUBNETS = flags.DEFINE_boolean(
    "subnets", False, "A network for each class, of what fires for it."
)
WIDTH = flags.DEFINE_integer("width", 128, "Neurons of a layer.", lower_bound=8)


def hidden_activations(model, x):
    """What the neurons of each hidden layer return for rows."""
    activations = []
    for layer in model.layers[:-1]:
        x = keras.ops.convert_to_numpy(layer(x))
        activations.append(x)
    return activations


def kept_neurons(model, x):
    """Indices of the neurons of each hidden layer that stay."""
    kept = []
    for layer, fired in zip(model.layers, hidden_activations(model, x)):
        kernel, _ = layer.get_weights()
        scores = np.linalg.norm(kernel, axis=0)
        if CRITERION.value == "apoz" or SUBNETS.value:
            scores = np.abs(fired).mean(0)
        number = max(int(len(scores) * KEEP.value), 1)
        best = np.argsort(-scores)[:number]
        if CRITERION.value == "apoz":
            silent = (np.abs(fired) <= 0.005).mean(0) > 0.73
            firing = [n for n in best if not silent[n] or scores[n] >= 0.01]
            best = firing or best[:1]
        kept.append(np.sort(best))
    return kept


def rebuild(model, kept, outputs, name):
    """A smaller model with those neurons and outputs of a plain one."""
    layers = [keras.Input((mlp.NUM_FEATURES,))]
    weights, before = [], np.arange(mlp.NUM_FEATURES)
    for layer, here in zip(model.layers, [*kept, outputs]):
        kernel, bias = layer.get_weights()
        weights += [kernel[np.ix_(before, here)], bias[here]]
        layers.append(
            keras.layers.Dense(
                len(here), layer.activation, name=f"{name}_{layer.name}"
            )
        )
        before = here
    smaller = keras.Sequential(layers, name=name)
    smaller.set_weights(weights)
    return smaller


def joined(nets):
    """The class networks side by side: their outputs are the logits."""
    inputs = keras.Input((mlp.NUM_FEATURES,))
    logits = [net(inputs) for net in nets]
    return keras.Model(inputs, keras.layers.Concatenate()(logits))


def report(title, strategy, model, test):
    """Prints the size of a model, and how good it is."""
    found = mlp.accuracy(strategy, model, *test)
    print(f"{title}: {model.count_params()} parameters, accuracy {found:.3f}")


def report_exchange(plan):
    """Prints what each stage of a pipeline gets from the ones before it."""
    for stage in plan.stages:
        received = sum(
            int(np.prod(plan.graph.specs[value].shape[1:]))
            for value in stage.inputs
            if value not in plan.graph.inputs
        )
        print(
            f"stage {stage.index}: {stage.layers[0]} to {stage.layers[-1]}, "
            f"receives {received} numbers a row"
        )


def main(argv):
    del argv
    strategy = mlp.make_strategy()
    keras.utils.set_random_seed(mlp.SEED.value)
    x, y = mlp.clusters(mlp.NUM_ROWS.value, mlp.SEED.value)
    test = mlp.clusters(1024, mlp.SEED.value + 1)

    def build():
        return mlp.build(WIDTH.value)

    with strategy.scope():
        model = build()
    mlp.train(strategy, model, x, y)
    report("base", strategy, model, test)
    plain = mlp.plain_copy(model, build)
    with strategy.scope():
        if SUBNETS.value:
            model = joined(
                [
                    rebuild(
                        plain,
                        kept_neurons(plain, x[y == label]),
                        np.array([label]),
                        f"class_{label}",
                    )
                    for label in range(mlp.NUM_CLASSES)
                ]
            )
        else:
            outputs = np.arange(mlp.NUM_CLASSES)
            model = rebuild(plain, kept_neurons(plain, x), outputs, "small")
    report("compressed", strategy, model, test)
    fitted = mlp.train(strategy, model, x, y, epochs=1)
    report("fine-tuned", strategy, model, test)
    if mlp.NUM_STAGES.value > 1:
        report_exchange(fitted.plan)


if __name__ == "__main__":
    app.run(main)
