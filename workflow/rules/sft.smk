# The SFT run that comes before RL: trained and exported as any other run, in a folder of its own.
SFT_CONFIG, SFT_CFG = SFT
SFT_RUN = RunPaths.from_run_dir(SFT_CFG.runner.run_dir, SFT_CFG.runner.name)
SFT_ROOT = near(SFT_RUN.root)
SFT_FOLDER = checked(sft_export, RUN_CONFIG, CFG, SFT)
SFT_EXPORT = near(SFT_FOLDER / MODEL)
SFT_OVERRIDES = BEFORE.sft[1]


if makes("sft"):

    rule sft:
        input:
            config=ancient(SFT_CONFIG),
            plan=ancient(f"{WORK}/plan.txt"),
        output:
            done=f"{SFT_ROOT}/workflow/{segment_name(0)}.json",
        log:
            f"{LOGS}/sft.log",
        benchmark:
            f"{LOGS}/sft.tsv"
        priority: PRIORITY
        retries: config["retries"]
        localrule: True
        resources:
            attempt=which_try,
            training=1,
        params:
            executor=executor,
            marker=near(SFT_RUN.segment_done(0)),
            site=SITE_OPTION,
            overrides=Untracked(*SFT_OVERRIDES),
            training=training_fingerprint(SFT_CFG),
        shell:
            "rlhpc submit {input.config:q} --segment 0 --executor {params.executor}"
            " --attempt {resources.attempt} --asked-by $PPID"
            " {params.site} {params.overrides} 2>&1 > /dev/null | tee --ignore-interrupts {log:q}"
            " && cp --preserve=timestamps {params.marker:q} {output.done:q}"

    rule convert_sft:
        input:
            done=rules.sft.output.done,
        output:
            model=SFT_EXPORT,
        log:
            f"{LOGS}/convert_sft.log",
        benchmark:
            f"{LOGS}/convert_sft.tsv"
        retries: config["retries"]
        threads: CFG.workflow.convert_job.cpus
        resources:
            **CONVERT_RESOURCES,
        params:
            rlhpc=RLHPC,
            run=SFT_ROOT,
            folder=near(SFT_FOLDER),
        shell:
            # Which step is chosen (`runner.keep_best`, or an early end) is known once the run has ended.
            "{params.rlhpc} convert --run {params.run:q} --output {params.folder:q} > {log:q} 2>&1"
