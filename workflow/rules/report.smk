# The page about the run, and its curves as pictures of their own for `snakemake --report`.
EMBODIED_CURVES = {
    "return_vs_env_steps": "Return over experience",
    "return_vs_time": "Return over wall time",
    "evaluation": "Evaluation per checkpoint",
    "policy_loss": "Policy loss",
    "value_loss": "Value loss",
    "entropy": "Entropy",
    "kl": "Policy change per update",
    "throughput": "Environment steps per second",
    "time_per_phase": "Time per phase",
}
OFF_POLICY_CURVES = {
    **{name: title for name, title in EMBODIED_CURVES.items() if name not in ("policy_loss", "value_loss", "kl")},
    "q_loss": "Critics' loss",
    "actor_loss": "Actor's loss",
    "alpha": "Temperature",
}
OTHER_CURVES = {**LANGUAGE_CURVES, "bc": IMITATION_CURVES, "off_policy": OFF_POLICY_CURVES}
CURVES = OTHER_CURVES.get(CFG.runner.task_type.lower(), EMBODIED_CURVES)


rule report:
    input:
        *[evaluations_of(segment) for segment in range(len(ENDS))],
        start=expand(EVALUATION, step=0, suite=SUITES) if CFG.workflow.eval_start else [],
        export=final_export,
        recording=final_recording,
    output:
        page=f"{ROOT}/report/index.html",
        alone=report(
            f"{ROOT}/report/curves/page.html",
            caption="../report/page.rst",
            category="Run",
            labels={"run": CFG.runner.name},
        ),
        curves=[
            report(
                f"{ROOT}/report/curves/{name}.svg",
                caption="../report/curves.rst",
                category="Curves",
                labels={"run": CFG.runner.name, "curve": title},
            )
            for name, title in CURVES.items()
        ],
    log:
        f"{LOGS}/report.log",
    benchmark:
        f"{LOGS}/report.tsv"
    localrule: True
    params:
        run=lambda wildcards, output: str(Path(output.page).parents[1]),
        curves=lambda wildcards, output: str(Path(output.curves[0]).parent),
    shell:
        "rlhpc report {params.run:q} --curves {params.curves:q} > {log:q} 2>&1"
