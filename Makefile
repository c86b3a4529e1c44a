# What a newcomer types. Everything else is `rlhpc --help` and `snakemake --help`.
SHELL := /bin/bash
# Empty: .venv, and all that the tests need. EXTRAS=dev: another environment, .venv-dev, with these extras and nothing else.
EXTRAS ?=
comma := ,
VENV  := .venv$(if $(EXTRAS),-$(subst $(comma),-,$(EXTRAS)))
BIN   := $(VENV)/bin
STAMP := $(VENV)/.setup-done
RUN   ?= configs/quickstart.yaml
PYTEST_ARGS ?=
BENCH_ARGS ?=
# Two more than two cores can run: a third of the tests' time is waiting. Each that tests on Slurm brings one up.
WORKERS ?= $(shell [ "$$(getconf _NPROCESSORS_ONLN)" -gt 1 ] && echo 4 || echo 0)
KILLS ?= 30
EVENTS ?= 100
RANKS ?= 64
ENDS  ?= 20
RUNS  ?= 50
SEED  ?= 1
SEEDS ?= 3
PART  ?= 1/1
LONG  ?= 1/10
ONLY  ?=

# One thread a process: ranks share the cores, so more only makes them wait for each other.
export OMP_NUM_THREADS ?= 1
export PATH := $(CURDIR)/$(BIN):$(PATH)

# Pythons beside that of $(VENV), each with the packages of its file in envs/: some exclude those of another.
PYTHONS := agents crate lerobot libero loggers metaworld mjlab simulators verifiers

.PHONY: help setup setup-llm setup-robot setup-system setup-tests $(PYTHONS:%=setup-%) quickstart demo-llm demo-agent demo-robot demo-hil demo-vla test test-changed test-gpu test-slurm test-slurm-24 test-slurm-26 test-slurm-apptainer test-all combinations families demo-families filesystems chaos chaos-helpers chaos-scale leftovers rlinf-sample attack bad-inputs lint bench bench-gpu gallery docs docs-reference constraints resolve clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## the environment in .venv, once

$(STAMP): pyproject.toml envs/constraints.txt envs/setup.sh
	$(if $(EXTRAS),RLHPC_EXTRAS=$(EXTRAS)) bash envs/setup.sh $(VENV)
	@touch $@

setup-llm: $(VENV)/.setup-llm  ## what language models need on top: transformers, vLLM, DeepSpeed

$(VENV)/.setup-llm: $(STAMP)
	RLHPC_EXTRAS=all bash envs/setup.sh $(VENV)
	@touch $@

setup-robot: $(VENV)/.setup-robot  ## what robots need on top: ManiSkill, MuJoCo, Box2D, films

$(VENV)/.setup-robot: $(STAMP)
	RLHPC_EXTRAS=dev,slurm,embodied bash envs/setup.sh $(VENV)
	@touch $@

setup-tests: $(VENV)/.setup-tests  ## what make test needs: setup-llm, setup-system, and setup-* of each other Python

$(VENV)/.setup-tests: $(VENV)/.setup-llm $(PYTHONS:%=$(VENV)-%/.setup-done)
	@touch $@

setup-system:  ## what the tests need of Debian: Mesa, Slurm, sshd, bubblewrap, a compiler (as root; says what is missing otherwise)
	@bash tests/install.sh

$(PYTHONS:%=setup-%): setup-%: $(VENV)-%/.setup-done

$(VENV)-%/.setup-done: envs/%.txt | $(STAMP)
	[ -x $(@D)/bin/python ] || $(BIN)/python -m venv --without-pip $(@D)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(@D)/bin/python -r $<
	@touch $@

# Whatever interpreter the rest has: lerobot 0.4.4 and its pins are for 3.11.
$(VENV)-lerobot/.setup-done: envs/lerobot.txt | $(STAMP)
	RLHPC_EXTRAS=slurm bash envs/setup.sh $(VENV)-lerobot
	$(BIN)/uv pip install --python $(VENV)-lerobot/bin/python --no-deps --compile-bytecode -r envs/lerobot.txt
	@touch $@

