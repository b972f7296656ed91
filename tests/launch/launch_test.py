"""Real processes, started and killed by the launcher and under it."""

import contextlib
import errno
import inspect
import io
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from unittest import mock

import tensorflow as tf
from absl import app
from absl import flags
from absl.testing import absltest
from absl.testing import flagsaver
from absl.testing import parameterized

from tests import forked_processes
from tests import forked_python
from tests.source_files import REPOSITORY
from tfscale.launch import __main__ as command
from tfscale.launch.launcher import Launcher
from tfscale.launch.launcher import Task

_SECONDS_TO_MEET = 6.0
_HEAD = """
import json, os, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
job, index = config["task"]["type"], config["task"]["index"]
print("pid", os.getpid(), flush=True)
"""
_SAVES = """
def end(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end if index == 0 else signal.SIG_IGN)
print("ready", flush=True)
while True:  # A signal that comes right before a long sleep waits for its end.
    time.sleep(0.01)
"""


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


_IS_ALIVE = inspect.getsource(_is_alive)  # for programs too


def read_until(process, text, count):
    """What a process printed up to the `count`-th `text`."""
    output = ""
    while output.count(text) < count:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(output)
        output += line
    return output


class _LaunchTest(absltest.TestCase):
    def program(self, text):
        file = self.create_tempfile(content=_HEAD + _IS_ALIVE + text)
        return file.full_path

    def assert_all_ended(self, output):
        pids = [int(pid) for pid in re.findall(r"\] pid (\d+)", output)]
        self.assertNotEmpty(pids)
        end = time.monotonic() + 5.0
        while any(map(_is_alive, pids)) and time.monotonic() < end:
            time.sleep(0.01)
        self.assertEqual([pid for pid in pids if _is_alive(pid)], [])


class CommandTest(_LaunchTest, parameterized.TestCase):
    def start(
        self,
        *arguments,
        python=None,
        module=("-m", "tfscale.launch", "--grace_seconds=1"),
    ):
        launcher = [python or forked_python.executable(), *module]
        return subprocess.Popen(
            [*launcher, *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def test_the_first_failure_is_reported_and_nobody_is_left(self):
        program = self.program("""
assert sys.argv[1:] == ["--its_own_flag=1"]
if index == 1:
    print("the cause")
    sys.exit(3)
time.sleep(60)
""")
        # The launcher took the program's flags for its own and refused them.
        process = self.start("--num_workers=3", program, "--its_own_flag=1")
        output, _ = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 3, output)
        self.assertRegex(
            output, r"\[launch\] worker 1 exited with 3, as the first.*\n.*\n"
        )
        self.assertIn("    the cause", output)
        self.assertEqual(output.count("as the first"), 1)
        self.assert_all_ended(output)

    def test_flags_behind_the_program_are_its_own(self):
        # All had been taken for the launcher's, which knew none of them.
        program = self.program("print(sys.argv[1:])")
        process = self.start(
            "--num_workers=1",
            program,
            "--num_workers=7",
            "--flagfile=none",
            "x",
        )
        output, _ = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0, output)
        self.assertIn("['--num_workers=7', '--flagfile=none', 'x']", output)

    def test_a_killed_launcher_takes_its_workers_with_it(self):
        # What these had started, loaders of data say, stayed for ever.
        program = self.program("""
import subprocess
print("pid", subprocess.Popen(["sleep", "60"]).pid, flush=True)
assert sys.argv[1:] == ["--its_own_flag=1"]
time.sleep(60)
""")
        process = self.start(
            *("--num_workers=2", program, "--its_own_flag=1"),
            python=sys.executable,  # forked programs have other groups
        )
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.kill)
        output = read_until(process, "] pid", 4)
        process.kill()
        self.assert_all_ended(output)
        process.communicate(timeout=60)

    @parameterized.parameters(
        (signal.SIGTERM, "received SIGTERM, passing it on"),
        # Of a terminal that is closed: workers were killed at once.
        (signal.SIGHUP, "received SIGHUP, passing SIGTERM on"),
    )
    def test_a_signal_is_passed_on_with_time_to_end(self, number, said):
        program = self.program(_SAVES)
        process = self.start_with_hangup(signal.SIG_DFL, program)
        output = read_until(process, "ready", 2)
        process.send_signal(number)
        rest, _ = process.communicate(timeout=30)
        self.assertIn(said, rest)
        self.assertIn("[worker 0] saved", rest)
        self.assertIn("worker 1 is there after 1 s: killed", rest)
        self.assertEqual(process.returncode, 128 + number)
        self.assert_all_ended(output)

    def test_a_launcher_under_nohup_goes_on_after_sighup(self):
        program = self.program(_SAVES)
        process = self.start_with_hangup(signal.SIG_IGN, program)
        output = read_until(process, "ready", 2)
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=30)
        self.assertNotIn("SIGHUP", rest)
        self.assertIn("received SIGTERM, passing it on", rest)
        self.assertEqual(process.returncode, 128 + signal.SIGTERM)
        self.assert_all_ended(output)

    def start_with_hangup(self, handler, program):
        """Two workers by a launcher that has a handler of SIGHUP.

        It is inherited: under `nohup` pytest ignores the signal, and so would
        all launchers.
        """
        launcher = (
            "import runpy, signal\n"
            f"signal.signal(signal.SIGHUP, {int(handler)})\n"
            "runpy.run_module('tfscale.launch', run_name='__main__')"
        )
        return self.start(
            *("-c", launcher, "--grace_seconds=1", "--num_workers=2", program),
            module=(),
        )

    def test_a_wrong_host_is_named_within_seconds(self):
        process = self.start(
            "--hosts=localhost:28731,no-such-host.invalid:2222",
            "--preflight_seconds=4",
            self.program(""),
        )
        output, _ = process.communicate(timeout=60)
        self.assertNotEqual(process.returncode, 0)
        self.assertIn("Waiting for no-such-host.invalid:2222", output)
        self.assertIn("its name cannot be resolved", output)
        self.assertNotIn("Traceback", output)
        self.assertNotIn("] pid", output)


