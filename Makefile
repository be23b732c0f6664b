# Every target sets up what it needs, and does nothing that is done already.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
TRL_VENV := .venv-trl
DOCS_VENV := .venv-docs
AGENTS_VENV := .venv-agents
NPM_AGENTS := .npm-agents
VERIFIERS_VENV := .venv-verifiers
PYTHON312 ?= python3.12
VENV312 := .venv-py312
MEGATRON312 := 0.19.2
VENV_NEWEST := .venv-newest
TORCH_NEWEST := 2.15.0
TRANSFORMERS_NEWEST := 5.24.0
SGLANG_NEWEST := 0.5.23
SGLANG := $(SGLANG_NEWEST)
SGLANG_PINS := tests/sglang/requirements-gpu/$(SGLANG).txt
SGLANG_VENV := .venv-sglang$(if $(filter-out $(SGLANG_NEWEST),$(SGLANG)),-$(SGLANG))

# RECORD=1 keeps what passed, and with which versions, in tests/versions.jsonl; make versions writes tables of it.
RECORDING := $(if $(RECORD),-p tests.recording --record-versions)
# Records that NAME ran: $(call ran,PYTHON,NAME)
ran = $(if $(RECORD),$(1) -m tests.recording --ran $(2))

# Gives an environment whose torch is for GPUs the NCCL of SGLang's torch, since NCCL refuses to connect two versions.
# Any later pip install that resolves torch brings the other one back: $(call one_nccl,PYTHON)
define one_nccl
if $(1) -m pip show --quiet nvidia-nccl-cu13 2>/dev/null; then \
  grep '^nvidia-nccl-cu13==' $(SGLANG_PINS) | xargs $(1) -m pip install --quiet --no-deps; \
fi
endef

# Runs all commands, though some fail, and names those at the end: $(call keep_going,run NAME COMMAND; run NAME COMMAND)
define keep_going
failed=; run() { name=$$1; shift; echo "$$*"; "$$@" || failed="$$failed $$name"; }; $(1); \
  if [ -n "$$failed" ]; then echo "FAILED:$$failed" >&2; exit 1; else echo "All parts passed."; fi
endef

# For keep_going: $(call suites,PYTHON,options of the unit tests,options of the distributed ones)
define suites
run tests/unit $(1) -m pytest tests/unit -n 2 $(2) $(RECORDING); \
run tests/distributed $(1) -m pytest tests/distributed -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder $(3) $(RECORDING); \
run tests/faults $(1) -m pytest tests/faults -m "not slow" -n 2 $(RECORDING)
endef

define linters
run ruff-check $(VENV)/bin/ruff check .; \
run ruff-format $(VENV)/bin/ruff format --check .; \
run pyright $(VENV)/bin/pyright; \
run lint-imports $(VENV)/bin/lint-imports; \
run shellcheck $(VENV)/bin/shellcheck -x $$(git ls-files '*.sh' '*.sbatch' .ci/run); \
run hadolint $(VENV)/bin/hadolint $$(git ls-files '*.Dockerfile'); \
run size_limits $(RUN) tests/lint/size_limits.py; \
run setting_places $(RUN) tests/lint/setting_places.py; \
run prose $(RUN) tests/lint/prose.py
endef

# Tests in another environment than CI's, with the arguments of suites
define lane
@$(call keep_going,$(call suites,$(1),$(2),$(3)); \
  run quickstart sh -c "$(1) examples/quickstart/run.py --short $(if $(RECORD),&& $(call ran,$(1),quickstart))")
endef

.PHONY: release smollm2 smollm2-servers quick coverage-map mutants docs test-newest versions study-short bench-sglang gpu-sglang help venv quickstart quickstart-short test test-slow layouts test-recipes test-py312 python312 test-sglang test-sglang-slow sglang-venv test-agents test-agents-npm test-agents-verifiers test-slurm test-nodes slurm faults lint bench bench-loss bench-save bench-trl gpu chromium

