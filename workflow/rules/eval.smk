# Evaluation, one job per checkpoint and suite, as soon as the segment that wrote the checkpoint has ended.


rule eval:
    input:
        segment=ancient(segment_of),
    output:
        result=EVALUATION,
    log:
        f"{LOGS}/eval_{{step}}_{{suite}}.log",
    benchmark:
        f"{LOGS}/eval_{{step}}_{{suite}}.tsv"
    retries: config["retries"]
    threads: CFG.workflow.eval_job.cpus
    resources:
        **EVAL_RESOURCES,
    params:
        rlhpc=RLHPC,
        checkpoint=lambda wildcards: near(RUN.checkpoint(int(wildcards.step))),
        config=RUN_CONFIG,
        overrides=Untracked(*OVERRIDES),
        suite=suite_overrides,
        # The configuration of now, not of when the checkpoint was made: how it is evaluated may have changed since.
        evaluation=evaluation_fingerprint(CFG),
    shell:
        "{params.rlhpc} eval --checkpoint {params.checkpoint:q} --config {params.config:q} --suite {wildcards.suite:q}"
        " --output {output.result:q} {params.overrides} {params.suite:q} > {log:q} 2>&1"


# The model before RL, as step 0: what the curves start from.
if BEFORE.evaluates_start:

    rule eval_start:
        input:
            before=step_before_training,
        output:
            result=near(RUN.eval_result(0, "{suite}")),
        log:
            f"{LOGS}/eval_0_{{suite}}.log",
        benchmark:
            f"{LOGS}/eval_0_{{suite}}.tsv"
        retries: config["retries"]
        threads: CFG.workflow.eval_job.cpus
        resources:
            **EVAL_RESOURCES,
        params:
            rlhpc=RLHPC,
            config=RUN_CONFIG,
            overrides=Untracked(*OVERRIDES),
            suite=suite_overrides,
            evaluation=evaluation_fingerprint(CFG),
        shell:
            "{params.rlhpc} eval --model '' --config {params.config:q} --suite {wildcards.suite:q}"
            " --output {output.result:q} {params.overrides} {params.suite:q} > {log:q} 2>&1"

    ruleorder: eval_start > eval
