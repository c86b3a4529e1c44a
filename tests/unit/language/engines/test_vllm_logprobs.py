"""Log-probs that vLLM's engines return."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.extras import need_extra

need_extra("llm", "vllm")

from rlhpc.language.engines.vllm_logprobs import log_before_filters, merge_unlikely_tokens, return_outcomes
from rlhpc.language.models import logprobs
from rlhpc.language.models.token_batch import TokenBatch
from tests.rectangles import top_told

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.outputs import LogprobsTensors


def test_the_second_runners_log_probs_are_before_the_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sampler draws from what top-k leaves, and takes log-probs from the logits that `_sample_random` returns."""
    from vllm.v1.worker.gpu.sample import sampler as module

    scored: list[torch.Tensor] = []
    # Triton draws and scores there; the largest will do, and what is scored is kept.
    monkeypatch.setattr(module, "gumbel_sample", lambda logits, *args, **options: logits.argmax(-1))
    monkeypatch.setattr(module, "compute_topk_scores", lambda logits, *args, **options: scored.append(logits))
    monkeypatch.setattr(module, "get_num_sampled_and_rejected", lambda *args: (None, None))
    gpu, no = SimpleNamespace(gpu=None), lambda *args: False
    sampler = module.Sampler.__new__(module.Sampler)
    sampler.__dict__ |= {
        "sampling_states": SimpleNamespace(
            temperature=gpu, seeds=gpu, any_greedy=no, any_explicit_seed=no, max_num_logprobs=lambda rows: 0,
            get_top_k_top_p=lambda *args: (torch.tensor([2, 1]), None),
        ),
        "req_states": SimpleNamespace(prefill_len=gpu), "logprob_token_ids_state": SimpleNamespace(max_num_token_ids=no),
        "needs_logits_processing": np.zeros(2, bool), "logprobs_mode": "processed_logprobs", "trace_replay_state": None,
        "compute_nans": False, "return_sampling_mask": False, "use_fp64_gumbel": False, "use_xpu_sampler": False,
        "use_flashinfer": True,  # whose fused kernel says no logits: not taken where processed ones are asked for
    }  # fmt: skip
    worker = SimpleNamespace(model_runner=SimpleNamespace(sampler=sampler))
    logits, rows = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 1.0, 1.5, 0.0]]), torch.arange(2)
    batch: Any = SimpleNamespace(
        num_reqs=2, positions=rows, logits_indices=rows, input_ids=rows, seq_lens=rows, seq_lens_cpu_upper_bound=rows,
        idx_mapping=rows, idx_mapping_np=rows.numpy(), expanded_idx_mapping=rows, expanded_local_pos=rows,
        cu_num_logits=rows, cu_num_logits_np=rows.numpy(),
    )  # fmt: skip
    before = sampler(logits.clone(), batch).sampled_token_ids
    assert torch.isinf(scored[0]).any()  # as vLLM has it: filtered
    assert log_before_filters(worker)
    tokens = sampler(logits.clone(), batch).sampled_token_ids
    assert tokens.tolist() == before.tolist() == [[1], [0]]
    assert torch.equal(scored[1], logits)


#: Of a prompt of four tokens, read in pieces of two; hidden states are logits here.
PROMPT, HIDDEN = (
    [2, 0, 1, 3],
    torch.tensor([[0.5, -1.0, 2.0, 0.0], [3.0, 1.0, 0.0, -2.0], [-1.0, 0.5, 1.5, 4.0], [0.0] * 4]),
)


class _Logits(torch.nn.Module):
    """Like vLLM's models: logits only where they are asked for."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def _first_runner(model: _Logits, parameters: SamplingParams, top: int) -> LogprobsTensors:
    """A prompt's log-probs by the first model runner, and its own sampler."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    request = SimpleNamespace(
        prompt_token_ids=PROMPT, sampling_params=parameters, num_computed_tokens=0, in_progress_prompt_logprobs_cpu=None
    )
    runner: Any = SimpleNamespace(
        num_prompt_logprobs={"id": top}, requests={"id": request}, device=torch.device("cpu"), model=model,
        input_batch=SimpleNamespace(req_id_to_index={"id": 0}), query_start_loc=SimpleNamespace(np=np.zeros(1, int)),
        model_config=SimpleNamespace(logprobs_mode="raw_logprobs"), sampler=model.sampler, _sync_device=lambda: None,
    )  # fmt: skip
    for start in (0, 2):
        request.num_computed_tokens = start
        found = GPUModelRunner._get_prompt_logprobs_dict(runner, HIDDEN[start : start + 2], {"id": 2})
    return found["id"]