help:
	@echo "make quickstart  the whole loop on this machine's CPU, ending in runs/quickstart/report.html"
	@echo "make quick       lint, and the tests that run what changed since the branch left main, in 60 to 90 seconds"
	@echo "make test        lint, then unit, distributed and fault tests, in about half an hour"
	@echo "make docs        a site of all pages, with search: build/site/docs/index.html (own environment)"
	@echo; echo "More tests"
	@echo "make lint        ruff, pyright, import-linter, shellcheck, hadolint, size limits, places of settings"
	@echo "make test-recipes  every algorithm of every experiment in examples/, trained for real on a tiny model"
	@echo "make test-slow   what takes longer: layouts of eight processes, all checkpoints between layouts, adapters, each failing call"
	@echo "make layouts     compare every layout with one process; writes the table in megatron_dppo/actor/LAYOUTS.md"
	@echo "make faults      kill, tear, fill, hang and poison a run at every moment; writes tests/faults/README.md"
	@echo "make test-sglang tests/sglang: a real SGLang $(SGLANG) server on this machine's CPU (own environment); SGLANG=0.5.22 another"
	@echo "make test-sglang-slow  a server of every model family, of which make test-sglang takes two"
	@echo "make test-slurm  tests/slurm: jobs of a real SLURM on this machine; as root it installs Debian's packages"
	@echo "make test-nodes  tests/nodes: several machines on one by namespaces, and faults of nodes and links; as root"
	@echo "make test-agents tests/agents: agents that others wrote call this package's endpoint (own environment)"
	@echo "make test-agents-npm  the same with Claude Code, Codex, opencode and qwen-code (needs npm; 1.2 GB)"
	@echo "make test-agents-verifiers  the same with an environment of the library verifiers (own environment)"
	@echo "make test-py312  make test and the short quickstart on Python 3.12 with megatron-core $(MEGATRON312) (own environment)"
	@echo "make test-newest make test and the short quickstart with torch $(TORCH_NEWEST) and transformers $(TRANSFORMERS_NEWEST) (own environment)"
	@echo "make coverage-map  which tests run which functions, for make quick, in about an hour; TESTS=tests/unit/test_x.py a part"
	@echo "make mutants     plants faults and reports which ones tests notice; MUTANTS='--minutes 30 --only rollout'"
	@echo; echo "Examples"
	@echo "make smollm2     a real language model of 135 million parameters learns word problems; SHORT=1, ENGINE=sglang"
	@echo "make study-short a miniature of the miniature study: several seeds of two algorithms, and their report"
	@echo; echo "Environments"
	@echo "make venv        only the environment, .venv; PYTHON=python3.11 picks the interpreter"
	@echo "make sglang-venv only SGLang's environment, $(SGLANG_VENV); SGLANG_FOR=gpu or cpu, else by nvidia-smi"
	@echo; echo "On a GPU"
	@echo "make gpu         all that needs a GPU, on one: each step with a time limit, and a table; GPU_FLAGS=--rehearse tries it"
	@echo "make gpu-sglang  the same with an SGLang server on the trainer's GPU; installs SGLang for GPUs"
	@echo; echo "Benchmarks"
	@echo "make bench       tokens/s of rollout and training, where the time goes, and training speed by layout"
	@echo "make bench-loss  our fused losses against other libraries' and the machine's floors; a small shape without a GPU"
	@echo "make bench-sglang  weights pushed to a real SGLang server, and responses read from it, compared with copies and plain HTTP"
	@echo "make bench-save  the pause that an asynchronous save costs, against a synchronous one"
	@echo "make bench-trl   the same task with TRL's GRPOTrainer, interleaved (own environment)"
	@echo; echo "Releases"
	@echo "make versions    the tables of versions in the guide to installing, of what the targets above recorded with RECORD=1"
	@echo "make release     checks the version, CHANGELOG.md and the tags, and builds the wheel"

venv: $(VENV)/.stamp

# torch comes first and alone, so that a build chosen by hand (CPU, or another CUDA) is kept. The compiler of the
# CUDA kernels comes from PyPI where the machine has none.
$(VENV)/.stamp: setup.py constraints.txt $(SGLANG_PINS)
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet torch==2.13.0
	PATH="$${CUDA_HOME:+$$CUDA_HOME/bin:}$$PATH"; extras=dev; command -v nvcc >/dev/null || extras=dev,nvcc; \
	  $(RUN) -m pip install --quiet -c constraints.txt -e ".[$$extras]"
	$(call one_nccl,$(RUN))
	@touch $@

quickstart: venv
	$(RUN) examples/quickstart/run.py

quickstart-short: venv
	$(RUN) examples/quickstart/run.py --short
	$(call ran,$(RUN),quickstart)

study-short: venv
	$(RUN) examples/miniature_study/run.py --short

