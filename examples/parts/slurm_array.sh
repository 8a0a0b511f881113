#!/bin/bash
# Export a checkpoint as a Slurm array: sixteen jobs that start whenever there is room, on any nodes,
# and that Slurm may preempt and queue again.
#
#     sbatch examples/parts/slurm_array.sh run/step_1000 exports/step_1000
#     distckpt consolidate run/step_1000 exports/step_1000 --status --watch
#
#SBATCH --job-name=export
#SBATCH --array=0-15
#SBATCH --cpus-per-task=4
#SBATCH --mem=4G
#SBATCH --time=04:00:00
#SBATCH --requeue
set -euo pipefail

checkpoint=$1
output=$2
shift 2

# The other arguments, such as --dtype bf16, must be the same for all parts.
srun distckpt consolidate "$checkpoint" "$output" --part auto "$@"
