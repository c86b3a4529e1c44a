# The names of the run's files, and the plan: what would run where, checked before anything is submitted.
RESUME_WITH = Untracked(*(["--resume-with"] if config["resume_with"] else []))
CFG = load_run()
RLHPC = rlhpc_command()
KIND = task_type_of(CFG)
BEFORE = KIND.offline.preparation(CFG)
RECORDED, ONLY_SUCCEEDED = KIND.offline.recording(CFG)
EVAL_RESOURCES = job_resources(CFG.workflow.eval_job)
CONVERT_RESOURCES = job_resources(CFG.workflow.convert_job)
RUN = RunPaths.from_run_dir(CFG.runner.run_dir, CFG.runner.name)
checked(refuse_braces, RUN_CONFIG, RUN.root)
ENDS = segment_ends(CFG)
ENDS_EARLY = KIND.checks.goal(CFG) is not None
SUITES = list(config["suites"] or CFG.workflow.eval_suites)

ROOT = near(RUN.root)
WORK = f"{ROOT}/workflow"  # Snakemake's own: what is below may be deleted at any time
LOGS = f"{near(RUN.logs)}/workflow"
SEGMENT = segment_name("{segment}")
EVALUATION = near(RUN.eval_result("{step}", "{suite}"))
EXPORT = near(RUN.export("{step}") / MODEL)
SFT = load_sft()
# A sweep has the runs finish in their order, so that the first results come early.
PRIORITY = WITHIN.get("priority", 0)
DEMOS = demonstrations()
RECORDING = near(RUN.recording("{step}"))
ONLY_SUCCESS = ["--only-success"] if ONLY_SUCCEEDED else []
TARGETS = [near(RUN.report)]
config["described"] = described()  # for report/workflow.rst, which sees nothing else


rule prepare:
    input:
        config=ancient(RUN_CONFIG),
    output:
        plan=f"{WORK}/plan.txt",
    log:
        f"{LOGS}/prepare.log",
    benchmark:
        f"{LOGS}/prepare.tsv"
    localrule: True
    params:
        site=SITE_OPTION,
        executor=executor,
        overrides=Untracked(*OVERRIDES),
    shell:
        # The plan is there when it is complete: of a job that is under way, or was killed, Snakemake takes an output that
        # is there for incomplete, makes it again, and leaves out all that follows, which is to ignore its time (`ancient`).
        "rlhpc plan {input.config:q} --launcher {params.executor} {params.site} {params.overrides} > {output.plan:q}.part 2> {log:q}"
        " && mv {output.plan:q}.part {output.plan:q}"