# SHORT=1: few samples. ENGINE=sglang: a real SGLang server on the CPU samples.
smollm2: venv $(if $(filter sglang,$(ENGINE)),smollm2-servers)
	PYTHON=$(RUN) SHORT=$(SHORT) ENGINE=$(ENGINE) examples/smollm2/run.sh

smollm2-servers:
	$(MAKE) sglang-venv SGLANG_FOR=cpu

test test-recipes test-slow layouts test-newest test-py312 test-sglang test-sglang-slow test-agents test-agents-npm test-agents-verifiers test-slurm test-nodes faults: export OMP_NUM_THREADS := 1

test: venv chromium
	@$(call keep_going,$(linters); $(call suites,$(RUN)))

# megatron-core after 0.16 needs Python 3.12; not part of CI. Transformer Engine's stand-ins fit 0.16.1 alone.
test-py312: $(VENV312)/.stamp
	$(call lane,$(VENV312)/bin/python,-m "not gem",--ignore=tests/distributed/test_engine_names.py)

# The newest torch and transformers that the tests ran with; not part of CI. PyPI's torch is built for CUDA: gigabytes.
test-newest: $(VENV_NEWEST)/.stamp
	$(call lane,$(VENV_NEWEST)/bin/python)

# The compiler that is pinned is for another CUDA.
$(VENV_NEWEST)/.stamp: setup.py constraints.txt Makefile
	test -x $(VENV_NEWEST)/bin/python || $(PYTHON) -m venv $(VENV_NEWEST)
	sed -e 's/^torch==.*/torch==$(TORCH_NEWEST)/' -e 's/^transformers==.*/transformers==$(TRANSFORMERS_NEWEST)/' \
	  -e '/^nvidia-cuda-[cn]/d' -e '/^nvidia-nvvm/d' constraints.txt >$(VENV_NEWEST)/constraints.txt
	$(VENV_NEWEST)/bin/python -m pip install --quiet torch==$(TORCH_NEWEST)
	PATH="$${CUDA_HOME:+$$CUDA_HOME/bin:}$$PATH"; extras=dev; command -v nvcc >/dev/null || extras=dev,nvcc132; \
	  $(VENV_NEWEST)/bin/python -m pip install --quiet -c $(VENV_NEWEST)/constraints.txt -e ".[$$extras]"
	@touch $@

# Checked first and always: without it nothing of this target can be said.
python312:
	@$(PYTHON312) -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || { \
	  echo "Python 3.12 is needed and $(PYTHON312) is none: install it, or make test-py312 PYTHON312=/path/to/python3.12" >&2; exit 1; }

# The same pins as everywhere, but for megatron-core.
$(VENV312)/.stamp: setup.py constraints.txt Makefile | python312
	test -x $(VENV312)/bin/python || $(PYTHON312) -m venv $(VENV312)
	sed 's/^megatron-core==.*/megatron-core==$(MEGATRON312)/' constraints.txt >$(VENV312)/constraints.txt
	$(VENV312)/bin/python -m pip install --quiet torch==2.13.0
	PATH="$${CUDA_HOME:+$$CUDA_HOME/bin:}$$PATH"; extras=dev; command -v nvcc >/dev/null || extras=dev,nvcc; \
	  $(VENV312)/bin/python -m pip install --quiet -c $(VENV312)/constraints.txt -e ".[$$extras]"
	@touch $@

# The test runner is ours; the servers that it starts run in SGLang's environment, on a CPU.
test-sglang: venv
	$(MAKE) sglang-venv SGLANG_FOR=cpu SGLANG=$(SGLANG)
	SERVERS_PYTHON=$(CURDIR)/$(SGLANG_VENV)/bin/python $(RUN) -m pytest tests/sglang -m "not slow" -n 2 --dist loadfile $(RECORDING)

# A server of every model family, which takes minutes.
test-sglang-slow: venv
	$(MAKE) sglang-venv SGLANG_FOR=cpu SGLANG=$(SGLANG)
	SERVERS_PYTHON=$(CURDIR)/$(SGLANG_VENV)/bin/python $(RUN) -m pytest tests/sglang/test_served_families.py $(RECORDING)

# For GPUs or for a CPU: as SGLANG_FOR says, else by nvidia-smi. A login node of a cluster must be told.
ifndef SGLANG_FOR
SGLANG_FOR := $(shell if nvidia-smi >/dev/null 2>&1; then echo gpu; elif command -v sbatch >/dev/null; then echo unknown; else echo cpu; fi)
SGLANG_WHY := nvidia-smi says so
else
SGLANG_WHY := it was asked for
endif

