# Evaluation and conversion of one checkpoint, of any run, anywhere: `--config checkpoint=…/global_step_3 [suite=…] [output=…]`.
CHECKPOINT = checked(expand_home, config["checkpoint"]).absolute()
# by default into the run that the checkpoint belongs to
AT_HOME = (RunPaths.from_checkpoint(CHECKPOINT) or RunPaths(Path("offline"))).root
HOME = near(config["output"] or AT_HOME)
NAME = CHECKPOINT.name
LOGS = f"{HOME}/logs/workflow"
TARGETS = [
    f"{HOME}/eval/{NAME}/{config['suite']}.json",
    f"{HOME}/export/{NAME}/{MODEL}",
]


rule eval_checkpoint:
    input:
        complete=ancient(str(CHECKPOINT / COMPLETE)),
    output:
        result=TARGETS[0],
    log:
        f"{LOGS}/eval_{NAME}_{config['suite']}.log",
    benchmark:
        f"{LOGS}/eval_{NAME}_{config['suite']}.tsv"
    retries: config["retries"]
    threads: 1
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        checkpoint=lambda wildcards, input: str(Path(input.complete).parent),
        suite=config["suite"],
        overrides=words(config["suites"].get(config["suite"], "")) + words(config["overrides"]),
    shell:
        "rlhpc eval --checkpoint {params.checkpoint:q} --suite {params.suite:q}"
        " --output {output.result:q} {params.overrides:q} > {log:q} 2>&1"


rule convert_checkpoint:
    input:
        complete=ancient(str(CHECKPOINT / COMPLETE)),
    output:
        model=TARGETS[1],
    log:
        f"{LOGS}/convert_{NAME}.log",
    benchmark:
        f"{LOGS}/convert_{NAME}.tsv"
    retries: config["retries"]
    threads: 1
    resources:
        mem_mb=8000,
        runtime=60,
    params:
        checkpoint=lambda wildcards, input: str(Path(input.complete).parent),
        folder=lambda wildcards, output: str(Path(output.model).parent),
    shell:
        "rlhpc convert --checkpoint {params.checkpoint:q} --output {params.folder:q} > {log:q} 2>&1"
