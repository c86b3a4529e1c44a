# One job per segment, submitted by `rlhpc submit`, which attaches to the job if it runs already. Local: it only waits.
# The checkpoint folders are not declared: Snakemake would delete them. The marker is written last.
checkpoint train_segment:
    input:
        plan=rules.prepare.output,
        before=lambda w: marker(int(w.segment) - 1) if int(w.segment) else [],
    output:
        f"{ROOT}/segments/{{segment}}.json",
    log:
        f"{ROOT}/logs/workflow/train_segment_{{segment}}.log",
    benchmark:
        f"{ROOT}/logs/workflow/train_segment_{{segment}}.tsv"
    conda:
        ENVIRONMENT
    params:
        run=config["run"],
        overrides=OVERRIDES,
        executor=EXECUTOR,
    shell:
        "rlhpc submit --segment {wildcards.segment} --executor {params.executor} {params.run} {params.overrides}"
        " 2>&1 > {log} | tee -a {log} >&2; exit ${{PIPESTATUS[0]}}"
