#!/bin/bash
# A hand-written batch script: rlhpc trains inside whatever allocation it finds itself in.
#
#   sbatch examples/sbatch_train.sh configs/quickstart.yaml runner.max_steps=20
#
# Change the directives to your cluster's. One task a node is right: rlhpc starts the ranks itself, as job steps. Slurm sends
# SIGUSR2 two minutes before the walltime; rlhpc then saves and ends with exit code 75, and the job goes back into the queue.
#SBATCH --job-name=rlhpc
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=8G
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR2@120
#SBATCH --requeue
#SBATCH --output=rlhpc-%j.out
#SBATCH --open-mode=append
set -uo pipefail

# module load cuda
# source /path/to/rlhpc/.venv/bin/activate

# bash hands a signal on only while it waits for a process in the background
rlhpc train "$@" runner.resume_dir=auto &
driver=$!
trap 'kill -USR2 "$driver"' USR2
trap 'kill -TERM "$driver"' TERM
while kill -0 "$driver" 2>/dev/null; do
    wait "$driver"
    code=$?
done
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