sglang-venv: $(SGLANG_VENV)/.stamp-$(SGLANG_FOR)
	@if [ "$(SGLANG_FOR)" = gpu ] && [ -x $(RUN) ]; then $(call one_nccl,$(RUN)); fi
	@echo "$(SGLANG_VENV) is for $(SGLANG_FOR): $(SGLANG_WHY). make sglang-venv SGLANG_FOR=gpu or SGLANG_FOR=cpu chooses."

# Each kind has a stamp, and there is one environment: one of the other kind is removed, never added to.
# For GPUs SGLang brings the torch that it pins. On a CPU: what serving needs, a CPU build of torch whatever SGLang
# pins, and a .pth file that makes tests/sglang/cpu_shim part of the environment.
$(SGLANG_VENV)/.stamp-$(SGLANG_FOR): tests/sglang/requirements-cpu/$(SGLANG).txt $(SGLANG_PINS) Makefile
	@case "$(SGLANG_FOR)" in gpu|cpu) ;; \
	  unknown) echo "found sbatch and no GPU: a login node? Expected to be told what SGLang is for: make sglang-venv SGLANG_FOR=gpu for" \
	    "a cluster's GPUs (here or in a job), SGLANG_FOR=cpu for this machine's CPU." >&2; exit 1 ;; \
	  *) echo "SGLANG_FOR: found $(SGLANG_FOR); expected gpu or cpu." >&2; exit 1 ;; esac
	@if [ "$(SGLANG_FOR)" = gpu ]; then other=$$(find $(SGLANG_VENV)/lib -name sglang_on_cpu.pth 2>/dev/null); \
	  else other=$$(find $(SGLANG_VENV)/.stamp-gpu 2>/dev/null); fi; \
	  [ -z "$$other" ] || { echo "$(SGLANG_VENV) is not for $(SGLANG_FOR): it is made anew"; rm -rf $(SGLANG_VENV); }
	test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	if [ "$(SGLANG_FOR)" = gpu ]; then \
	  $(SGLANG_VENV)/bin/python -m pip install --quiet -c $(SGLANG_PINS) sglang==$(SGLANG); \
	else \
	  $(SGLANG_VENV)/bin/python -m pip install --quiet torch==2.13.0 && \
	  $(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps -r tests/sglang/requirements-cpu/$(SGLANG).txt && \
	  printf '%s\nimport sglang_on_cpu\n' "$(CURDIR)/tests/sglang/cpu_shim" \
	    >"$$($(SGLANG_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sglang_on_cpu.pth"; \
	fi
	@touch $@

# The test runner is ours; the agents run in a separate environment.
test-agents: venv $(AGENTS_VENV)/.stamp
	AGENTS_PYTHON=$(CURDIR)/$(AGENTS_VENV)/bin/python $(RUN) -m pytest tests/agents --ignore=tests/agents/npm --ignore=tests/agents/verifiers -n 2

$(AGENTS_VENV)/.stamp: tests/agents/requirements.txt
	test -x $(AGENTS_VENV)/bin/python || $(PYTHON) -m venv $(AGENTS_VENV)
	$(AGENTS_VENV)/bin/python -m pip install --quiet --no-deps --no-compile -r tests/agents/requirements.txt
	@touch $@

# Command-line agents from npm, which write to a home of each episode. Not part of CI.
test-agents-npm: venv $(NPM_AGENTS)/.stamp
	NPM_AGENTS=$(CURDIR)/$(NPM_AGENTS) $(RUN) -m pytest tests/agents/npm

# Each package has its libraries in it, and names its binaries by exact versions, so there is no lock file.
$(NPM_AGENTS)/.stamp: tests/agents/npm/package.json
	mkdir -p $(NPM_AGENTS)
	cp $< $(NPM_AGENTS)
	cd $(NPM_AGENTS) && npm install --no-package-lock --no-audit --no-fund
	@touch $@

# Not part of CI: an episode imports the library in three processes, about 20 seconds.
test-agents-verifiers: venv $(VERIFIERS_VENV)/.stamp
	VERIFIERS_PYTHON=$(CURDIR)/$(VERIFIERS_VENV)/bin/python $(RUN) -m pytest tests/agents/verifiers

$(VERIFIERS_VENV)/.stamp: tests/agents/verifiers/requirements.txt
	test -x $(VERIFIERS_VENV)/bin/python || $(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet --no-deps --no-compile -r tests/agents/verifiers/requirements.txt
	@touch $@

test-recipes: venv
	$(RUN) -m pytest tests/recipes -n 2 --dist loadfile --no-loadscope-reorder $(RECORDING)

test-slurm: venv slurm
	$(RUN) -m pytest tests/slurm $(RECORDING)

# Nodes are namespaces of this machine: as root, with /dev/net/tun.
test-nodes: venv slurm
	$(RUN) -m pytest tests/nodes $(RECORDING)

test-slow: venv
	$(RUN) -m pytest tests/distributed tests/faults -m slow

layouts: venv
	$(RUN) -m pytest tests/distributed/test_layouts.py -k equals_one --write-layouts

# What users' versions are known to do: the tables in examples/guides/installing.md, of what RECORD=1 kept.
release: venv
	$(RUN) -m tools.release

versions: venv
	$(RUN) -m tools.versions

faults: venv
	$(RUN) -m tests.faults.campaign --write

lint: venv
	@$(call keep_going,$(linters))

quick: venv
	$(RUN) tests/quick.py

coverage-map: venv
	$(RUN) -m tests.coverage_map $(TESTS)

# cosmic-ray and what it needs are installed for this target alone.
mutants: venv
	$(RUN) -m pip install --quiet -c constraints.txt -e ".[mutants]"
	$(call one_nccl,$(RUN))
	$(RUN) -m tests.mutants $(MUTANTS)

# The pages that are tracked, and what they link to, are copied, so that no other folder is searched.
docs: $(DOCS_VENV)/.stamp
	rm -rf build/pages build/site
	mkdir -p build/pages
	git ls-files '*.md' '*.svg' '*.png' '*.py' LICENSE | tar -cf - -T - | tar -xf - -C build/pages
	$(DOCS_VENV)/bin/sphinx-build -q -W --keep-going -j auto -c docs build/pages build/site
	@echo "open build/site/docs/index.html"

$(DOCS_VENV)/.stamp: docs/requirements.txt
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet -r docs/requirements.txt
	@touch $@

bench: venv
	$(RUN) -m tools.benchmarks.loop
	$(RUN) -m tools.benchmarks.layouts

bench-loss: venv
	OMP_NUM_THREADS=1 $(RUN) -m tools.benchmarks.loss

bench-sglang: venv sglang-venv
	OMP_NUM_THREADS=1 $(RUN) -m tools.benchmarks.sglang_transfer

bench-save: venv
	OMP_NUM_THREADS=1 $(RUN) -m tools.benchmarks.save

bench-trl: venv $(TRL_VENV)/.stamp
	$(RUN) -m tools.benchmarks.trl_comparison --trl-python $(TRL_VENV)/bin/python

$(TRL_VENV)/.stamp: Makefile
	test -x $(TRL_VENV)/bin/python || $(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(TRL_VENV)/bin/python -m pip install --quiet -c constraints.txt trl==1.16.0 transformers==5.23.0 datasets==5.2.0 accelerate==1.15.0
	@touch $@

# What needs a GPU, each step with its own time limit: GPU_FLAGS='--only tests --within-s 600', or --rehearse on a CPU.
gpu: venv
	$(RUN) -m tools.gpu_machine $(GPU_FLAGS)

# As make gpu, with SGLang's GPU packages, which need a network.
gpu-sglang: venv
	$(MAKE) sglang-venv SGLANG_FOR=gpu
	$(RUN) -m tools.gpu_machine --sglang $(GPU_FLAGS)

# The report is tested in a real browser.
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; \
	  else \
	    echo "The tests open the report in Chromium, which is missing: install your system's 'chromium' package." >&2; exit 1; \
	  fi; }

# Munge, slurmctld and slurmd are started by tests/slurm itself, as whoever runs it.
slurm:
	@export PATH="$$PATH:/usr/sbin"; { command -v munged && command -v slurmctld && command -v slurmd && command -v sbatch && command -v ip; } >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	      apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge iproute2; \
	  else \
	    echo "The tests run jobs of a real SLURM, which is missing: install your system's slurmctld, slurmd, slurm-client, munge and iproute2." >&2; exit 1; \
	  fi; }
