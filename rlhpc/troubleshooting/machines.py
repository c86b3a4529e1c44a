"""Causes on machines: accelerators, memory, network, processes, files, and Slurm."""

from __future__ import annotations

from rlhpc.troubleshooting.cause import Cause

#: Causes on one machine.
MACHINE_CAUSES = (
    Cause(
        "no-usable-gpu",
        "An accelerator was granted, or is configured, and cannot be used",
        (
            r"were granted, but cannot be used",
            r"has no visible accelerator",
            r"visible accelerator\(s\)",
            r"accelerators? .* does not exist",
            r"CUDA_VISIBLE_DEVICES",
            r"--accelerators is",
            r"no NVIDIA driver",
            r"CUDA driver version",
            r"DS_ACCELERATOR",
            r"how many GPUs the nodes|names all accelerators, and nodes of",
            r"no CUDA GPUs are available",
        ),
        "The configuration or Slurm says that this process has GPUs, but torch cannot use them: the job has fewer than "
        "cluster.accelerators_per_node, the environment has the CPU build of torch, or the driver is older than "
        "torch's CUDA.",
        "`nvidia-smi -L` inside the job lists what was granted; `rlhpc doctor` compares it with what torch sees.",
        "Ask for the GPUs that the placement names (cluster.accelerators_per_node, the site file), install the torch "
        "build that "
        "fits the driver, or train on CPUs with cluster.accelerators_per_node=0. rlhpc never continues silently on "
        "the CPU.",
        ("rlhpc doctor", "rlhpc plan CONFIG"),
        "how-to/slurm.md",
    ),
    Cause(
        "gpu-memory",
        "A GPU has run out of memory",
        (
            r"out of memory in a forward or backward pass",
            r"CUDA out of memory",
            r"OutOfMemoryError",
            r"KV cache",
            r"gpu_memory_utilization",
        ),
        "Weights, gradients, optimizer state, activations and the engine's KV cache together need more memory than "
        "the GPU has.",
        "`rlhpc plan CONFIG` prints every term by rank; the report's charts show the measured peak (memory/…).",
        "In this order: actor.model.gradient_checkpointing=true, a lower actor.max_tokens_per_micro_batch, LoRA, "
        "actor.training_backend=fsdp over more ranks, offloading; for the engine, a lower rollout.max_model_len.",
        ("rlhpc plan CONFIG", "rlhpc plan CONFIG --measure"),
        "explanation/memory.md",
    ),
    Cause(
        "planned-memory",
        "The plan says that memory does not suffice, so nothing was started",
        (r"memory does not suffice",),
        "The memory model adds up what each rank will hold and compares it with the GPU or the host before anything "
        "starts.",
        "The message lists the ranks and the largest terms; `rlhpc plan CONFIG` prints all of them.",
        "Change the largest term (see gpu-memory). If you know better than the model, start all the same with "
        "cluster.memory_check=warn.",
        ("rlhpc plan CONFIG", "rlhpc train CONFIG cluster.memory_check=warn"),
        "explanation/memory.md",
    ),
    Cause(
        "host-memory",
        "The host or /dev/shm has run out of memory",
        (
            r"does not fit into .* bytes",
            r"killed by signal 9",
            r"SIGKILL",
            r"signal 9",
            r"oom-kill",
            r"Cannot allocate memory",
            r"MemoryError",
            r"has .* (shared memory|/dev/shm)",
            r"needs about .* (GiB|MiB)",
        ),
        "The kernel kills the process with the most memory when a job's cgroup or the host is full; payloads between "
        "ranks of a "
        "host lie in /dev/shm, which counts as memory.",
        "`dmesg` or `sacct -j JOB --format=JobID,MaxRSS,State` shows OUT_OF_MEMORY; `rlhpc status RUN` shows shared "
        "memory in use.",
        "Ask for more memory (cluster.mem of the site or the configuration), use fewer environments or a smaller "
        "replay buffer, "
        "or spread the ranks over more nodes. `rlhpc clean` removes what killed runs left in /dev/shm.",
        ("rlhpc status RUN", "rlhpc clean"),
        "how-to/administer.md",
    ),
    Cause(
        "file-limit",
        "The process may not open enough files",
        (r"a process may open", r"Too many open files", r"limit on the size of a file"),
        "Each rank keeps sockets and files open; the shell's limit (ulimit) is lower than the run needs.",
        "`ulimit -n` (open files) and `ulimit -f` (size of a file) print the limits.",
        "Raise the limit in the shell that starts the run, or have it raised in limits.conf.",
        ("ulimit -n 65536",),
    ),
    Cause(
        "not-readable",
        "A file or folder cannot be read or written",
        (
            r"Permission denied|Operation not permitted|Errno (13|1|30)\]",
            r"Read-only file system|is read-only|on a read-only filesystem",
            r"is not writable",
            r"it cannot be looked at|Input/output error",
            r"(written|saved|made|write .*): (Not a directory|Is a directory|File exists)",
        ),
        "The path exists, but this process may not read or write it, or it lies on a read-only or unreachable "
        "filesystem.",
        "`ls -ld PATH` and `touch PATH/x` on the node that reported it: compute nodes may see other mounts than the "
        "login node.",
        "Correct the path or its permissions, or choose another folder (runner.run_dir, cluster.scratch, --output).",
        ("rlhpc doctor --folder FOLDER",),
        "how-to/administer.md",
        weak_patterns=(
            r"cannot be (read|written)(?! as)",
            r"cannot be opened",
            r"cannot make the registry folder",
            r"choose another place",
            r"cannot make .*: ",
        ),
    ),
    Cause(
        "folder-removed",
        "A folder of a run was removed while the run used it",
        (
            r"was removed while",
            r"others (of this run )?go on removing it",
            r"others go on removing them",
            r"has been removed",
            r"Stale file handle",
            r"working directory has been removed",
        ),
        "Somebody or a clean-up job removed the run folder, its registry or the working directory. On NFS this "
        "appears as a stale "
        "file handle.",
        "`ls -la RUN` and the run's logs; scratch filesystems often delete files by age.",
        "Put the folder back from a copy or start again elsewhere; keep runs on a filesystem without automatic "
        "deletion "
        "(runner.run_dir).",
        ("rlhpc status RUN",),
        "reference/run-folder.md",
    ),
    Cause(
        "disk-full",
        "A disk or a quota is full",
        (
            r"No space left",
            r"Disk quota exceeded",
            r"quota on the filesystem",
            r"is full",
            r"make room",
            r"Make room",
            r"could not be (written|saved)",
            r"nothing was written to",
            r"was written, and is gone or of another size",
            r"cannot write ",
            r"could not be deleted",
            r"then continue (with|from)",
            r"cannot make .* on node",
        ),
        "A file of the run (metrics, log, checkpoint, page) could not be written. Nothing that was reported as saved "
        "is lost.",
        "The message names the filesystem and its free space; `df -h RUN` and your site's quota command (often `quota "
        "-s`) do, too.",
        "Make room, keep fewer checkpoints (runner.keep_checkpoints), or move runs to a larger filesystem with "
        "runner.run_dir. "
        "Then go on from the last checkpoint.",
        ("df -h .", "rlhpc train CONFIG runner.resume_dir=auto"),
        "how-to/resume.md",
    ),
    Cause(
        "private-folder",
        "A folder is open to others, or belongs to somebody else",
        (
            r"can be read by others",
            r"belongs to .*, not to",
            r"belongs to another user",
            r"can be written by (everybody|others)",
            r"keys that others can read",
            r"is a link that",
            r"is a link to nothing",
            r"is no folder: remove it",
            r"sticky bit",
            r"rlhpc makes it itself and uses no other",
            r"a driver of another user",
            r"only the user whose run it is",
            r"is said to be at .*, which is no UNIX socket",
            r"jobs are not yours to cancel",
            r"only they can see",
        ),
        "Keys of the run lie in its folder. rlhpc refuses a folder that another user could exchange or read, because "
        "that user "
        "could join or alter the run.",
        "`ls -ld FOLDER` shows owner and mode; the message names both.",
        "Remove the folder or close it (chmod 700), choose another runner.name or runner.run_dir, and use a "
        "filesystem that keeps "
        "permissions.",
        ("chmod 700 FOLDER", "ls -ld FOLDER"),
        "how-to/administer.md",
        weak_patterns=(r"is open to others",),
    ),
    Cause(
        "stranger",
        "A process that is not of the run has connected",
        (r"did not prove to be of this run", r"stranger"),
        "Ranks prove with the run's keys that they belong together. The process at the other end did not: it may be "
        "another user's, "
        "or a rank of an earlier start.",
        "The message names node and ports. The stranger got nothing.",
        "Start the run again (it goes on from its last checkpoint). If it happens again, tell the administrators: "
        "somebody scans "
        "ports on the nodes.",
        ("rlhpc train CONFIG runner.resume_dir=auto",),
        "explanation/architecture.md",
    ),
    Cause(
        "stale-process",
        "A process of an earlier start of the run was refused",
        (
            r"generation .* was replaced",
            r"carries generation",
            r"is from an earlier (attempt|start)",
            r"registry .* was removed",
            r"has begun anew since",
            r"was restarted before it had written",
        ),
        "Each start of a run is a generation. A process that wakes up late, after a requeue or on a stalled node, may "
        "no longer "
        "take part: that protects the checkpoints.",
        "`rlhpc status RUN` shows the current start; the refused process is of the one before.",
        "Nothing, if the run goes on. If nothing of it is alive, start it again.",
        ("rlhpc status RUN",),
        "how-to/resume.md",
    ),
    Cause(
        "second-driver",
        "Another process trains this run already",
        (
            r"one run, one driver",
            r"is being (trained|recorded) by",
            r"another process has been submitting",
            r"is running already",
        ),
        "A run folder has one driver at a time. The name is taken by a run that is alive, or a submission has not "
        "finished.",
        "The message names process, host and job; `rlhpc status RUN` shows the state.",
        "Wait for it, cancel it, or give the new run another name.",
        ("rlhpc status RUN", "rlhpc cancel RUN", "rlhpc train CONFIG runner.name=OTHER"),
        "how-to/resume.md",
    ),
    Cause(
        "rendezvous",
        "Ranks did not arrive in time at the start",
        (
            r"never arrived",
            r"never appeared",
            r"to form their process group",
            r"no rank can join group",
            r"before a rank could join",
            r"driver has not said where it is",
            r"its driver does not answer",
            r"did not start within",
            r"while it started",
        ),
        "A rank of a group did not register within the start's deadline: its imports are slow (a cold shared "
        "filesystem), its model "
        "loads slowly, its node is not reachable, or it died.",
        "The message names ranks, nodes and logs; `rlhpc status RUN` shows in which phase of the start each rank is.",
        "Read the log of the missing rank. If it was only slow, start again: the second start finds the files in the "
        "cache. Put "
        "the environment and the model on a faster filesystem.",
        ("rlhpc logs RUN --group GROUP --rank N", "rlhpc status RUN", "rlhpc doctor"),
        "explanation/performance.md",
    ),
    Cause(
        "network",
        "Ranks cannot reach each other",
        (
            r"cannot reach",
            r"could not connect to the others",
            r"finds no way to",
            r"cluster\.interface",
            r"Slurm names no node",
            r"died or is out of reach",
            r"listens on no TCP port",
            r"listens to processes of (that|its own) host only",
            r"found no free port",
            r"cannot open a connection",
            r"mailbox to",
            r"driver cannot be reached",
            r"Connection (refused|reset|timed out)",
        ),
        "A connection between nodes failed: the interface that was chosen does not lead to the other nodes, a "
        "firewall closes it, or "
        "the process at the other end died.",
        "`rlhpc doctor` tries a connection and a collective between nodes; the first failed rank's log often has the "
        "true cause.",
        "Name the interface that the nodes share (cluster.interface=ib0), and look at the first failure, not at those "
        "that follow.",
        ("rlhpc doctor --nodes 2", "rlhpc logs RUN --group driver"),
        "how-to/slurm.md",
        weak_patterns=(
            r"NCCL",
            r"[Gg]loo",
        ),
    ),
    Cause(
        "rank-lost",
        "A rank died, or has gone silent",
        (
            r"\[[^]]*\] on node",
            r"process was started with",
            r"heartbeat",
            r"has not been heard",
            r"the fork server",
            r"was killed and is still there",
            r"job step of .* ended",
            r"has ended by itself",
            r"ended, and (both are|it is) one engine",
            r"has ended, and",
            r"all (rollout )?ranks of .* ended",
            r"another group failed",
            r"the process behind .* died",
            r"died while this one waited",
            r"has lost its home",
            r"lost .* in an update of weights",
            r"has left the (group|run)",
            r"session ended while it waited",
            r"ended with .* and no answer",
            r"failed: .*\n?\(log:",
            r"run .* failed: ",
            r"process ended with code",
            r"first failure",
        ),
        "A worker process ended: an exception in it, a signal (9 is usually the kernel's memory killer, 11 a crash in "
        "native code), or no "
        "sign of life for a long time. All other errors of the run follow from the first.",
        "The message ends with the log of the rank; its last lines have the traceback.",
        "Fix what the traceback says. If a node failed, start the run again: it goes on from its last checkpoint; "
        "rollout and "
        "environment ranks are restarted by themselves where the configuration allows it.",
        ("rlhpc logs RUN --group GROUP --rank N", "rlhpc train CONFIG runner.resume_dir=auto"),
        "how-to/resume.md",
        weak_patterns=(
            r"Signals\.",
            r"a session that is",
            r"could not be called",
        ),
    ),
    Cause(
        "step-timeout",
        "A step, an evaluation or a message did not come within its deadline",
        (
            r"runner\.step_timeout_s",
            r"waited .* s ",
            r"not whole after",
            r"was not told of weights",
            r"at its deadline",
            r"has not ended (within|after)",
            r"did not end within",
            r"no (groups|returns) came",
            r"did not end in time",
            r"has locked",
            r"a message was forgotten",
            r"was not made in",
            r"was not finished within",
        ),
        "Every wait has a deadline, so that a run never hangs. Somebody that was waited for is slow, stuck or dead.",
        "The message says for whom it waited; `rlhpc status RUN` and that rank's log say what it does.",
        "If the work really takes so long, raise runner.step_timeout_s; else look for a stuck simulator, reward or "
        "tool.",
        ("rlhpc logs RUN --group GROUP --rank N", "rlhpc train CONFIG runner.step_timeout_s=3600"),
        "explanation/performance.md",
        weak_patterns=(r"did not reach",),
    ),
    Cause(
        "clock-skew",
        "The clocks of the nodes differ",
        (r"clocks?\b.*(differ|ahead|behind)", r"clock skew", r"whose clock is behind", r"is from the future"),
        "Times in files of different nodes are compared; clocks that differ by seconds make a live run look silent.",
        "`rlhpc doctor` compares the clocks; `chronyc tracking` shows the offset of a node.",
        "Have the administrators repair time synchronisation (chrony or ntpd) on the node that the message names.",
        ("rlhpc doctor",),
        "how-to/administer.md",
    ),
)