def _second_runner(model: _Logits, parameters: SamplingParams, top: int) -> LogprobsTensors:
    """The same by the second one. Its kernels need Triton: plain torch takes their places."""
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample import prompt_logprob as module

    def scores(logits: torch.Tensor, num: int, ids: torch.Tensor, logits_mode: bool) -> LogprobsTensors:
        logprobs, chosen = logits.log_softmax(-1), ids[:, None]
        most, theirs = logprobs.topk(num, dim=-1)
        found = torch.cat([logprobs.gather(1, chosen), most], 1)
        return LogprobsTensors(torch.cat([chosen, theirs], 1), found, torch.zeros_like(ids))

    worker = module.PromptLogprobsWorker(1, torch.device("cpu"), "raw_logprobs")
    worker.add_request("id", 0, parameters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compute_topk_scores", scores)
        following = torch.tensor([*PROMPT[1:], 0])
        for start in (0, 2):
            patch.setattr(module, "get_prompt_logprobs_token_ids", lambda *args, at=start: following[at : at + 2])
            batch: Any = SimpleNamespace(
                idx_mapping_np=np.zeros(1, int), num_computed_prefill_tokens_np=np.array([start]), req_ids=["id"],
                prefill_len_np=np.array([4]), num_tokens=2, query_start_loc=None, idx_mapping=None,
                num_scheduled_tokens=np.array([2]), query_start_loc_np=np.array([0, 2]),
            )  # fmt: skip
            none: Any = None
            found = worker.compute_prompt_logprobs(
                model.compute_logits, HIDDEN[start : start + 2], batch, none, none, np.array([4])
            )
    return found["id"]


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize("runner", [_first_runner, _second_runner])
def test_a_prompts_log_probs_are_of_the_models_logits(runner: Any, top: int) -> None:
    """As they are, before temperature, filters and penalties: so what the model is made to say is what is told."""
    from vllm import SamplingParams
    from vllm.v1.sample.sampler import Sampler

    most = top + 1 if top else 0
    parameters = SamplingParams(temperature=0.5, top_k=1, min_p=0.5, prompt_logprobs=most)
    assert parameters.skip_reading_prefix_cache
    model: Any = _Logits()
    model.sampler = Sampler("raw_logprobs")
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model, sampler=model.sampler))
    return_outcomes(worker, 0, 4, 1.0)
    plain = HIDDEN[:3].log_softmax(-1).gather(1, torch.tensor(PROMPT[1:])[:, None])
    torch.testing.assert_close(runner(model, parameters, most).logprobs[:, :1], plain)
    return_outcomes(worker, top, 4, 2.0)
    found, expected = runner(model, parameters, most), (HIDDEN[:3] / 2).log_softmax(-1)
    if not top:
        torch.testing.assert_close(found.logprobs, expected.gather(1, torch.tensor(PROMPT[1:])[:, None]))
        return
    likely, ids = expected.topk(top, dim=-1)
    rest = expected.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    both, order = torch.cat([likely, rest], 1).sort(dim=-1, descending=True)
    torch.testing.assert_close(found.logprobs[:, 1:], both)
    names = torch.cat([ids, torch.full_like(ids[:, :1], 4)], 1).gather(1, order)
    assert torch.equal(found.logprob_token_ids[:, 1:].long(), names)


@pytest.mark.parametrize(("top", "width"), [(3, 7), (1, 9), (9, 9), (6, 7)])
def test_what_is_left_is_known_where_it_is_little(top: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's softmax makes of the outcomes is what a teacher in transformers says, of a padded vocabulary, in chunks."""
    monkeypatch.setattr(logprobs, "chunk_rows", lambda width, **_: 2)
    logits = torch.randn(1, 12, 9, generator=torch.Generator().manual_seed(0)) * 15
    batch = TokenBatch.from_sequences([[0] * 12], [[False] + [True] * 11])
    told = top_told(logits, batch, top, 0.8, width)[1:]
    found = merge_unlikely_tokens(logits[0, :-1], top, width, 0.8).log_softmax(-1)
    assert told[:, -1, 0].min() < -20 or top == width
    ids = torch.where(told[..., 1] < 0, width, told[..., 1]).long()
    torch.testing.assert_close(found.gather(1, ids), told[..., 0], rtol=1e-6, atol=1e-6)
    assert ((found > -torch.inf).sum(1) == top + 1).all()
