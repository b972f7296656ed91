"""A cluster is read from where it was started, or refused in words."""

import json

from absl.testing import absltest
from absl.testing import parameterized

from tfscale.cluster import Cluster
from tfscale.cluster import cluster_from_environment

TWO = {"worker": ["a:2222", "b:2222"]}
TASK = {"type": "worker", "index": 0}

# As `srun env` prints it: recorded forms of the variables of a Slurm step.
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[09-10]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURMD_NODENAME": "gpu10",
}
# As the pods of an indexed job of Kubernetes with a headless service have it.
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "train-gpt-1",
    "TFSCALE_NUM_WORKERS": "3",
    "TFSCALE_SERVICE": "train-gpt",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
}


class TfConfigTest(parameterized.TestCase):
    def test_what_is_written_is_what_tensorflow_reads(self):
        cluster = Cluster(
            {"chief": ("a:1",), "worker": ("b:1", "c:1"), "ps": ("d:1",)},
            "worker",
            1,
        )
        written = json.loads(cluster.to_tf_config())
        self.assertEqual(written["task"], {"type": "worker", "index": 1})
        self.assertEqual(written["cluster"]["worker"], ["b:1", "c:1"])
        self.assertEqual(
            Cluster.from_tf_config(cluster.to_tf_config()), cluster
        )

    def test_a_number_in_quotes_is_taken_as_tensorflow_takes_it(self):
        config = {"cluster": TWO, "task": {"type": "worker", "index": "1"}}
        found = Cluster.from_tf_config(json.dumps(config))
        self.assertEqual(found.address, "b:2222")

    @parameterized.parameters("{}", '{"cluster": {}}')
    def test_no_process_is_no_cluster(self, text):
        self.assertIsNone(Cluster.from_tf_config(text))

    @parameterized.parameters(
        ("{'cluster'", "must be JSON. Received: .* at character 1"),
        ("[1]", "must be a JSON object. Received: .1."),
        ({"cluster": TWO}, "task in the cluster, .* Received: "),
        ({"cluster": TWO, "task": {"type": "worker"}}, "task in the cluster"),
        (
            {"cluster": TWO, "task": {"type": "worker", "index": 2}},
            "task 2 of job 'worker', which has 2 tasks",
        ),
        (
            {"cluster": TWO, "task": {"type": "ps", "index": 0}},
            "job 'ps', which has 0 tasks; the cluster is {'worker': 2}",
        ),
        ({"cluster": {"worker": "a:1"}, "task": TASK}, "a list of addresses"),
        ({"cluster": {"worker": ["a"]}, "task": TASK}, "'host:port'.*'a'"),
        ({"cluster": {"worker": ["a:1"] * 2}, "task": TASK}, "'a:1' more than"),
        (
            {"cluster": {"worker": ["::1:22"]}, "task": TASK},
            "'.host.:port'.*'::1",
        ),
        ({"cluster": {"worker": ["a:" + "9" * 9999]}, "task": TASK}, "'a:99"),
        (
            "[" * 100_000,
            r"must be JSON. Received: '\[{999}\.\.\., .* recursion",
        ),
        ("9" * 5_000, r"must be JSON. .* cannot be read: .* digits"),
        ({"cluster": {"master": ["a:1"]}, "task": TASK}, "jobs of a cluster"),
    )
    def test_what_makes_no_cluster_is_refused(self, config, message):
        text = config if isinstance(config, str) else json.dumps(config)
        with self.assertRaisesRegex(ValueError, message):
            Cluster.from_tf_config(text)

    def test_addresses_of_ipv6_are_in_brackets(self):
        addresses = ("[::1]:2222", "[fe80::1%eth0]:2222")
        cluster = Cluster({"worker": addresses}, "worker", 1)
        self.assertEqual(
            Cluster.from_tf_config(cluster.to_tf_config()).jobs["worker"],
            addresses,
        )

    def test_the_chief_is_the_chief_or_else_the_first_worker(self):
        jobs = {"worker": ("a:1", "b:1")}
        self.assertTrue(Cluster(jobs, "worker", 0).is_chief)
        self.assertFalse(Cluster(jobs, "worker", 1).is_chief)
        jobs = {"chief": ("c:1",), **jobs}
        self.assertFalse(Cluster(jobs, "worker", 0).is_chief)
        self.assertTrue(Cluster(jobs, "chief", 0).is_chief)