#: Causes with Slurm and Snakemake.
SLURM_CAUSES = (
    Cause(
        "walltime",
        "The time of the job is too short",
        (r"cluster\.time", r"no walltime", r"no step has room", r"DUE TO TIME LIMIT"),
        "A job must have time for its start, for at least one step, and for saving before the walltime ends.",
        "`rlhpc plan CONFIG` prints the job's time and the part that is kept for saving.",
        "Give more time (cluster.time=8:00:00), or cut the run into segments (runner.segments): each is a job of its "
        "own.",
        ("rlhpc plan CONFIG", "rlhpc submit CONFIG cluster.time=8:00:00"),
        "how-to/slurm.md",
        weak_patterns=(r"TIMEOUT",),
    ),
    Cause(
        "stale-allocation",
        "The shell has Slurm variables of another or a finished job",
        (
            r"SLURM_JOB_ID is",
            r"SLURM_HET_SIZE",
            r"SLURM_JOB_NODELIST",
            r"cannot read the host list|the host list .* names more",
            r"write counts as",
            r"in the host list",
        ),
        "rlhpc reads Slurm's variables to find its nodes. This shell has those of a job that is over or on other "
        "hosts.",
        "`env | grep SLURM_` prints them; `squeue --me` lists your jobs.",
        "Unset them to train on this machine, or go into a new allocation with salloc.",
        ("unset SLURM_JOB_ID SLURM_JOBID SLURM_JOB_NODELIST", "salloc …"),
        "how-to/slurm.md",
    ),
    Cause(
        "slurm-silent",
        "Slurm does not answer, or has forgotten the job",
        (
            r"Slurm does not answer",
            r"scontrol ping",
            r"squeue does not say",
            r"asks Slurm, and there is no sbatch",
            r"there is no s(batch|run|acct)",
            r"sacct knows nothing",
            r"cannot start srun",
            r"had no Slurm jobs",
            r"Slurm does not know",
            r"scancel .* failed",
            r"Unable to contact slurm",
        ),
        "The controller (slurmctld) or the accounting database did not answer in time, the command is not on this "
        "machine, or the job is older than "
        "the records that Slurm keeps.",
        "`scontrol ping`, `squeue --me`, `sacct -j JOB`; `rlhpc doctor` tries each.",
        "Wait and repeat the command: it attaches to the job that exists. Off the cluster, use rlhpc train instead.",
        ("scontrol ping", "rlhpc doctor", "rlhpc status RUN"),
        "how-to/slurm.md",
    ),
    Cause(
        "queue-full",
        "The queue does not take more jobs, or the job waits",
        (
            r"waits for room",
            r"queue is full",
            r"QOSMax",
            r"MaxJobCount",
            r"will never be let in",
            r"s for room",
            r"AssocGrp",
            r"MaxSubmit",
            r"one job takes",
        ),
        "A limit of the account, QOS or partition keeps the job out. rlhpc tries again with growing pauses instead of "
        "failing.",
        "`squeue --me --start` and the reason that `rlhpc status RUN` prints; `sacctmgr show qos` lists limits.",
        "Wait, ask for another QOS (cluster.qos) or partition, or for fewer node groups: each component of a "
        "heterogeneous job "
        "counts. `rlhpc plan CONFIG --when` estimates the start.",
        ("rlhpc status RUN", "rlhpc plan CONFIG --when"),
        "how-to/slurm.md",
    ),
    Cause(
        "slurm-refused",
        "Slurm refused the job",
        (
            r"sbatch",
            r"srun said",
            r"submitit",
            r"Batch job submission failed",
            r"Invalid (account|partition|qos|feature)",
            r"Requested node configuration is not available",
            r"could not be submitted",
            r"not submitted",
            r"cannot start .* on",
            r"needs a job step",
        ),
        "sbatch or srun rejected the request: an account, partition, QOS or constraint that does not exist, or more "
        "than a node has.",
        "The message ends with Slurm's own words; `rlhpc plan CONFIG` prints the directives that are sent.",
        "Correct the site file (account, partition, gres) or the sizes in the configuration, and submit again.",
        ("rlhpc plan CONFIG", "rlhpc doctor", "sinfo -o '%P %G %c %m %l'"),
        "how-to/slurm.md",
    ),
    Cause(
        "preempted",
        "The run was cancelled, preempted, or asked to end",
        (
            r"was cancelled",
            r"asked to end",
            r"was asked to end from elsewhere",
            r"PREEMPTED",
            r"NODE_FAIL",
            r"ended without a result",
            r"stopped waiting",
            r"goes on from there",
            r"was killed by",
            r"submit the run again",
            r"has not ended .* later",
            r"is finished, but",
            r"cancel it from there",
        ),
        "A signal ended the job: scancel, preemption, a node failure, or Ctrl-C. The run saves first if it gets the "
        "time.",
        "`rlhpc status RUN` has the state and the last checkpoint; `sacct -j JOB` says who ended it.",
        "The same command goes on from the last checkpoint: rlhpc submit, rlhpc run, or rlhpc train with "
        "runner.resume_dir=auto.",
        ("rlhpc status RUN", "rlhpc submit CONFIG", "rlhpc train CONFIG runner.resume_dir=auto"),
        "how-to/resume.md",
        weak_patterns=(
            r"interrupted",
            r"ended as ",
        ),
    ),
    Cause(
        "foreign-job",
        "A record in the run folder names a job or process that is not this run's",
        (r"it was left alone",),
        "The run folder was moved or copied, so its records name jobs or processes of other runs. They are never "
        "cancelled.",
        "`squeue -j JOB -o '%i %j %u'` shows the job's name and owner.",
        "Cancel by hand if it is yours; else remove submit/ and .driver.json from the copied folder.",
        ("scancel JOB",),
        "reference/run-folder.md",
    ),
    Cause(
        "site-file",
        "The site file is missing or has keys of a run",
        (r"site file", r"no site ", r"belongs to a run, not to a site", r"says where, not what", r"--profile is"),
        "A site file describes the cluster (partition, account, GPUs of a node); a profile describes Snakemake's "
        "executor.",
        "`RLHPC_SITE` or --site names the file; the message lists the names that exist.",
        "Write one for your cluster from configs/site/, and name it in RLHPC_SITE.",
        ("rlhpc doctor", "export RLHPC_SITE=NAME"),
        "how-to/administer.md",
    ),
    Cause(
        "node-groups",
        "Nodes, node groups or het components do not fit",
        (
            r"node groups have different Pythons",
            r"node_groups?",
            r"het_component",
            r"node_ranks",
            r"nodes of .* do not follow",
            r"launcher is",
            r"executor: found",
            r"node .* is not this machine",
            r"nodes? 0 to|--nodes|--partitions",
        ),
        "cluster.node_groups or cluster.num_nodes says something else than the allocation has.",
        "`rlhpc plan CONFIG` prints the components with their nodes.",
        "Make cluster.num_nodes and the groups' num_nodes agree with the job, and count het_component from 0.",
        ("rlhpc plan CONFIG",),
        "how-to/slurm.md",
        weak_patterns=(r"num_nodes",),
    ),
    Cause(
        "placement",
        "cluster.component_placement breaks a rule",
        (
            r"rule:",
            r"component_placement",
            r"PlacementStrategy",
            r"process ranks",
            r"resource ranks",
            r"resource .* does not exist",
            r"a range runs upwards",
            r"not a rank|more than one ':'|ranks are missing|more than a million processes",
            r"placed on accelerator",
            r"placed twice",
            r"one count must divide the other",
            r"resources do not divide",
            r"no placement",
            r"whole number of engines",
            r"node .* does not exist",
            r"ranks? cannot share",
            r"no such component",
            r"each process has .*s, and",
            r"'all' stands for",
            r"keys are node_group and placement",
            r"accelerators .* lie on nodes",
        ),
        "The placement maps worker groups to accelerators or nodes: `actor,rollout: 0-7`, or `env: {node_group: cpu, "
        "placement: 0-3}`.",
        "The message names component, text and rule; `rlhpc plan CONFIG` draws the grid of nodes, GPUs and ranks.",
        "Write resource ranks that exist, ascending and unique, and counts of which one divides the other.",
        ("rlhpc plan CONFIG",),
        "how-to/slurm.md",
        weak_patterns=(
            r"^\W*there is no \S+$",
            r"write ranks",
        ),
    ),
    Cause(
        "workflow",
        "Snakemake or a sweep stopped",
        (
            r"Snakemake",
            r"snakemake",
            r"\bsweep\b",
            r"runs? .* both prepare",
            r"a mapping of keys to values",
            r"write a list of values",
            r"combinations",
            r"two runs would have the name",
            r"grid and list|grid, a list or seeds",
            r"metric's name",
            r"the list is empty",
            r"seeds in one of the two",
            r"write the whole key before",
        ),
        "The workflow runs training segments, evaluations and reports as rules; a sweep is a folder of such runs.",
        "The end of logs/workflow/snakemake.log in the run or sweep folder names the failed rule and its log.",
        "Correct what the rule's log says and repeat the command: finished rules are not run again.",
        ("rlhpc status FOLDER", "rlhpc run CONFIG"),
        "how-to/sweep.md",
        weak_patterns=(
            r"no limit",
            r"sweeps",
            r"is there twice",
            r"it is .*; use letters",
        ),
    ),
    Cause(
        "elastic",
        "Helper jobs or joining ranks were refused",
        (
            r"cluster\.elastic",
            r"joins? (a|this|the) run",
            r"joins a run there",
            r"another rlhpc than the run's",
            r"groups of this run that can be scaled",
            r"no driver of this run is at work",
            r"ranks that the run starts with",
            r"no place in a run",
            r"ranks from jobs of their own",
            r"min \(.*\) takes .* jobs",
            r"must be at least min",
            r"another entry for it",
            r"This run has no group|is no driver",
        ),
        "Ranks from separate jobs can join a live run where the configuration allows it (cluster.elastic), with the "
        "same rlhpc and "
        "as the same user.",
        "`rlhpc status RUN` lists helper jobs and ranks that joined or left.",
        "Start the run with cluster.elastic, activate the run's environment, and join while it trains.",
        ("rlhpc join RUN", "rlhpc scale RUN GROUP=N"),
        "how-to/join-a-run.md",
        weak_patterns=(r"join here",),
    ),
)