class HostsTest(_LaunchTest):
    """Launchers as on three machines, each a fork of this process."""

    def launch(self, index, addresses, program, file):
        def work():
            flags.FLAGS.mark_as_parsed()
            with (
                open(file, "w") as log,
                contextlib.redirect_stdout(log),
                contextlib.redirect_stderr(log),
                flagsaver.flagsaver(
                    hosts=addresses,
                    host_index=index,
                    min_workers=2,
                    grace_seconds=1.0,
                    preflight_seconds=_SECONDS_TO_MEET,
                ),
            ):
                command.main(["launch", program])

        return forked_processes.fork(work)

    def test_those_left_go_on_without_a_machine_that_was_lost(self):
        """They waited for it in each restart, and ended with an error."""
        folder = self.create_tempdir().full_path
        program = self.program(f"""
hosts = config["cluster"]["worker"]
print("hosts", len(hosts), "index", index, flush=True)
open(f"{folder}/begun_{{index}}_of_{{len(hosts)}}", "w").close()
if len(hosts) == 3:
    while not os.path.exists("{folder}/lost"):
        time.sleep(0.02)
    sys.exit(7)  # as one whose neighbor is lost
""")
        addresses = forked_processes.free_addresses(3)
        launchers = [
            self.launch(index, addresses, program, f"{folder}/log_{index}")
            for index in range(3)
        ]
        end = time.monotonic() + 60.0
        begun = {f"begun_{index}_of_3" for index in range(3)}
        while not begun <= set(os.listdir(folder)):
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)
        lost = launchers.pop(0)  # it was the first one of all
        os.kill(lost, signal.SIGKILL)
        os.waitpid(lost, 0)
        open(f"{folder}/lost", "w").close()
        codes = [os.waitpid(pid, 0)[1] for pid in launchers]
        for index in (1, 2):
            with open(f"{folder}/log_{index}") as file:
                said = file.read()
            with self.subTest(index):
                self.assertIn(f"without {addresses[0]}", said)
                self.assertIn(f"hosts 2 index {index - 1}", said)
        self.assertEqual(codes, [0, 0])