class EnvironmentTest(parameterized.TestCase):
    def test_a_machine_by_itself_is_no_cluster(self):
        self.assertIsNone(cluster_from_environment({"HOME": "/"}))

    def test_tf_config_goes_before_slurm(self):
        config = json.dumps({"cluster": TWO, "task": TASK})
        found = cluster_from_environment({**SLURM, "TF_CONFIG": config})
        self.assertEqual(found.address, "a:2222")

    def test_slurm_counts_tasks_along_its_hosts(self):
        # TensorFlow's resolver sorts as text and would begin with gpu10 where
        # the list is gpu[9-10].
        for hosts in ("gpu[09-10]", "gpu[9-10]"):
            environ = {**SLURM, "SLURM_STEP_NODELIST": hosts}
            found = cluster_from_environment(environ)
            names = [a.split(":")[0] for a in found.jobs["worker"]]
            self.assertEqual(names[2:], ["gpu10", "gpu10"])
            self.assertEqual(names[0], names[1])
            self.assertEqual((found.job, found.index), ("worker", 3))
            self.assertLen(set(found.addresses), 4)

    def test_a_name_of_slurm_may_have_several_ranges(self):
        # The second range of a name became a host of its own, "9-10".
        environ = {
            **SLURM,
            "SLURM_STEP_NODELIST": "r[1-2]n[9-10],a[7,08]b",
            "SLURMD_NODENAME": "r2n10",
            "SLURM_STEP_TASKS_PER_NODE": "1(x6)",
            "SLURM_STEP_NUM_TASKS": "6",
        }
        found = cluster_from_environment(environ)
        names = [a.split(":")[0] for a in found.jobs["worker"]]
        hosts = ["r1n9", "r1n10", "r2n9", "r2n10", "a7b", "a08b"]
        self.assertEqual(names, hosts)

    def test_two_jobs_of_slurm_on_a_host_have_other_ports(self):
        ports = {
            cluster_from_environment({**SLURM, "SLURM_JOB_ID": job}).address
            for job in ("4242", "4243")
        }
        self.assertLen(ports, 2)

    @parameterized.parameters(
        (dict(SLURM_STEP_NODELIST=None), "without SLURM_STEP_NODELIST"),
        (dict(SLURM_STEP_TASKS_PER_NODE="3,2"), r"\[3, 2\] tasks, of 4"),
        (dict(SLURM_STEP_NUM_TASKS="4.0"), "STEP_NUM_TASKS must be a number"),
        (dict(SLURM_PROCID=None), "SLURM_PROCID must be a number.*''"),
        (dict(SLURMD_NODENAME="gpu09"), "task 3 on 'gpu09' instead of"),
    )
    def test_a_slurm_step_that_does_not_fit_is_refused(self, change, message):
        environ = {**SLURM, **change}
        environ = {k: v for k, v in environ.items() if v is not None}
        with self.assertRaisesRegex(ValueError, message):
            cluster_from_environment(environ)

    def test_an_indexed_job_of_kubernetes_goes_by_host_names(self):
        found = cluster_from_environment(KUBERNETES)
        self.assertEqual(
            found.jobs["worker"],
            tuple(f"train-gpt-{i}.train-gpt:2222" for i in range(3)),
        )
        self.assertEqual(found.index, 1)

    @parameterized.parameters(
        dict(TFSCALE_SERVICE=""), dict(HOSTNAME="train-gpt-x7f")
    )
    def test_an_indexed_job_without_a_service_is_refused(self, **change):
        with self.assertRaisesRegex(ValueError, "headless service"):
            cluster_from_environment({**KUBERNETES, **change})

    def test_a_number_of_workers_is_a_number(self):
        # It was "invalid literal for int() with base 10", of nothing named.
        environ = {**KUBERNETES, "TFSCALE_NUM_WORKERS": "three"}
        with self.assertRaisesRegex(
            ValueError, "TFSCALE_NUM_WORKERS must be a number.*'three'"
        ):
            cluster_from_environment(environ)


if __name__ == "__main__":
    absltest.main()
