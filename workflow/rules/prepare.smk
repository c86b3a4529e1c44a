# What would run where, checked before anything is submitted.
rule prepare:
    output:
        f"{ROOT}/workflow/plan.txt",
    log:
        f"{ROOT}/logs/workflow/prepare.log",
    benchmark:
        f"{ROOT}/logs/workflow/prepare.tsv"
    conda:
        ENVIRONMENT
    params:
        run=config["run"],
        overrides=OVERRIDES,
    shell:
        "rlhpc plan {params.run} {params.overrides} > {output} 2> {log}"
