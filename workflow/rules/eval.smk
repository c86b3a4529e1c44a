# One job per checkpoint and suite, as soon as the segment that wrote the checkpoint has ended.
rule evaluate:
    input:
        segment_of,
    output:
        f"{ROOT}/eval/global_step_{{step}}/{{suite}}.json",
    log:
        f"{ROOT}/logs/workflow/eval_{{step}}_{{suite}}.log",
    benchmark:
        f"{ROOT}/logs/workflow/eval_{{step}}_{{suite}}.tsv"
    retries: 1
    conda:
        ENVIRONMENT
    params:
        root=lambda w, output: Path(output[0]).parents[2],
    shell:
        "rlhpc eval --run {params.root} --step {wildcards.step} --suite {wildcards.suite} --output {output} &> {log}"


# Offline, on any checkpoint of any run: --config checkpoint=/path/to/global_step_60 -- evaluate_checkpoint
rule evaluate_checkpoint:
    output:
        f"{config['output']}/{Path(config['checkpoint'] or 'none').name}.json",
    log:
        f"{config['output']}/{Path(config['checkpoint'] or 'none').name}.eval.log",
    benchmark:
        f"{config['output']}/{Path(config['checkpoint'] or 'none').name}.eval.tsv"
    conda:
        ENVIRONMENT
    params:
        checkpoint=config["checkpoint"],
        suite=config["suite"],
    shell:
        "rlhpc eval --checkpoint {params.checkpoint} --suite {params.suite} --output {output} &> {log}"
