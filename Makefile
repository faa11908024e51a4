# `make` alone lists the targets. `make gate PYTHON=/path/to/python` uses an interpreter that has everything and installs nothing.

SHELL := /bin/bash
ifdef PYTHON
VENV_READY :=
PY := $(PYTHON)
else
VENV_READY := .venv/.ready
PY := .venv/bin/python
endif
ARGS ?=
SHARD ?= 1/1
BASE ?= $(shell git rev-parse --verify --quiet main > /dev/null && echo main || echo origin/main)

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.venv/.ready: pyproject.toml constraints.txt
	@echo "building .venv (once; torch is large)"
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or later is needed, python3 is $$(python3 --version): install one, or name it: make gate PYTHON=..."; exit 2; }
	@python3 -m venv .venv
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[gate,dev]'
	@touch $@

.PHONY: gate
gate: $(VENV_READY) ## measure, compare, report: ends with a verdict and report/index.html (ARGS='--select kv_write')
	@$(PY) -m ci gate $(ARGS)

.PHONY: test
test: $(VENV_READY) ## run the tests (ARGS='-m "not slow"' for the quick ones)
	@$(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

ON_GPU := tests/kernels tests/ops tests/modules tests/autotune tests/kv_cache tests/test_free_runs.py tests/asv_bench/test_launches.py

.PHONY: test-gpu
test-gpu: $(VENV_READY) ## on a machine with a GPU: the tests that use it; timers and the gate's faults have it to themselves
	@$(PY) -m pytest -n 8 --dist worksteal --ignore tests/kernels/test_compile.py $(ON_GPU) $(ARGS)
	@$(PY) -m pytest tests/asv_bench/test_microbench_gpu.py $(ARGS)
	@$(PY) -m pytest tests/gate/test_gpu_faults.py $(ARGS)

.PHONY: lint
lint: $(VENV_READY) ## ruff and strict mypy
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

.PHONY: audit
audit: $(VENV_READY) ## ask PyPI for known faults of the installed packages
	@$(PY) -m pip_audit --strict --skip-editable --progress-spinner off $(ARGS)

.PHONY: tables
tables: $(VENV_READY) ## print each suite's table on this device
	@for suite in bench_paged_decode bench_kv_write bench_rope_write bench_controls; do $(PY) -m asv_bench.$$suite || exit; done

.PHONY: run
run: $(VENV_READY) ## measure HEAD once (ARGS='--keep runs/1' keeps it as one run of a baseline)
	@$(PY) -m ci run $(ARGS)

.PHONY: baseline
baseline: $(VENV_READY) ## record a baseline of kept runs (ARGS='runs/1 runs/2 ... --accepted-by NAME')
	@$(PY) -m ci baseline record $(ARGS)

.PHONY: refresh
refresh: $(VENV_READY) ## replace the rows of a baseline that changed by those of kept runs (ARGS='runs/1 ... --reason R --accepted-by NAME')
	@$(PY) -m ci baseline refresh $(ARGS)

.PHONY: site
site: $(VENV_READY) ## build the history site in .asv/html from the committed results and those measured here
	@$(PY) -m asv publish $(ARGS)

.PHONY: shard
shard: $(VENV_READY) ## measure one shard of a gate into shard/ (SHARD=1/2)
	@$(PY) -m ci gate --shard $(SHARD) --report shard $(ARGS)

.PHONY: verdict
verdict: $(VENV_READY) ## judge the shards of a gate that lie in shards/
	@$(PY) -m ci merge shards/* $(ARGS)

.PHONY: continuous
continuous: $(VENV_READY) ## asv continuous of the base branch and HEAD (BASE=main)
	@$(PY) -m asv continuous $(BASE) HEAD $(ARGS)

.PHONY: summary
summary: $(VENV_READY) ## print GitHub annotations of the last verdict, and append its summary to the job's page
	@$(PY) -m ci summary $(ARGS)

.PHONY: comment
comment: $(VENV_READY) ## post the verdict of a finished run on its pull request (in report-pr.yml)
	@$(PY) -m ci comment $(ARGS)

.PHONY: history
history: $(VENV_READY) ## add the runs in runs/ to the history branch (in publish.yml)
	@$(PY) -m ci history runs/* $(ARGS)

.PHONY: tools
tools: ## install what the tests of pages and workflows need: a Chromium (as root, with apt) and npm packages
	@command -v chromium chromium-browser google-chrome > /dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium > /dev/null; }
	@command -v npm > /dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq npm > /dev/null; }
	@npm ci --prefix .ci --no-audit --no-fund --silent

.PHONY: clean
clean: ## remove what the gate measured and wrote, but not .venv
	rm -rf .asv report shard shards
