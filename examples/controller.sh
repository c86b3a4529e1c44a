#!/bin/bash
# For sites that forbid long processes on login nodes: Snakemake itself as a small job, which submits and watches the others.
#
#   sbatch examples/controller.sh --config run=configs/quickstart.yaml site=mycluster
#
# Submit it from the folder that you would call snakemake in; what follows the script is given to snakemake. Change the
# directives to your cluster's, and RLHPC_PROFILE where you use another profile. At its walltime the controller ends and goes
# back into the queue; a training job goes on meanwhile, and the next start finds it. `scancel --batch --signal=TERM JOB` ends
# the controller alone, `rlhpc cancel RUN` the training.
#SBATCH --job-name=rlhpc-controller
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
#SBATCH --mem=4G
#SBATCH --time=1-00:00:00
#SBATCH --signal=B:USR2@120
#SBATCH --requeue
#SBATCH --output=rlhpc-controller-%j.out
#SBATCH --open-mode=append
set -uo pipefail

# module load cuda
# source /path/to/rlhpc/.venv/bin/activate

# The jobs submitted from here must not inherit what Slurm said of this one.
controller=$SLURM_JOB_ID
for name in $(compgen -e | grep -E '^(SLURM|SLURMD|SBATCH|SRUN)_' | grep -vx SLURM_CONF); do
    unset "$name"
done

# Job control gives Snakemake a process group of its own, so that all of it can be interrupted, as Ctrl-C would.
set -m
snakemake --profile "${RLHPC_PROFILE:-profiles/slurm}" "$@" &
snakemake=$!
again=
trap 'again=yes; kill -INT -- "-$snakemake"' USR2
trap 'kill -INT -- "-$snakemake"' TERM
while kill -0 "$snakemake" 2>/dev/null; do
    wait "$snakemake"
    code=$?
done
if [ -n "$again" ] && [ "$code" -ne 0 ]; then
    scontrol requeue "$controller"
fi
exit "$code"
