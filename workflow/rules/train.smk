# Training, one job per segment. The job waits for the driver, or finds the one that still runs.
#
# The output is a copy of the marker that the driver writes last (segments/<k>.json), never the marker itself: Snakemake
# deletes the outputs of a job before it runs it, and without its marker a finished segment would be trained again.


checkpoint train_segment:
    input:
        config=ancient(RUN_CONFIG),
        before=ancient(step_before),
    output:
        done=f"{WORK}/segment_{{segment}}.json",
    log:
        f"{LOGS}/train_segment_{{segment}}.log",
    benchmark:
        f"{LOGS}/train_segment_{{segment}}.tsv"
    retries: config["retries"]
    localrule: True
    params:
        executor=executor,
        marker=lambda wildcards: RUN.segment_done(int(wildcards.segment)),
        site=SITE_OPTION,
        overrides=OVERRIDES,
    shell:
        "rlhpc submit {input.config:q} --segment {wildcards.segment} --executor {params.executor}"
        " {params.site:q} {params.overrides:q} 2>&1 | tee --ignore-interrupts {log:q}"
        " && cp --preserve=timestamps {params.marker:q} {output.done:q}"
