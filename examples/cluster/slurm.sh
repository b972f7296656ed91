#!/bin/bash
# sbatch examples/cluster/slurm.sh
#
# Two nodes of four GPUs, a process for each node. `tfscale.initialize()` in the
# program reads the variables that `srun` sets; the launcher reports the first
# process that fails and ends the others. `--no-kill` and `--requeue` start the
# job again after a node is lost, and BackupAndRestore continues it.
#SBATCH --job-name=tfscale
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=12:00:00
#SBATCH --requeue
# SIGTERM a minute before the end: the program saves and stops.
#SBATCH --signal=TERM@60

srun --distribution=block python -m tfscale.launch \
  -m examples.train_multi_worker --num_replicas=8