class FlagsTest(parameterized.TestCase):
    @parameterized.parameters(
        dict(min_workers=2),
        dict(min_workers=3, max_workers=2),
        dict(min_workers=1, max_workers=2, num_workers=3),
        dict(min_workers=2, max_workers=3, num_workers=1),
        dict(min_workers=1, max_workers=2, num_ps=1),
        dict(min_workers=3, hosts=["a:1", "b:1"]),
    )
    def test_fewest_and_most_workers_go_together(self, **values):
        flags.FLAGS.mark_as_parsed()
        with (
            flagsaver.flagsaver(**values),
            self.assertRaisesRegex(app.UsageError, "--min_workers"),
        ):
            command.main(["launch", "program.py"])

    @parameterized.parameters(
        # It said that this machine was both of them.
        (["a", "b"], "--hosts=a,b: .* must be 'host:port'.*'a'"),
        # Of `--hosts=$HOSTS`: each machine had trained by itself.
        ([], "must name the hosts"),
        (["a:70000", "b:1"], "--hosts=.*below 65536. Received: 'a:70000'"),
        (["a:1", "a:1"], "--hosts=a:1,a:1: .*its own address.*a:1"),
    )
    def test_hosts_that_are_none_are_named(self, hosts, message):
        # By a traceback, where other flags are named in a line.
        flags.FLAGS.mark_as_parsed()
        with (
            flagsaver.flagsaver(hosts=hosts),
            self.assertRaisesRegex(app.UsageError, message),
        ):
            command.main(["launch", "program.py"])


class PortsTest(absltest.TestCase):
    def test_a_machine_without_a_free_port_is_named_in_a_line(self):
        # It was a traceback.
        flags.FLAGS.mark_as_parsed()
        said = io.StringIO()
        for name in ("bind", "__init__"):
            full = OSError(errno.EADDRINUSE, "Address already in use")
            with (
                self.subTest(name),
                flagsaver.flagsaver(num_workers=2),
                mock.patch.object(socket.socket, name, side_effect=full),
                contextlib.redirect_stderr(said),
                self.assertRaises(SystemExit) as ended,
            ):
                command.main(["launch", "program.py"])
            self.assertEqual(ended.exception.code, 1)
        self.assertIn("none for one of 2 processes", said.getvalue())

    def test_a_port_is_for_who_listens_there_and_for_nobody_else(self):
        # Seconds pass until a worker does. Callers were given its port.
        with contextlib.ExitStack() as held:
            (port,) = command._free_ports(1, held)
            with (
                socket.socket() as other,
                self.assertRaisesRegex(OSError, "in use"),
            ):
                other.bind(("", port))
            socket.create_server(("", port)).close()


class DevicesTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.held = self.enter_context(contextlib.ExitStack())

    @parameterized.parameters(
        {"chief": ["-1"], "worker": ["4,5", "6,7"], "ps": ["-1"]},
        {"worker": ["4,5", "6,7"]},
    )
    def test_each_worker_has_gpus_of_its_own(self, **expected):
        # The chief had those of the first worker, a server had all: whoever
        # came first took their memory.
        num_ps = len(expected.get("ps", ()))
        flags.FLAGS.mark_as_parsed()
        with (
            flagsaver.flagsaver(devices_per_worker=2),
            mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="4,5,6,7"),
            mock.patch.object(
                tf.config, "list_physical_devices", return_value=[None] * 4
            ),
        ):
            tasks = command._local_tasks([0, 1], num_ps, self.held)
        found = {}
        for task in tasks:
            visible = task.environ["CUDA_VISIBLE_DEVICES"]
            found.setdefault(task.job, []).append(visible)
        self.assertEqual(found, expected)

    @parameterized.parameters((4, "2,3"), (2, "0,1"))
    def test_tasks_of_slurm_on_a_host_have_gpus_of_their_own(
        self, num_gpus, expected
    ):
        # Each has a launcher, and all gave their worker the first GPUs.
        step = {
            "SLURM_JOB_ID": "7",
            "SLURM_PROCID": "2",
            "SLURM_STEP_NUM_TASKS": "3",
            "SLURM_STEP_NODELIST": "n[1-2]",
            "SLURM_STEP_TASKS_PER_NODE": "1,2",
        }
        flags.FLAGS.mark_as_parsed()
        with (
            flagsaver.flagsaver(devices_per_worker=2),
            mock.patch.dict(os.environ, step),
            mock.patch.object(
                tf.config,
                "list_physical_devices",
                return_value=[None] * num_gpus,
            ),
            mock.patch.object(command, "preflight"),
            mock.patch.object(command, "Launcher") as launcher,
            mock.patch.object(sys, "exit"),
        ):
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            command.main(["launch", "program.py"])
            make_tasks = launcher.call_args.args[1]
            [task] = make_tasks([0], None)
        self.assertEqual(task.environ["CUDA_VISIBLE_DEVICES"], expected)


