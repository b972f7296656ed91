"""Programs and manifests of clusters: Ray's run, the others are read."""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import unittest

import pytest
import yaml
from absl.testing import absltest

from tests.source_files import REPOSITORY
from tfscale.cluster import cluster_from_environment

FOLDER = os.path.join(REPOSITORY, "examples", "cluster")


def read(name):
    with open(os.path.join(FOLDER, name), encoding="utf-8") as file:
        return file.read()


class ManifestsTest(absltest.TestCase):
    def test_the_slurm_script_starts_a_process_for_each_node(self):
        path = os.path.join(FOLDER, "slurm.sh")
        subprocess.run(["bash", "-n", path], check=True)
        options = dict(
            re.findall(r"^#SBATCH --([\w-]+)=(\S+)", read("slurm.sh"), re.M)
        )
        nodes = int(options["nodes"])
        tasks = nodes * int(options["ntasks-per-node"])
        cluster = cluster_from_environment(
            {
                "SLURM_JOB_ID": "12",
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": "1",
                "SLURM_STEP_NUM_TASKS": str(tasks),
                "SLURM_STEP_NODELIST": f"node[1-{nodes}]",
                "SLURM_STEP_TASKS_PER_NODE": f"1(x{nodes})",
            }
        )
        self.assertLen(cluster.jobs["worker"], tasks)
        (replicas,) = re.findall(r"--num_replicas=(\d+)", read("slurm.sh"))
        self.assertEqual(int(replicas), nodes * int(options["gpus-per-node"]))

    def test_pods_of_the_job_set_find_each_other(self):
        manifest = yaml.safe_load(read("jobset.yaml"))
        name = manifest["metadata"]["name"]
        (workers,) = manifest["spec"]["replicatedJobs"]
        job = workers["template"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        environment = {v["name"]: v["value"] for v in container["env"]}
        cluster = cluster_from_environment(
            {
                **environment,
                # As JobSet names the pods of an indexed job.
                "JOB_COMPLETION_INDEX": "1",
                "HOSTNAME": f"{name}-{workers['name']}-0-1",
            }
        )
        port = container["ports"][0]["containerPort"]
        domain = manifest["spec"]["network"]["subdomain"]
        self.assertEqual(
            cluster.jobs["worker"],
            tuple(
                f"{name}-{workers['name']}-0-{i}.{domain}:{port}"
                for i in range(job["completions"])
            ),
        )
        self.assertEqual(job["completionMode"], "Indexed")
        self.assertEqual(job["completions"], job["parallelism"])
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        self.assertIn(
            f"--num_replicas={gpus * job['completions']}", container["command"]
        )


@unittest.skipUnless(importlib.util.find_spec("ray"), "needs Ray")
class RayTrainTest(absltest.TestCase):
    @pytest.mark.crossing
    def test_two_workers_of_ray_train_one_model(self):
        storage = self.create_tempdir().full_path
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "examples.cluster.ray_train"),
                *("--num_epochs=2", f"--storage={storage}"),
            ],
            cwd=REPOSITORY,
            env={
                **os.environ,
                "PYTHONPATH": REPOSITORY,
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_worker_niceness": "0",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=400)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self.assertEqual(process.returncode, 0, said)
        (loss,) = set(re.findall(r"Loss: (\d\.\d+)", said))
        # That of one device: the same program without a cluster.
        import keras

        from examples import mlp

        keras.utils.set_random_seed(0)
        model = mlp.build(64)
        model.compile("adam", mlp.hard_loss(), metrics=["accuracy"])
        history = model.fit(
            *mlp.clusters(1024, seed=0), batch_size=32, epochs=2, verbose=0
        )
        self.assertAlmostEqual(
            float(loss), history.history["loss"][-1], delta=0.01
        )


if __name__ == "__main__":
    absltest.main()
