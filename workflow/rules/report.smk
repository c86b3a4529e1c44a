# The run's page, and the single plots for `snakemake --report`.
rule report_page:
    input:
        evaluations,
        exported,
    output:
        report(
            REPORT,
            caption="../report/page.rst",
            category="Run",
            labels={"page": "report"},
        ),
    log:
        f"{ROOT}/logs/workflow/report.log",
    benchmark:
        f"{ROOT}/logs/workflow/report.tsv"
    conda:
        ENVIRONMENT
    params:
        root=lambda w, output: Path(output[0]).parents[1],
    shell:
        "rlhpc report {params.root} &> {log}"


rule curves:
    input:
        REPORT,
    output:
        report(
            expand(
                f"{ROOT}/report/curves/{{plot}}.svg",
                plot=[
                    "return_vs_env_steps",
                    "return_vs_time",
                    "evaluation",
                    "time_per_phase",
                ],
            ),
            caption="../report/curves.rst",
            category="Curves",
        ),
    log:
        f"{ROOT}/logs/workflow/curves.log",
    benchmark:
        f"{ROOT}/logs/workflow/curves.tsv"
    conda:
        ENVIRONMENT
    params:
        root=lambda w, output: Path(output[0]).parents[2],
        folder=lambda w, output: Path(output[0]).parent,
    shell:
        "rlhpc report {params.root} --curves {params.folder} &> {log}"