class LauncherTest(_LaunchTest, parameterized.TestCase):
    """The launcher without a process of its own."""

    def launch(self, text, jobs, **options):
        """The exit code and what was printed by and of all processes."""
        command = [sys.executable, self.program(text)]

        attempts = itertools.count()

        def make_tasks(local_ranks, group):
            attempt = next(attempts)
            places = {job: range(count) for job, count in jobs.items()}
            if options.get("min_workers"):
                places["worker"] = local_ranks
            elastic = group.to_environ() if group else {}
            return [
                Task(
                    job,
                    index,
                    {
                        **self.environ(job, index, attempt),
                        **elastic,
                        "PLACES": str(places[job]),
                    },
                    place,
                )
                for job in jobs
                for index, place in enumerate(places[job])
            ]

        output = io.StringIO()
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            launcher = Launcher(
                command,
                make_tasks,
                grace=1.0,
                num_workers=jobs.get("worker", 1),
                **options,
            )
            code = launcher.run()
        self.assert_all_ended(output.getvalue())
        return code, output.getvalue()

    @staticmethod
    def environ(job, index, attempt):
        config = {"task": {"type": job, "index": index}}
        return {
            **os.environ,
            "ATTEMPT": str(attempt),
            "PYTHONUNBUFFERED": "1",
            "TF_CONFIG": json.dumps(config),
        }

    def test_all_end_well(self):
        code, output = self.launch("print('done')", {"worker": 2})
        self.assertEqual(code, 0)
        self.assertIn("[worker 0] done", output)
        self.assertIn("[worker 1] done", output)

    def launch_into(self, stdout, program):
        """The exit code of the launcher, which prints to a stream."""
        said = io.StringIO()
        with (
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(said),
        ):
            task = Task("worker", 0, dict(os.environ))
            command = [sys.executable, "-c", program]
            code = Launcher(command, lambda *_: [task], grace=1.0).run()
        return code, said.getvalue()

    def test_what_stdout_cannot_encode_does_not_end_a_program(self):
        # The thread that reads died of it, the program of its next line.
        stdout = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
        program = (
            "import sys; sys.stdout.buffer.write('\u2501 50%\\n'.encode())"
        )
        code, _ = self.launch_into(stdout, f"{program}; print('the end')")
        self.assertEqual(code, 0)
        self.assertEqual(
            stdout.buffer.getvalue(), b"[worker 0] ? 50%\n[worker 0] the end\n"
        )

    def test_a_program_goes_on_where_nobody_reads(self):
        # Of `| head -1` say.
        read, write = os.pipe()
        os.close(read)
        with open(write, "w") as stdout:
            code, said = self.launch_into(
                stdout, "print('x\\n' * 10**6); import sys; sys.exit(5)"
            )
        self.assertEqual(code, 5)
        self.assertIn("going on without printing: [Errno 32] Broken pipe", said)
        self.assertEqual(said.count("going on"), 1)

    @parameterized.parameters(signal.SIGKILL, signal.SIGTERM)
    def test_a_killed_worker_is_reported_by_its_signal(self, number):
        start = time.monotonic()
        code, output = self.launch(
            f"""
if index == 0:
    os.kill(os.getpid(), {int(number)})
time.sleep(60)
""",
            {"worker": 2},
        )
        self.assertEqual(code, 128 + number)
        name = signal.Signals(number).name
        self.assertIn(f"worker 0 was killed by {name}, as the first", output)
        self.assertLess(time.monotonic() - start, 15.0)

    def test_one_that_never_starts_is_reported_with_the_reason(self):
        missing = os.path.join(self.create_tempdir().full_path, "no_such.py")
        output = io.StringIO()
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            launcher = Launcher(
                [sys.executable, missing],
                lambda local_ranks, group: [
                    Task("worker", i, dict(os.environ)) for i in range(2)
                ],
                grace=1.0,
            )
            code = launcher.run()
        self.assertEqual(code, 2)
        self.assertRegex(
            output.getvalue(),
            r"worker \d exited with 2, as the first. Its last lines:\n"
            r" .*can't open file .*no_such.py",
        )

    def test_all_start_again_after_a_failure(self):
        code, output = self.launch(
            """
attempt = int(os.environ["ATTEMPT"])
print("attempt", attempt)
if index == 1 and attempt < 2:
    sys.exit(1)
time.sleep(0.2)
""",
            {"worker": 2},
            max_restarts=3,
            first_pause=0.05,
        )
        self.assertEqual(code, 0)
        self.assertIn("starting again in 0.05 s, number 1 of at most 3", output)
        self.assertIn("starting again in 0.1 s, number 2", output)
        self.assertIn("[worker 0] attempt 2", output)

    def test_those_who_are_left_start_again_down_to_the_fewest(self):
        code, output = self.launch(
            """
attempt = int(os.environ["ATTEMPT"])
print("attempt", attempt)
if index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
""",
            {"worker": 4},
            min_workers=2,
            max_restarts=1,
            first_pause=0.05,
        )
        self.assertEqual(code, 128 + signal.SIGKILL)
        self.assertIn("without worker 1: 3 workers, 2 at least", output)
        self.assertIn("without worker 1: 2 workers, 2 at least", output)
        self.assertIn("number 1 of at most 1 restarts", output)
        counts = [output.count(f"attempt {attempt}") for attempt in range(5)]
        self.assertLen([n for n in counts if n], 4)
        self.assertNotIn("[worker 2] attempt 2", output)

    def test_workers_ask_for_another_number_and_the_lost_come_back(self):
        code, output = self.launch(
            """
attempt = int(os.environ["ATTEMPT"])
group = os.environ["TFSCALE_ELASTIC_WORKERS"]
print("attempt", attempt, group, os.environ["PLACES"], flush=True)
if attempt == 0:  # two are asked for one after the other, within the grace
    time.sleep(0.3 * index)
    print("saved", flush=True)
    sys.exit(192 + 4)
if attempt == 1:
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
if attempt == 2:
    sys.exit(192 + 4)
if attempt == 3:
    sys.exit(192 + 1)
# Neither its own number nor one outside of the range is a wish.
sys.exit(192 + (1 if index == 0 else 5))
""",
            {"worker": 2},
            min_workers=1,
            max_workers=4,
            first_pause=0.05,
        )
        self.assertEqual(code, 192 + 1)
        self.assertEqual(output.count("] saved"), 2)
        # Of all workers: one that dies may end another that has said nothing.
        found = re.findall(r"\[worker \d\] attempt (.*)", output)
        self.assertEqual(
            list(dict.fromkeys(found)),
            [
                "0 1,4,2,2 [0, 1]",
                "1 1,4,4,4 [0, 1, 2, 3]",
                "2 1,4,3,4 [0, 2, 3]",
                "3 1,4,4,4 [0, 1, 2, 3]",
                "4 1,4,1,1 [0]",
            ],
        )
        self.assertEqual(output.count("as the first"), 2)

    def test_restarts_come_to_an_end(self):
        code, output = self.launch(
            "print('x' * 10**6, 'the end'); sys.exit(5)",
            {"worker": 1},
            max_restarts=1,
            first_pause=0.05,
        )
        self.assertEqual(code, 5)
        self.assertEqual(output.count("] pid"), 2)
        # A report had all of a line, however long.
        self.assertEqual(output.count("the end"), 4)
        self.assertLess(len(output), 2.1 * 10**6)

    def test_thousands_of_restarts_have_a_pause(self):
        # After 1024 the launcher ended by an OverflowError.
        launcher = Launcher([], lambda *_: [], max_restarts=10**6)
        launcher._num_restarts = 1024
        with contextlib.redirect_stderr(io.StringIO()):
            self.assertEqual(launcher._next_pause(), 60.0)

    def test_with_servers_a_worker_starts_again_alone(self):
        code, output = self.launch(
            f"""
folder = {self.create_tempdir().full_path!r}
mark, again = folder + "/failed", folder + "/again"
if job == "worker" and index == 1:
    if not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    open(again, "w").close()
while job != "chief" or not os.path.exists(again):
    time.sleep(0.05)
""",
            {"chief": 1, "worker": 2, "ps": 1},
            max_restarts=1,
            first_pause=0.05,
        )
        self.assertEqual(code, 0)
        self.assertEqual(output.count("[worker 1] pid"), 2)
        self.assertEqual(output.count("[worker 0] pid"), 1)

    def test_with_servers_the_others_go_on_without_a_worker(self):
        # What it had started was left behind.
        code, output = self.launch(
            f"""
mark = {self.create_tempdir().full_path!r} + "/failed"
if job == "worker" and index == 0:
    import subprocess
    left = subprocess.Popen(["sleep", "60"]).pid
    print("pid", left, flush=True)
    os.symlink(str(left), mark)
    sys.exit(7)
while job != "chief" or not os.path.islink(mark):
    time.sleep(0.05)
while _is_alive(os.readlink(mark)):
    time.sleep(0.05)
""",
            {"chief": 1, "worker": 2, "ps": 1},
        )
        self.assertEqual(code, 0)
        self.assertIn("going on without worker 0", output)

    def test_without_any_worker_all_are_ended(self):
        # The chief waited for one for ever.
        code, output = self.launch(
            "sys.exit(7) if job == 'worker' else time.sleep(60)",
            {"chief": 1, "worker": 2, "ps": 1},
        )
        self.assertEqual(code, 7)
        self.assertEqual(output.count("going on without worker"), 1)
        self.assertIn("no worker is left", output)

    def test_a_server_that_ends_well_does_not_end_the_chief(self):
        # On a machine of its own it was waited for for ever.
        self.assertEqual(self.launch("", {"ps": 1})[0], 0)
        # It had ended all, with 0, whatever became of the chief.
        code, _ = self.launch(
            """
if job == "chief":
    time.sleep(1.0)
    sys.exit(4)
""",
            {"chief": 1, "worker": 1, "ps": 1},
        )
        self.assertEqual(code, 4)

    def test_a_lost_server_ends_all(self):
        # In the pause before a worker starts again nothing else was noticed.
        start = time.monotonic()
        code, output = self.launch(
            f"""
mark = {self.create_tempdir().full_path!r} + "/failed"
if job == "worker":
    os.symlink(str(os.getpid()), mark)
    sys.exit(7)
while job != "ps" or not os.path.islink(mark):
    time.sleep(0.05)
while _is_alive(os.readlink(mark)):
    time.sleep(0.05)
time.sleep(0.5)
sys.exit(9)
""",
            {"chief": 1, "worker": 1, "ps": 1},
            max_restarts=1,
            first_pause=40.0,
        )
        self.assertEqual(code, 9)
        self.assertIn("ps 0 exited with 9", output)
        self.assertIn("starting again in 40 s", output)
        self.assertLess(time.monotonic() - start, 15.0)


if __name__ == "__main__":
    absltest.main()
