# Several runs from one configuration: the workflow of each as a module of its own, and a page that compares them.
#
# A run depends on none of the others, so one that fails stops none (`keep-going` in the profiles). What several need
# first, the same SFT run or the same demonstrations, the first of them makes.
from rlhpc.runs.sweep import recording_key, rule_prefixes

SWEEP_ROOT = near(SWEEP.paths.root)
LOGS = f"{near(SWEEP.paths.logs)}/workflow"
PAGE = near(SWEEP.paths.page)
PREFIXES = rule_prefixes([run.point.name for run in SWEEP.runs])
TARGETS = [PAGE]
config["described"] = {
    "name": SWEEP.name,
    "result": f"a sweep of {len(SWEEP.runs)} runs",
    "config": "\n".join([f"# {near(RUN_CONFIG)}", Path(RUN_CONFIG).read_text(), *(f"# {word}" for word in OVERRIDES)]),
}
if workflow.is_main_process:
    checked(check_begun, SWEEP, resume_with=config["resume_with"])
if SWEEP.section.max_queued is not None and "training" not in workflow.global_resources:
    workflow.register_resource("training", SWEEP.section.max_queued)


# A job on the cluster reads the workflow again, and its command line names its rule: it needs that run's, not hundreds.
ASKED = [run for run in SWEEP.runs if any(word.startswith(PREFIXES[run.point.name]) for word in sys.argv)]


for INDEX, RUN in enumerate(SWEEP.runs):
    PREFIX = PREFIXES[RUN.point.name]
    if workflow.is_main_process or not ASKED or RUN in ASKED:
        workflow.module(
            PREFIX,
            snakefile=str(part_of_rlhpc("workflow", "Snakefile")),
            config={
                **{key: config[key] for key in ("executor", "site", "suites", "resume_with", "retries")},
                "run": config["run"],
                "overrides": list(RUN.overrides),
                "within": {
                    "sweep": SWEEP.name,
                    "priority": len(SWEEP.runs) - INDEX,
                    "prepares": sorted(RUN.prepares),
                    "demos": recording_key(RUN.cfg),
                },
            },
        )
        workflow.userule(rules=["*"], from_module=PREFIX, name_modifier=f"{PREFIX}*")(lambda: None)


onstart:
    if workflow.is_main_process:
        checked(SWEEP.begin)


rule compare:
    input:
        reports=[near(run.paths.report) for run in SWEEP.runs],
    output:
        page=report(PAGE, caption="../report/sweep.rst", category="Sweep", labels={"sweep": SWEEP.name}),
    log:
        f"{LOGS}/compare.log",
    benchmark:
        f"{LOGS}/compare.tsv"
    localrule: True
    params:
        folder=lambda wildcards, output: str(Path(output.page).parent),
        runs=json.dumps(SWEEP.facts(), default=str, sort_keys=True),
    shell:
        "rlhpc compare {params.folder:q} --output {output.page:q} > {log:q} 2>&1"


# Of the runs that have something to show; the page says which have failed.
onerror:
    if workflow.is_main_process and SWEEP.paths.is_there:
        shell(
            "mkdir -p {LOGS:q}; rlhpc compare {SWEEP_ROOT:q} --output {PAGE:q} > {LOGS:q}/compare.log 2>&1 || true"
        )
