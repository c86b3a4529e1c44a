# The page about the run, and its curves as pictures of their own for `snakemake --report`.


rule report:
    input:
        *[evaluations_of(segment) for segment in range(len(ENDS))],
        final=final_evaluations,
        start=expand(EVALUATION, step=0, suite=SUITES) if BEFORE.evaluates_start else [],
        export=final_export,
        recording=final_recording,
    output:
        page=near(RUN.report),
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
            for name, title in KIND.reporting.curves.items()
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
