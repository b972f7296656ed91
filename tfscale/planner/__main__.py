"""Plans a model from the command line.

    python -m tfscale.planner examples.gpt:build_gpt --num_blocks=48 \
        --width=7168 --num_heads=56 --sequence_length=2048 --dropout=0 \
        --num_devices=1024 --batch_size=2048 --device=H100

The first argument is a function that builds a Keras model, as
`module:function`. Options that the planner does not know are arguments of that
function.
"""

import argparse
import ast
import functools
import os
import pkgutil
import sys

from tfscale.planner import plan


def main(args: list[str]) -> None:
    """Prints the table of plans for the arguments of a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tfscale.planner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("build_model", metavar="module:function")
    parser.add_argument("--num_devices", type=int, required=True)
    parser.add_argument("--batch_size", type=int, required=True)
    parser.add_argument(
        "--device", default="measure", help="a preset, or 'measure'"
    )
    parser.add_argument(
        "--length", type=int, help="the size of dims that inputs leave open"
    )
    parser.add_argument("--png", help="where to draw time against memory")
    options, others = parser.parse_known_args(args)
    sys.path.insert(0, os.getcwd())
    try:
        build = pkgutil.resolve_name(options.build_model)
        plans = plan(
            functools.partial(build, **dict(map(_argument, others))),
            num_devices=options.num_devices,
            batch_size=options.batch_size,
            device=options.device,
            length=options.length,
        )
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        parser.error(str(error))
    plans.table()
    if options.png:
        plans.save_png(options.png)


def _argument(text):
    """`--name=value` as a name and a Python value."""
    name, equals, value = text.removeprefix("--").partition("=")
    if not (text.startswith("--") and equals and name.isidentifier()):
        raise ValueError(
            "An argument of the function must be --name=value. Received: "
            f"{text!r}."
        )
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value  # a string


if __name__ == "__main__":
    main(sys.argv[1:])
