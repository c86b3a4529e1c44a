# The policy in a form that other tools read: safetensors, and what is needed to build the network around it.


rule convert:
    input:
        segment=ancient(segment_of),
        # The model card has the results.
        results=lambda wildcards: expand(EVALUATION, step=wildcards.step, suite=SUITES),
    output:
        model=EXPORT,
    log:
        f"{LOGS}/convert_{{step}}.log",
    benchmark:
        f"{LOGS}/convert_{{step}}.tsv"
    retries: config["retries"]
    threads: CFG.workflow.convert_job.cpus
    resources:
        **CONVERT_RESOURCES,
    params:
        rlhpc=RLHPC,
        checkpoint=lambda wildcards: near(RUN.checkpoint(int(wildcards.step))),
        folder=lambda wildcards: near(RUN.export(int(wildcards.step))),
    shell:
        # The run's own checkpoint: it names what the user's configuration named.
        "{params.rlhpc} convert --trust-checkpoint-code --checkpoint {params.checkpoint:q}"
        " --output {params.folder:q} > {log:q} 2>&1"
