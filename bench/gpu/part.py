"""Common code of the parts of `bench.gpu`: reports of figures, and the device of the measurement."""

from __future__ import annotations

import json
import resource
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import spread

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Report:
    """Report of a part's figures. Each figure is a printed line and a line of a file, so none is lost if the part is ended.

    Attributes:
        part: The part's name.
        device: Device to measure: `cpu`, or torch's word for the accelerator.
        cards: Number of accelerators that it may use; 0 on the CPU.
        file: Of JSON lines.
    """

    part: str
    device: str
    cards: int
    file: Path

    def figure(self, name: str, values: float | Sequence[float], unit: str, *, of: str = "") -> None:
        """Reports a figure; for several values, prints the median and stores their spread.

        Args:
            name: Name of the figure.
            values: One or several measurements.
            unit: Their unit.
            of: Name of the figure of part `ceilings` that limits this figure.
        """
        figures = spread([values] if isinstance(values, (int, float)) else values)
        print(f"{self.part:11} {name:58} {figures['median']:12.5g} {unit}", flush=True)
        self._keep(
            {"figure": f"{name} ({unit})" if unit else name, **figures, **({"of": f"{of} ({unit})"} if of else {})}
        )

    def skip(self, piece: str, why: str) -> None:
        """Reports a skipped measurement with the reason."""
        print(f"{self.part:11} {piece}: skipped, {why}", flush=True)
        self._keep({"skipped": piece, "why": why})

    def fail(self, piece: str, why: str) -> None:
        """Reports a failed measurement."""
        print(f"{self.part:11} {piece}: FAILED, {why}", flush=True)
        self._keep({"failed": piece, "why": why})

    @contextmanager
    def piece(self, piece: str) -> Iterator[None]:
        """Runs a block whose failure is reported without ending the remaining measurements of the part."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines()
            self.fail(piece, f"{type(error).__name__}: {lines[0] if lines else ''}"[:400])

    def _keep(self, row: dict[str, Any]) -> None:
        with self.file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")

    @property
    def small(self) -> bool:
        """True if the sizes are small, to test the part only."""
        return self.device == "cpu"


def synchronize() -> None:
    """Waits for the accelerator, if there is one."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def timed(run: Callable[[], Any]) -> float:
    """Returns seconds, including the accelerator's work."""
    synchronize()
    start_time = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start_time


def free_bytes() -> int:
    """Returns the free bytes of the accelerator's memory."""
    import torch

    return torch.accelerator.get_memory_info()[0]


def peak_bytes(device: str) -> int:
    """Returns the peak memory of this process on the accelerator, as torch's allocator counts it, or on the host."""
    import torch

    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.accelerator.max_memory_allocated()


@dataclass(frozen=True)
class Size:
    """Sizes of a Llama with random weights, of its training batches and of its generation requests."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    sequences: int
    longest: int
    micro: int
    requests: int
    tokens: int


#: 0.4 million parameters; 0.2 billion, for cards below 40 GB; 0.8 billion.
TINY = Size(2, 128, 4, 512, 8, 64, 256, 8, 16)
SMALL = Size(12, 1024, 16, 32000, 32, 1024, 8192, 256, 128)
LARGE = Size(16, 2048, 16, 32000, 32, 1024, 8192, 256, 256)


def size_for(device: str) -> Size:
    """Returns the largest size that fits the device."""
    import torch

    if device == "cpu":
        return TINY
    return LARGE if torch.accelerator.get_memory_info()[1] > 40e9 else SMALL


def make_model(folder: Path, size: Size, device: str) -> int:
    """Writes the model in bfloat16 (float32 on the CPU), initialised on the device for speed; returns its parameter count."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhpc.runtime.devices import empty_cache

    config = LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.width, intermediate_size=size.width * 11 // 4,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.heads // 2,
        max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    dtype = getattr(torch, dtype_for(device))
    model.to(dtype).save_pretrained(folder)
    count = sum(parameter.numel() for parameter in model.parameters())
    del model
    empty_cache()  # others want the card
    return count


def dtype_for(device: str) -> str:
    """Returns the dtype of computations."""
    return "float32" if device == "cpu" else "bfloat16"
