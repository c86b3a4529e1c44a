"""A stranger's questions: one search for the field's word over names of files, classes and functions finds the module."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Question → the word, as a pattern without case; and the module where the answer is.
QUESTIONS = {
    "dynamic sampling": (r"dynamic.?sampling", "rlhpc/language/rollout/group_builder.py"),
    "load balance over ranks": (r"balanc", "rlhpc/language/models/micro_batching.py"),
    "log-prob recomputation": (r"recompute.*log.?prob", "rlhpc/language/workers/grpo_actor.py"),
    "weight transfer to vLLM": (r"vllm.*weight", "rlhpc/language/engines/vllm_weights.py"),
    "KV cache after an update": (r"kv_?cache", "rlhpc/language/engines/vllm.py"),
    "requeue on preemption": (r"preempt", "rlhpc/jobs/driver_job.py"),
    "where a lost environment's episode goes": (r"drop_lost|lost_(env|episode)", "rlhpc/embodied/data/batches.py"),
    "pass@k": (r"pass.?at.?k", "rlhpc/language/reporting/eval_metrics.py"),
    "chunked loss": (r"chunked", "rlhpc/language/models/logprobs.py"),
    "what resume restores": (r"restore_run|resume_state", "rlhpc/runs/runner.py"),
}


@cache
def names() -> dict[str, list[str]]:
    """Returns the names of classes and functions by file, the file's path first."""
    found = {}
    for path in sorted((ROOT / "rlhpc").rglob("*.py")):
        definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        defined = [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, definitions)]
        found[str(path.relative_to(ROOT))] = [str(path.relative_to(ROOT)), *defined]
    return found


@pytest.mark.parametrize("question", QUESTIONS)
def test_one_search_finds_the_module(question: str) -> None:
    word, module = QUESTIONS[question]
    hits = [path for path, defined in names().items() if any(re.search(word, name, re.IGNORECASE) for name in defined)]
    assert module in hits and len(hits) <= 3, hits
