# What the rules share: the run's configuration, read without torch, and which files belong to which segment.
from rlhpc.config import segment_ends
from rlhpc.config.files import read_content
from rlhpc.config.merge import parse_override
from rlhpc.config.yaml_files import WrittenScalars
from rlhpc.runs.config_changes import evaluation_fingerprint, training_fingerprint
from rlhpc.runs.configuration import load_config
from rlhpc.metrics.provenance import last_result
from rlhpc.runs.task_type import task_type_of
from rlhpc.runs.sweep import check_begun, load_sweep, override, sft_export
from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.imports import run_module
from rlhpc.jobs.plan import job_options
from rlhpc.jobs.slurm import minutes_of
from rlhpc.jobs.paths import COMPLETE, MODEL, RunPaths, refuse_braces, segment_name


wildcard_constraints:
    segment=r"\d+",
    step=r"\d+",
    suite=r"[\w.-]+",


class Untracked:
    """Words of a command whose changes start no job again; other parameters have the values that matter."""

    def __init__(self, *words):
        self.words = words

    def __str__(self):
        return shlex.join(map(str, self.words))


def rlhpc_command():
    """Returns the words that start rlhpc in a job that Snakemake submits to Slurm; the job runs in the ranks' image, if any.

    In the job itself, Snakemake runs again without the executor.
    """
    wrapper, plugin = CFG.cluster.container, workflow.executor_plugin
    on_slurm = workflow.remote_exec or (plugin is not None and plugin.name.startswith("slurm"))
    if not wrapper or not on_slurm:
        return Untracked("rlhpc")
    # Paths of rules are relative to the working directory, and Charliecloud begins in another one.
    folder = str(Path.cwd())
    return Untracked(*wrapper, *run_module("rlhpc.cli", python=CFG.cluster.container_python, folder=folder))


#: What commands take after their own options.
SITE = config["site"] or os.environ.get("RLHPC_SITE", "")
SITE_OPTION = Untracked(*(["--site", SITE] if SITE else []))


def makes(what):
    """Returns whether this run makes a preparation; of the runs of a sweep that share one, only the first makes it."""
    return what in WITHIN.get("prepares", ("sft", "demos"))


def described():
    """Returns the head of Snakemake's report: name, result and configuration of the run."""
    _, _, result = last_result(RUN, SUITES[0])
    text = "\n".join([f"# {near(RUN_CONFIG)}", Path(RUN_CONFIG).read_text(), *(f"# {word}" for word in OVERRIDES)])
    return {"name": CFG.runner.name, "result": result or "not evaluated yet", "config": text}


def near(path):
    """Returns a path relative to the working directory if it is below it, which is shorter in logs and graphs."""
    path = Path(path).absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def find_config(name):
    """Finds a configuration below the working directory, or among those that come with rlhpc."""
    here = checked(expand_home, name)
    return str(here if here.exists() or here.is_absolute() else part_of_rlhpc(*here.parts))


def words(value):
    """Converts overrides (`"a=b c=d"` or a list) to a list."""
    try:
        return shlex.split(value) if isinstance(value, str) else [str(word) for word in value or ()]
    except ValueError as error:
        raise WorkflowError(f"rlhpc: error: overrides {value!r}: {error}; quote it as a shell would read it") from None


def checked(load, *args, **options):
    """Returns the result of `load`; an error in a configuration becomes one message, before anything is written."""
    try:
        return load(*args, **options)
    except RlhpcError as error:
        raise WorkflowError(f"rlhpc: error: {error}") from None


def load_run():
    """Loads the run's configuration."""
    return checked(load_config, RUN_CONFIG, OVERRIDES, site=SITE or None)


def as_written(found):
    """Parses the values in a mapping of the command line, which Snakemake leaves as text."""
    if isinstance(found, dict):
        return {key: as_written(value) for key, value in found.items()}
    if isinstance(found, list):
        return [as_written(value) for value in found]
    return parse_override(f"value={found}")[1] if isinstance(found, str) and found else found


def sweep_words():
    """Returns the value of `--config sweep=…` as a list with an override; [] if there is none."""
    found = config["sweep"]
    if isinstance(found, str) and found:
        content = checked(read_content, Path(find_config(found)), loader=WrittenScalars)
        found = content.get("sweep") if isinstance(content, dict) else None
        if not isinstance(found, dict):
            raise WorkflowError(f"rlhpc: error: {config['sweep']}: it has no section `sweep`")
    return [override("sweep", as_written(found))] if found else []


