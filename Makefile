# Commands of this repository; `make help` lists them. Everything is installed into .venv and built into a cache
# folder (XDG_CACHE_HOME or ~/.cache, rlfleet/), nothing into the system.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
NODES ?= 4
MINUTES ?= 10
# Tests wait for more than half of their time: on two cores three files at a time end sooner than two.
WORKERS ?= 3
PROVIDER ?= local
UV_VERSION := 0.13.9
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PYTHONPATH := operator:.
# With it every process that is started compiles all its modules anew; tests and demo start thousands.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo test engines test-engines fault soak cluster cluster-down node node-down image e2e-node generate verify docs lock bench clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-14s %s\n", $$1, $$2}'

venv: $(STAMP) ## install the locked dependencies into .venv (about 1 minute, 5 GB: PyPI's torch brings CUDA libraries)

$(STAMP): requirements.lock pyproject.toml
	@echo "== installing locked dependencies into $(VENV) (about 1 minute; torch is large) =="
	@$(PYTHON) -c 'import sys; sys.exit(not (3,11) <= sys.version_info[:2] <= (3,13))' \
	  || { echo "rlfleet needs Python 3.11 to 3.13; $(PYTHON) is $$($(PYTHON) -V). Set PYTHON=python3.12, for example."; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes requirements.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP) ## the main job, end to end: cluster, operator, engines, a trainer that learns (KEEP=1 leaves it running; SCENARIO=colocated: trainer and engines take turns on the same GPUs; ENGINE=sglang or vllm: real engines, as root)
	@KEEP=$(KEEP) SCENARIO=$(SCENARIO) ENGINE=$(ENGINE) $(BIN)/python -m e2e.demo

test: $(STAMP) ## all tests that need no root, WORKERS=3 files at a time, each worker with a cluster of its own
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

engines: $(STAMP) ## install real SGLang and vLLM for CPUs into the cache folder (e2e/engines/*.lock; 6 GB each, linked to uv's cache)
	@$(BIN)/python -m e2e.engines install

test-engines: engines ## all tests with real SGLang and vLLM engines, in a network namespace of their own (needs root; SHORT=1: the rounds of CI; ARGS="-k ...")
	@$(BIN)/python -m e2e.engines test $(if $(SHORT),e2e/scenarios/test_real_engines.py -m "engines and not slow") $(ARGS)

fault: $(STAMP) ## everything that `make test` samples: all points of the sweeps, the larger model, slow scenarios (hours; SHARD=1/3, STANDS=n, SECONDS=n per sweep, ARGS="-k ...", POINTS=n, POINT=text, REPEAT=n)
	@RLFLEET_FAULT_REPORT=.fault/report$(if $(SHARD),-$(subst /,of,$(SHARD))).json RLFLEET_FAULT_SHARD=$(SHARD) \
	  RLFLEET_FAULT_STANDS=$(STANDS) RLFLEET_FAULT_SECONDS=$(SECONDS) RLFLEET_FAULT_REPEAT=$(REPEAT) RLFLEET_FAULT_POINTS=$(POINTS) RLFLEET_FAULT_POINT="$(POINT)" \
	  $(BIN)/python -m pytest tests/fault $(wildcard tests/model) e2e/scenarios -m "" $(ARGS)

soak: $(STAMP) ## random faults for MINUTES=10, invariants checked all the time, memory flat (SEED=n for the same faults)
	@$(BIN)/python -m tests.fault.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

cluster: $(STAMP) ## local control plane and NODES=4 hollow nodes; writes .cluster/kubeconfig
	@$(BIN)/python -m e2e.cluster up --provider $(PROVIDER) --nodes $(NODES)

cluster-down: $(STAMP) ## stop what `make cluster` started and remove its files
	@$(BIN)/python -m e2e.cluster down

node: $(STAMP) ## one real node (kubelet, containerd; needs root): pods run from images; writes .node/kubeconfig (INSTALL=1 installs Debian packages)
	@$(BIN)/python -m e2e.node up

node-down: $(STAMP) ## stop what `make node` started and remove it; only caches stay
	@$(BIN)/python -m e2e.node down

image: $(STAMP) ## build the images operator, engine, trainer with buildah or docker (BASE=image; without it one is made of Debian packages) and report sizes
	@$(BIN)/python -m e2e.node image --base "$(BASE)"

e2e-node: image ## tests on a real node: chart, images, probes, sidecars, volumes, upgrade (needs root; SHORT=1: without the faults, as CI)
	@$(BIN)/python -m pytest e2e/node -m "$(if $(SHORT),not node_faults)" -v -s --durations=0 --durations-min=1 $(ARGS)

generate: $(STAMP) ## write the generated files: CRDs and pages of reference, the chart's README, config/default
	@$(BIN)/python -m rlfleet.api.crdgen --write
	@$(BIN)/python -m e2e.observability.dashboards --write
	@$(BIN)/python -m rlfleet.cli.reference --write
	@$(BIN)/python -m e2e.chart --write
	@$(BIN)/python -m e2e.reference --write
	@$(BIN)/python -m e2e.compatibility --write

verify: $(STAMP) ## formatting, lint, types, layers, generated files
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m rlfleet.api.crdgen --check
	@$(BIN)/python -m e2e.observability.dashboards --check
	@$(BIN)/python -m rlfleet.cli.reference --check
	@$(BIN)/python -m e2e.chart --check
	@$(BIN)/python -m e2e.reference --check
	@$(BIN)/python -m e2e.compatibility --check
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --clean

docs: $(STAMP) ## the documentation as a site, in site/; a warning is an error (seconds)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --clean

lock: ## resolve the dependencies of pyproject.toml anew into requirements.lock, and those of real engines and of verl into theirs (e2e/engines, e2e/frameworks)
	@[ -x $(BIN)/uv ] || { $(PYTHON) -m venv $(VENV); $(BIN)/python -m pip install --quiet uv==$(UV_VERSION); }
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
	  --extra dev pyproject.toml -o requirements.lock
	@for e in sglang vllm; do (cd e2e/engines && $(CURDIR)/$(BIN)/uv pip compile --quiet --python-platform x86_64-manylinux_2_34 --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header --override $$e.overrides $$e.in -o $$e.lock); done
	@cd e2e/frameworks && $(CURDIR)/$(BIN)/uv pip compile --quiet --no-deps --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header verl.in -o verl.lock

bench: $(STAMP) ## benchmarks, as ratios against a baseline of the same run
	@for b in bench/*_leg.py bench/discovery.py bench/takeover.py; do echo "== $$b"; $(BIN)/python "$$b"; done

clean: ## remove .venv and caches of tools (not the built Kubernetes programs)
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist site