# With setuptools, which some of its packages are built with.
$(VENV)-libero/.setup-done: envs/libero.txt | $(STAMP)
	[ -x $(@D)/bin/python ] || $(BIN)/python -m venv $(@D)
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python -r $<
	@touch $@

$(VENV)-metaworld/.setup-done: envs/metaworld.txt | $(STAMP)
	RLHPC_EXTRAS=slurm bash envs/setup.sh $(VENV)-metaworld
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python -r $<
	@touch $@

# Beside rlhpc's packages: runs of mjlab and of MJX simulate in the actor's process.
$(VENV)-mjlab/.setup-done: envs/mjlab.txt | $(STAMP)
	RLHPC_EXTRAS=slurm bash envs/setup.sh $(VENV)-mjlab
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python --overrides envs/overrides-cpu.txt -r $<
	@touch $@

$(VENV)-simulators/.setup-done: envs/simulators.txt envs/gym-hil.txt | $(STAMP)
	RLHPC_EXTRAS=slurm bash envs/setup.sh $(VENV)-simulators
	$(BIN)/uv pip install --python $(@D)/bin/python -r envs/simulators.txt
	$(BIN)/uv pip install --python $(@D)/bin/python --no-deps -r envs/gym-hil.txt
	@touch $@

quickstart: setup  ## train, evaluate, export and report a first policy (RUN=configs/….yaml for another)
	rlhpc run $(RUN)

test: setup-system $(if $(EXTRAS),setup,setup-tests)  ## the tests, with all that they need (WORKERS=0: in one process; PYTEST_ARGS=… for some; LONG=1/1: all long ones; EXTRAS=dev: in the smallest environment)
	RLHPC_TESTS_LONG=$(LONG) pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Fewer processes than for all: each imports what it tests, which takes longer than the tests.
test-changed: WORKERS = $(shell [ "$$(getconf _NPROCESSORS_ONLN)" -gt 1 ] && echo 2 || echo 0)
test-changed: setup  ## the tests of a change, in two minutes (BASE=main: of what differs from it; default: uncommitted changes, else the last commit)
	python -m tests.changed $(if $(BASE),--base $(BASE)) -n $(WORKERS) $(PYTEST_ARGS)

demo-llm: setup-llm  ## a language model from nothing: SFT, then GRPO, at three seeds (SEEDS=1 for one)
	python -m bench.demo_llm --seeds $(SEEDS)

demo-agent: setup-llm  ## a tiny model learns to search, by SFT, then GRPO, with controls (SEEDS=1 for one seed)
	python -m bench.demo_agent --seeds $(SEEDS)

demo-robot: setup-robot  ## a robot arm pushes a cube: demonstrations, a policy from them, evaluation, a film
	rlhpc run configs/embodied/push_cube_bc.yaml runner.name=demo_robot env.eval.video_episodes=4

demo-hil: setup-robot setup-simulators  ## a robot arm learns to pick a cube while a script helps it, and without help; a film (SEEDS=1 for one seed)
	python -m bench.demo_hil --seeds $(SEEDS)

demo-vla: setup-robot  ## a flow policy swings a pole up: weak demonstrations, a clone, PPO, PPO alone, films (SEEDS=1 for one seed)
	python -m bench.demo_vla --seeds $(SEEDS)

SLURM_FILES ?= tests/slurm
test-slurm: WORKERS = $(shell [ "$$(getconf _NPROCESSORS_ONLN)" -gt 1 ] && echo 2 || echo 0)
test-slurm: setup  ## the tests on a real Slurm each worker brings up (tests/slurm/install.sh installs it)
	pytest -m slurm -n $(WORKERS) --dist worksteal $(SLURM_FILES) $(PYTEST_ARGS)