def load_sft():
    """Loads the configuration of the SFT run that precedes training; returns None if there is no such run."""
    if not BEFORE.sft:
        return None
    file, overrides = BEFORE.sft
    path = near(Path(RUN_CONFIG).parent / file)
    return path, checked(load_config, path, overrides, site=SITE or None)


def demonstrations():
    """Returns the file of demonstrations that an expert records before training; None if no expert does."""
    return near(BEFORE.demos[0]) if BEFORE.demos else None


def start_model(wildcards):
    """Returns the export of the SFT run, if training starts from it."""
    return [SFT_EXPORT] if SFT else []


def step_before_training(wildcards):
    """Returns the files that must exist before the first model can be evaluated."""
    return [f"{WORK}/plan.txt", *start_model(wildcards), *([DEMOS] if DEMOS else [])]


def megabytes(mem):
    """Converts memory in Slurm's form, such as `64G`, to MiB; `0` means all memory."""
    text = mem.removesuffix("B")
    unit = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
    return math.ceil(int(text.rstrip("KMGT")) * unit.get(text[-1], 1))


def job_resources(job):
    """Returns the resources of a section `workflow.…_job`, by the names of Snakemake's Slurm executor."""
    where = job_options(CFG.cluster, job)
    found = {
        "slurm_partition": where.get("partition"),
        "slurm_account": where.get("account"),
        "qos": where.get("qos"),
        "constraint": where.get("constraint"),
        "gres": job.gres,
        "mem_mb": megabytes(job.mem),
        "runtime": minutes_of(job.time),
    }
    return {name: value for name, value in found.items() if value is not None}


def executor(wildcards):
    """Returns the executor of a segment's driver; by default that of Snakemake's jobs."""
    plugin = workflow.executor_plugin
    on_slurm = plugin is not None and plugin.name.startswith("slurm")
    return Untracked(config["executor"] if config["executor"] != "auto" else "slurm" if on_slurm else "local")


def which_try(wildcards, attempt):
    """Returns the number of the attempt for `rlhpc submit`, whose retries must not restart a cancelled job."""
    return attempt


def suite_overrides(wildcards):
    """Returns the overrides of an evaluation suite."""
    return words(config["suites"].get(wildcards.suite, ""))


def segment_file(segment):
    return f"{WORK}/{segment_name(segment)}.json"


def step_before(wildcards):
    """Returns the file of the previous segment; for the first segment, the plan and the model that it starts from."""
    segment = int(wildcards.segment)
    return [segment_file(segment - 1)] if segment else step_before_training(wildcards)


def end_of(segment):
    """Returns the last step of a segment: the planned one or, with `stop_return`, the one known after its end."""
    if not ENDS_EARLY:
        return ENDS[segment]
    with checkpoints.train_segment.get(segment=segment).output.done.open() as file:
        return json.load(file)["global_step"]


def segment_of(wildcards):
    """Returns the segment that wrote a checkpoint, so that its evaluation does not wait for later segments."""
    step = int(wildcards.step)
    if not ENDS_EARLY:
        return [segment_file(next(k for k, end in enumerate(ENDS) if step <= end))] if step <= ENDS[-1] else []
    return [segment_file(next(k for k in range(len(ENDS)) if step <= end_of(k)))]


def evaluations_of(segment):
    """Builds an input function for a segment, whose checkpoint is evaluated while the next segment trains."""

    def evaluations(wildcards):
        return expand(EVALUATION, step=end_of(segment), suite=SUITES)

    return evaluations


def chosen_step():
    """Returns the step of the run's policy: the best step, known after training, or that of the last segment."""
    if CFG.runner.keep_best is None:
        return end_of(len(ENDS) - 1)
    checkpoints.train_segment.get(segment=len(ENDS) - 1)
    return RUN.chosen_step()


def final_evaluations(wildcards):
    """Returns the evaluations of the run's policy; those of other checkpoints are `evaluations_of` each segment."""
    return expand(EVALUATION, step=chosen_step(), suite=SUITES)


def final_recording(wildcards):
    """Returns the recorded episodes of the run's policy."""
    return expand(RECORDING, step=chosen_step()) if RECORDED else []


def final_export(wildcards):
    """Returns the export of the run's policy."""
    return expand(EXPORT, step=chosen_step())


#: The configuration as given, and whether it is that of a sweep.
if not config["checkpoint"]:
    RUN_CONFIG = find_config(config["run"])
    OVERRIDES = [*words(config["overrides"]), *sweep_words()]
SWEEP = None
if not config["checkpoint"] and not WITHIN:
    SWEEP = checked(load_sweep, RUN_CONFIG, OVERRIDES, site=SITE or None)
