# Training, one job per segment. The job waits for the driver, or finds the one that still runs.
#
# The output is a copy of the marker that the driver writes last (segments/<k>.json), never the marker itself: Snakemake
# deletes the outputs of a job before it runs it, and without its marker a finished segment would be trained again.
TRAIN_PARAMS = {
    "executor": executor,
    "marker": lambda wildcards: near(RUN.segment_done(int(wildcards.segment))),
    "site": SITE_OPTION,
    "overrides": Untracked(*OVERRIDES),
    "resume_with": RESUME_WITH,
    # What is trained, and how long: when these change, `rlhpc submit` looks again, and refuses or goes on.
    "training": training_fingerprint(CFG),
    "end": lambda wildcards: [ENDS[int(wildcards.segment)], KIND.checks.goal(CFG)],
}
TRAIN_COMMAND = (
    "rlhpc submit {input.config:q} --segment {wildcards.segment} --executor {params.executor}"
    " --attempt {resources.attempt} --asked-by $PPID"
    " {params.resume_with} {params.site} {params.overrides} 2>&1 > /dev/null | tee --ignore-interrupts {log:q}"
    " && cp --preserve=timestamps {params.marker:q} {output.done:q}"
)

if not ENDS_EARLY and CFG.runner.keep_best is None:

    rule train_segment:
        input:
            config=ancient(RUN_CONFIG),
            before=ancient(step_before),
        output:
            done=f"{WORK}/{SEGMENT}.json",
        log:
            f"{LOGS}/train_{SEGMENT}.log",
        benchmark:
            f"{LOGS}/train_{SEGMENT}.tsv"
        priority: PRIORITY
        retries: config["retries"]
        localrule: True
        resources:
            attempt=which_try,
            training=1,  # what a sweep may limit
        params:
            **TRAIN_PARAMS,
        shell:
            TRAIN_COMMAND

else:

    # The same, but only its end tells which checkpoint there is to evaluate, or which one is the best.
    checkpoint train_segment:
        input:
            config=ancient(RUN_CONFIG),
            before=ancient(step_before),
        output:
            done=f"{WORK}/{SEGMENT}.json",
        log:
            f"{LOGS}/train_{SEGMENT}.log",
        benchmark:
            f"{LOGS}/train_{SEGMENT}.tsv"
        priority: PRIORITY
        retries: config["retries"]
        localrule: True
        resources:
            attempt=which_try,
            training=1,
        params:
            **TRAIN_PARAMS,
        shell:
            TRAIN_COMMAND


# All segments, and nothing after them: `snakemake … -- train`.
rule train:
    input:
        segment_file(len(ENDS) - 1),
    localrule: True
