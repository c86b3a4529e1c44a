# The run's configuration, and where its files lie. Read once, without torch.
from rlhpc.config import load_config, segment_ends
from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.paths import RunPaths
from snakemake.exceptions import WorkflowError

try:
    RUN = load_config(config["run"], shlex.split(OVERRIDES))
except RlhpcError as error:
    raise WorkflowError(f"rlhpc: error: {error}") from None

ROOT = os.path.relpath(RunPaths.of(RUN.runner.run_dir, RUN.runner.name).root)
ENDS = segment_ends(RUN)
SUITES = list(RUN.workflow.eval_suites)
REPORT = f"{ROOT}/report/index.html"
ENVIRONMENT = "../../envs/environment.yaml"


wildcard_constraints:
    segment=r"\d+",
    step=r"\d+",
    suite=r"[\w.-]+",


def marker(segment):
    return f"{ROOT}/segments/{segment}.json"


def steps_reached():
    """The global steps that the segments ended at: planned, or with `stop_return` known once each has finished."""
    if RUN.runner.stop_return is None:
        return ENDS
    markers = [
        checkpoints.train_segment.get(segment=k).output[0] for k in range(len(ENDS))
    ]
    return list(
        dict.fromkeys(json.loads(Path(m).read_text())["global_step"] for m in markers)
    )


def segment_of(wildcards):
    """The segment that wrote a checkpoint, so that its evaluation need not wait for later ones."""
    if RUN.runner.stop_return is None and int(wildcards.step) in ENDS:
        return marker(ENDS.index(int(wildcards.step)))
    return [marker(k) for k in range(len(ENDS))]


def evaluations(wildcards):
    """One file per segment's checkpoint and suite."""
    return [
        f"{ROOT}/eval/global_step_{step}/{suite}.json"
        for step in steps_reached()
        for suite in SUITES
    ]


def exported(wildcards):
    """The last segment's policy."""
    return f"{ROOT}/export/global_step_{steps_reached()[-1]}/model.safetensors"
