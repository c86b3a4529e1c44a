# A checkpoint's policy as safetensors and a config.
rule convert:
    input:
        segment_of,
    output:
        f"{ROOT}/export/global_step_{{step}}/model.safetensors",
    log:
        f"{ROOT}/logs/workflow/convert_{{step}}.log",
    benchmark:
        f"{ROOT}/logs/workflow/convert_{{step}}.tsv"
    retries: 1
    conda:
        ENVIRONMENT
    params:
        root=lambda w, output: Path(output[0]).parents[2],
    shell:
        "rlhpc convert --run {params.root} --step {wildcards.step} &> {log}"


# Offline: --config checkpoint=/path/to/global_step_60 output=folder -- convert_checkpoint
rule convert_checkpoint:
    output:
        f"{config['output']}/{Path(config['checkpoint'] or 'none').name}/model.safetensors",
    log:
        f"{config['output']}/{Path(config['checkpoint'] or 'none').name}.convert.log",
    benchmark:
        f"{config['output']}/{Path(config['checkpoint'] or 'none').name}.convert.tsv"
    conda:
        ENVIRONMENT
    params:
        checkpoint=config["checkpoint"],
        folder=lambda w, output: Path(output[0]).parent,
    shell:
        "rlhpc convert --checkpoint {params.checkpoint} --output {params.folder} &> {log}"