# What another version of Slurm has to show: a het job with its evaluation, a requeue, a cancelled run, helpers, a rank that is
# given up, options of srun in each step with clocks that disagree, the doctor with its faults, and all queries. SLURM_TESTS=tests/slurm takes all.
SLURM_TESTS ?= $(addprefix tests/slurm/, test_training.py::test_accounting_that_fails_half_the_time \
	test_accounting.py::test_roles_and_components_of_a_requeued_run test_training.py::test_every_rank_sees_its_own_part \
	test_elastic.py::test_one_that_waits_for_rollouts_gets_more_ranks test_given_up_rank.py test_doctor.py::test_a_good_cluster \
	test_doctor_nodes.py test_step_options.py test_user_environment.py)

test-slurm-24 test-slurm-26: WORKERS = $(shell [ "$$(getconf _NPROCESSORS_ONLN)" -gt 1 ] && echo 2 || echo 0)
test-slurm-24: setup  ## some of them on Slurm 24.11 (SLURM_TESTS=tests/slurm for all), in a root of Debian 13
	bash tests/slurm/roots.sh trixie $(CURDIR)/$(BIN)/python -m pytest -m slurm -n $(WORKERS) --dist worksteal $(SLURM_TESTS) $(PYTEST_ARGS)

test-slurm-26: setup  ## some of them on Slurm 26.05, in a root of Debian 14
	bash tests/slurm/roots.sh forky $(CURDIR)/$(BIN)/python -m pytest -m slurm -n $(WORKERS) --dist worksteal $(SLURM_TESTS) $(PYTEST_ARGS)

test-slurm-apptainer: setup  ## ranks in Apptainer's containers, on Slurm 26.05, in a root of Debian sid
	bash tests/slurm/image.sh $${RLHPC_SLURM_ROOTS:-/var/cache/rlhpc-slurm}/image
	bash tests/slurm/roots.sh sid $(CURDIR)/$(BIN)/python -m pytest -m slurm tests/slurm/test_containers.py $(PYTEST_ARGS)

test-gpu: setup-llm  ## the tests on an accelerator (RLHPC_TEST_DEVICE=cpu shows without one that they run)
	RLHPC_TEST_DEVICE=$${RLHPC_TEST_DEVICE:-accelerator} pytest -m gpu $(PYTEST_ARGS)

test-all: setup  ## all of what make test takes a part of (SEED=…, PART=k/n)
	RLHPC_TESTS_SEED=$(SEED) RLHPC_TESTS_PART=$(PART) RLHPC_TESTS_LONG=$(PART) pytest -m "(drawn or long) and not gpu and not slurm" -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)
	python -m tests.attack.bad_inputs --seed $(SEED) --part $(PART)

combinations: setup-llm  ## options in combination, pairwise: each row is trained, resumed and compared (SEED=…, PART=k/n; hours for all)
	python -m tests.combinations --seed $(SEED) --part $(PART)

families: setup-llm  ## the table of model families: each cell by a test, all families (ONLY="lfm2 qwen3_5_text" computes and writes these anew)
	$(if $(ONLY),python -m tests.families $(ONLY),RLHPC_FAMILIES=all pytest -n $(WORKERS) --dist loadgroup tests/families $(PYTEST_ARGS))

demo-families: setup-llm  ## tiny models of two hybrid and two mixture families: SFT, then GRPO, with held-out rewards (SEEDS=1 for one seed)
	python -m bench.demo_families --seeds $(SEEDS)

filesystems: setup  ## 50 runs on filesystems with NFS's faults, as root (RUNS=…, SEED=…, PART=k/n; goes on where it ended)
	python -m tests.filesystems --seed $(SEED) --runs $(RUNS) --part $(PART)

leftovers: setup  ## 20 jobs of two users end in every way on a real Slurm: nothing stays on its nodes (ENDS=…, SEED=…)
	RLHPC_LEFTOVERS=$(ENDS) RLHPC_LEFTOVERS_SEED=$(SEED) pytest -m slurm tests/slurm/test_leftovers.py -s

