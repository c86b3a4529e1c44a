"""What each engine of vLLM would do to its whole process anew."""

from __future__ import annotations

from typing import Any


def replace_kernels_once() -> Any:
    """Where there is no Triton, vLLM puts functions of its own in the place of its kernels, and looks for these in every
    attribute of every module: a third of a second, and in a forked process a copy of all pages. From now on it does so once.

    Returns:
        vLLM's platform, whose `register_triton_kernel_overrides` that is.
    """
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    replace, done = platform.register_triton_kernel_overrides, platform.__dict__.get("kernels_replaced")
    if done is None:
        platform.kernels_replaced = done = []

        def once(cls: Any) -> None:
            if not done:
                replace()
                done.append(True)

        platform.register_triton_kernel_overrides = classmethod(once)
    return current_platform
