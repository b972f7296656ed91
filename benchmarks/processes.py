"""Processes that measure: each has a TensorFlow of its own, set up for it."""

import json
import subprocess
import sys


def command(module, config, python=sys.executable):
    """What runs a module, with the config as its only argument."""
    return [python, "-m", module, json.dumps(config)]


def measure(module, config, python=sys.executable, **arguments):
    """What a module prints last, as JSON.

    Args:
        module: Its name.
        config: Of JSON: its argument.
        python: The interpreter.
        **arguments: Of `subprocess.run`.
    """
    done = subprocess.run(
        command(module, config, python),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        **arguments,
    )
    return json.loads(done.stdout.splitlines()[-1])


class Turns:
    """A process that stays, and measures when it is its turn.

    Args:
        module: Its name. It prints a line of JSON for each that it reads.
        config: Of JSON: its argument.
        python: The interpreter.
        env: Its environment, or None for that of this process.
    """

    def __init__(self, module, config, python=sys.executable, env=None):
        self._command = command(module, config, python)
        self._process = subprocess.Popen(
            self._command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, words=""):
        """Its answer to a line."""
        self._process.stdin.write(f"{words}\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self):
        """The next line that it prints."""
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._command)} has died.")
        return json.loads(line)

    def end(self):
        """Ends it."""
        self._process.stdin.close()
        self._process.wait()