chaos: setup  ## 30 random kills over one run on a real Slurm (KILLS=…, SEED=…)
	RLHPC_CHAOS_KILLS=$(KILLS) RLHPC_CHAOS_SEED=$(SEED) pytest -m slurm tests/slurm/test_chaos.py -s

chaos-scale: setup  ## 100 seeded cuts of the network, clock jumps, lost nodes and absent daemons over 64 ranks, resumable (SEED=…, PART=1/10, RANKS=…)
	python -m tests.slurm.chaos --seed $(SEED) --part $(PART) --events $(EVENTS) --ranks $(RANKS)

chaos-helpers: setup-llm  ## 100 random joins, leaves, preemptions and kills of a run's helpers on a real Slurm (EVENTS=…, SEED=…)
	RLHPC_HELPERS_EVENTS=$(EVENTS) RLHPC_HELPERS_SEED=$(SEED) pytest -m slurm tests/slurm/test_elastic.py tests/slurm/test_elastic_env.py -k random -s

rlinf-sample: setup  ## trains 20 of RLinf's example files for two steps each, on a CPU (RLINF=FOLDER of its checkout; minutes)
	$(BIN)/python -m tests.rlinf_sample $(RLINF)

attack: setup  ## hostile programs, files and users against what is built (long; a part of them is among the tests)
	PYTHONPATH=. $(VENV)/bin/python tests/attack/programs.py
	PYTHONPATH=. $(VENV)/bin/python tests/attack/files.py
	PYTHONPATH=. $(VENV)/bin/python tests/attack/strangers.py
	PYTHONPATH=. $(VENV)/bin/python tests/attack/tries.py

bad-inputs: setup  ## hundreds of mistakes of users: is each one message, and is nothing left (SEED=…)
	python -m tests.attack.bad_inputs --seed $(SEED)

lint: setup  ## style, words, types, import floors, workflow
	ruff check .
	ruff format --check .
	python -m tests.words
	mypy
	! mypy --explicit-package-bases --check-untyped-defs tests | grep '\[call-arg\]$$'
	snakefmt --check workflow
	lint-imports
	snakemake --lint --snakefile workflow/Snakefile --config run=$(RUN)

bench: setup  ## the benchmarks; results go to bench/results
	python -m bench

bench-gpu: setup-llm  ## figures of this machine's accelerators, in 10 to 15 minutes (BENCH_ARGS="--device cpu": that it runs)
	python -m bench.gpu $(BENCH_ARGS)

gallery: setup-llm  ## the small runs of the documentation's pages on algorithms, and their charts (ONLY="grpo sac" for some; an hour for all)
	python -m bench.gallery $(ONLY)

curve-%: setup-llm
	python -m bench.gallery $*

docs: docs-reference $(VENV)/.setup-docs  ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 mkdocs build --quiet --clean
	@echo "site/index.html"

$(VENV)/.setup-docs: $(STAMP)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint envs/constraints.txt -r pyproject.toml --extra docs
	@touch $@

docs-reference: setup  ## the reference pages that are made from the code
	python -m rlhpc.reference config > docs/reference/config.new
	mv docs/reference/config.new docs/reference/config.md
	python -m rlhpc.reference cli > docs/reference/cli.new
	mv docs/reference/cli.new docs/reference/cli.md
	python -m rlhpc.reference runtime > docs/reference/runtime.new
	mv docs/reference/runtime.new docs/reference/runtime.md
	python -m rlhpc.reference troubleshooting > docs/reference/troubleshooting.new
	mv docs/reference/troubleshooting.new docs/reference/troubleshooting.md
	python -m bench.gallery_pages

constraints: setup  ## pin what is installed now in envs/constraints.txt, and what goes with it on GPUs
	python envs/freeze.py > envs/constraints.new
	mv envs/constraints.new envs/constraints.txt
	bash envs/resolve.sh gpu

resolve: setup  ## whether each environment can be had, on CPUs and GPUs, from Python 3.11 to 3.13
	bash envs/resolve.sh

clean:  ## the environment and caches; runs/ stays
	rm -rf .venv $(wildcard .venv-*) .snakemake .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
