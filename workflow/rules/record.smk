# Episodes as trajectories: an expert's before training, and the last policy's after it.

if DEMOS and makes("demos"):

    rule demos:
        input:
            config=ancient(RUN_CONFIG),
            plan=ancient(f"{WORK}/plan.txt"),
        output:
            trajectories=DEMOS,
            described=DEMOS.removesuffix(".h5") + ".json",
        log:
            f"{LOGS}/demos.log",
        benchmark:
            f"{LOGS}/demos.tsv"
        retries: config["retries"]
        threads: CFG.workflow.eval_job.cpus
        resources:
            **EVAL_RESOURCES,
        params:
            rlhpc=RLHPC,
            expert=BEFORE.demos[1],
            episodes=BEFORE.demos[2],
            only_success=ONLY_SUCCESS,
            overrides=Untracked(*OVERRIDES),
            training=WITHIN.get("demos") or training_fingerprint(CFG),
        shell:
            "{params.rlhpc} record --expert {params.expert:q} --config {input.config:q} --episodes {params.episodes}"
            " {params.only_success:q} --output {output.trajectories:q} {params.overrides} > {log:q} 2>&1"


rule record:
    input:
        segment=ancient(segment_of),
    output:
        trajectories=RECORDING,
        described=RECORDING.removesuffix(".h5") + ".json",
    log:
        f"{LOGS}/record_{{step}}.log",
    benchmark:
        f"{LOGS}/record_{{step}}.tsv"
    retries: config["retries"]
    threads: CFG.workflow.eval_job.cpus
    resources:
        **EVAL_RESOURCES,
    params:
        rlhpc=RLHPC,
        checkpoint=lambda wildcards: near(RUN.checkpoint(int(wildcards.step))),
        episodes=RECORDED,
        only_success=ONLY_SUCCESS,
    shell:
        "{params.rlhpc} record --checkpoint {params.checkpoint:q} --episodes {params.episodes} {params.only_success:q}"
        " --output {output.trajectories:q} > {log:q} 2>&1"
