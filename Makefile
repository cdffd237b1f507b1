# Everything is installed from requirements/*.txt (pinned, with hashes) into .venv. Variables:
#   PYTHON=python3.12   which Python the virtual environment is made from (3.11 or newer)
#   SET="a.b=c x.y=z"   overrides for `make run`, each becomes a --set
#   JOBS=4              test processes at a time; about half of them wait, for servers, processes and deadlines
#   CLUSTERS=3          test processes of the cluster ring at a time, each with a cluster of its own
#   CMD="kubectl get pods"   what `make cluster` runs instead of a shell
#   REGISTRY=registry.example.com/team BASE=python@sha256:... BUILDER=buildah BUILD="--pull"   of `make images`
#   TESTS=tests/unit    what `make test` and its relatives look at
# and, of the tests, MLPIPE_REQUIRE_RINGS=unit,golden,torch,services: rings that must run, not be skipped.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
JOBS ?= 4
CLUSTERS ?= 3
TESTS ?= tests
SET ?=
REGISTRY ?= localhost
BUILDER ?= $(firstword $(foreach one,podman buildah docker,$(if $(shell command -v $(one)),$(one))) podman)
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/mlpipe/__init__.py)
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
CHECKOV := .venv-checkov
TOOLS := torchx skypilot dstack kubeflow accelerate s3
PEERS := training deepspeed validated tuning torchft

export UV_HTTP_TIMEOUT ?= 180
# Where PYTHONDONTWRITEBYTECODE is set, every `import torch` would compile its 2,000 files anew: twice the time.
export UV_COMPILE_BYTECODE ?= 1
# So would every test process rewrite and compile 400 files of tests, and every command 100 of mlpipe.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

UV := $(BIN)/uv pip
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TESTS)
LOCK := $(UV) compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
  --no-emit-index-url --no-emit-find-links pyproject.toml

.PHONY: help install lint-jenkins grafana-types run test test-unit test-torch test-services test-jenkins test-gpu test-oldest \
  mutants test-install check checkov format docs test-cluster bench bench-tools bench-peers bench-validated bench-gpu \
  servers cluster cluster-build images lock clean
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.train  ## install mlpipe and what it runs on into .venv

run: install  ## install, then train, evaluate, promote and report on pipelines/quickstart.yaml
	$(BIN)/mlpipe run pipelines/quickstart.yaml $(foreach item,$(SET),--set $(item))

test: $(VENV)/.dev servers  ## install, then every ring of tests that this machine can run
	$(PYTEST)

test-unit: TESTS = tests/unit tests/golden  # collecting the others imports torch
test-unit: $(VENV)/.dev  ## the rings that need neither torch nor a server: seconds
	$(PYTEST) -m "unit or golden"

test-torch: $(VENV)/.dev  ## real torchrun on CPU
	$(PYTEST) -m torch

test-services: $(VENV)/.dev servers  ## real MinIO and versitygw
	$(PYTEST) -m services

test-cluster: TESTS = tests/cluster
test-cluster: $(VENV)/.dev cluster-build  ## a real Kubernetes with real pods: needs root
	$(BIN)/python -m pytest -n $(CLUSTERS) --dist loadfile --no-loadscope-reorder $(TESTS) -m cluster

test-jenkins: $(VENV)/.dev  ## the client of Jenkins against your own: JENKINS_URL=..., and JENKINS_USER_ID, JENKINS_API_TOKEN
	@test -n "$(JENKINS_URL)" || { echo "say which: make test-jenkins JENKINS_URL=https://jenkins.example.com"; exit 2; }
	MLPIPE_TEST_JENKINS="$(JENKINS_URL)" $(BIN)/python -m pytest -p no:xdist tests/services/test_jenkins_server.py

test-gpu: export MLPIPE_REQUIRE_RINGS = gpu
test-gpu: $(VENV)/.dev  ## what an NVIDIA GPU computes beside a CPU and the plan, in two minutes; prints what was measured
	$(BIN)/python -m pytest -n 8 --dist worksteal tests/gpu -m gpu -rP

test-oldest: $(OLDEST)/.dev  ## the torch ring on the oldest torch that is supported
	$(OLDEST)/bin/python -m pytest -n $(JOBS) --dist loadfile $(TESTS) -m torch

# mutmut beside the environment, not in it: its terminal interface needs a dozen packages.
.cache/mutmut/.done: requirements/mutmut.txt $(VENV)/.dev
	$(UV) install --quiet --python $(BIN)/python --target .cache/mutmut --require-hashes -r $<
	@touch $@

mutants: .cache/mutmut/.done  ## changes of FILE=src/... that TESTS=tests/unit/... do not see
	.ci/mutants "$(FILE)" $(TESTS)

test-install: $(VENV)/.dev  ## `pip install .` into a new environment: a working command line without torch
	.ci/test-install $(BIN)/python

check: $(VENV)/.dev  ## lint, types, layers, documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check
	$(BIN)/python grafana/generate.py --check
	for script in .ci/*; do bash -n "$$script" || exit 1; done
	if command -v shellcheck >/dev/null; then shellcheck .ci/*; fi

# Offline, from a folder without a configuration of the user: nothing is downloaded or reported.
checkov: $(CHECKOV)/.checkov  ## a scanner's opinion of the manifests, the cluster's own part and the chart
	HOME=$(CURDIR)/$(CHECKOV) $(CHECKOV)/bin/checkov --config-file .checkov.yaml --skip-download \
	  --directory tests/golden/manifests --directory k8s --directory tests/golden/chart

# Files get names that the linter looks for, away from .venv, which it would search as well.
lint-jenkins:  ## npm-groovy-lint's opinion of the Jenkinsfiles: needs npm and Java; a minute
	npm install --no-audit --no-fund --silent --prefix .cache/groovy-lint npm-groovy-lint@15.2.2
	rm -rf .cache/groovy-lint/files && mkdir .cache/groovy-lint/files
	for file in Jenkinsfile tests/golden/jenkins/*.Jenkinsfile; do \
	  cp $$file .cache/groovy-lint/files/$$(basename $$file).groovy; done
	node .cache/groovy-lint/node_modules/.bin/npm-groovy-lint --noserver --no-insight --path .cache/groovy-lint/files \
	  --loglevel warning --failon error

# The boards' JSON, each behind the types that it must have.
GRAFANA_TYPES := .cache/grafana-types
grafana-types:  ## the boards against the types of @grafana/schema: needs npm; seconds
	npm install --no-audit --no-fund --silent --prefix $(GRAFANA_TYPES) @grafana/schema@13.2.3 typescript@5.9.3
	cp grafana/types.ts $(GRAFANA_TYPES)/types.ts
	for board in grafana/dashboards/*.json; do \
	  { echo 'import type { Board } from "./types";' && printf 'export const board: Board = ' && cat $$board; } \
	    >$(GRAFANA_TYPES)/$$(basename $$board .json).ts || exit 1; done
	cd $(GRAFANA_TYPES) && node_modules/.bin/tsc --strict --noEmit --module esnext --moduleResolution bundler --target es2022 *.ts

format: $(VENV)/.dev  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev  ## write docs/reference/ and grafana/dashboards/ anew from the code
	$(BIN)/python docs/generate.py
	$(BIN)/python grafana/generate.py

bench: $(VENV)/.dev servers bench-tools  ## mlpipe beside its peers: loop, checkpoints, store, commands, data; its own instrument
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.checkpoint
	$(BIN)/python -m benchmarks.reshard
	$(BIN)/python -m benchmarks.transfer
	$(BIN)/python -m benchmarks.commands
	$(BIN)/python -m benchmarks.render_scale
	$(BIN)/python -m benchmarks.data
	$(BIN)/python -m benchmarks.loading
	$(BIN)/python -m benchmarks.instrument
	$(BIN)/python -m benchmarks.exporter
	$(BIN)/python -m benchmarks.scrape
	$(BIN)/python -m benchmarks.bubble
	$(BIN)/python -m benchmarks.elastic
	$(BIN)/python -m benchmarks.preflight
	$(BIN)/python -m benchmarks.uneven
	$(BIN)/python -m benchmarks.stragglers
	$(BIN)/python -m benchmarks.startup

bench-tools: $(TOOLS:%=.venv-bench-%/.done)  ## the tools that ours are compared with, each in an environment of its own

bench-validated: $(VENV)/.dev .venv-bench-validated/.done  ## a CNN and a GPT to the first validated checkpoint beside Lightning, Accelerate and Trainer: half an hour
	$(BIN)/python -m benchmarks.validated

bench-peers: $(VENV)/.dev .venv-bench-training/.done .venv-bench-deepspeed/.done .venv-bench-titan/.done .venv-bench-tuning/.done  ## training beside these and raw torchrun: half an hour on two idle cores
	for precision in fp32 bf16; do \
	  $(BIN)/python -m benchmarks.peers.rates same --precision $$precision || exit 1; \
	  $(BIN)/python -m benchmarks.peers.rates same --model 21M --steps 1 --precision $$precision || exit 1; done
	$(BIN)/python -m benchmarks.peers.rates newcomer
	$(BIN)/python -m benchmarks.peers.rates compiled
	$(BIN)/python -m benchmarks.peers.meshes
	$(BIN)/python -m benchmarks.peers.chats same
	$(BIN)/python -m benchmarks.peers.chats newcomer
	$(BIN)/python -m benchmarks.peers.starts first
	$(BIN)/python -m benchmarks.peers.starts restart --rounds 2

bench-gpu: $(VENV)/.dev  ## one GPU, under 8 minutes: speed, MFU and memory of GPT-2 and Llama against a raw PyTorch loop
	$(BIN)/python -m benchmarks.gpu

servers: $(VENV)/.dev  ## build what the services and golden rings run (once, into ~/.cache/mlpipe)
	@PYTHONPATH=tests $(BIN)/python -m kit.servers build || echo "the services ring will be skipped"
	@PYTHONPATH=tests $(BIN)/python -m kit.helm build || echo "the tests of the chart will be skipped"
	@PYTHONPATH=tests $(BIN)/python -m kit.mlflow_server build || echo "the tests of MLflow will be skipped"
	@PYTHONPATH=tests $(BIN)/python -m kit.prometheus build || echo "the tests of the boards will be skipped"
	@PYTHONPATH=tests $(BIN)/python -m kit.groovy build || echo "the tests of the Jenkinsfiles will be skipped"

cluster-build: $(VENV)/.dev  ## build what the cluster ring runs: once, 10 minutes and more, into ~/.cache/mlpipe
	@PYTHONPATH=tests $(BIN)/python -m kit.cluster build || { [ $$? = 4 ] && echo "what needs that is skipped"; }
	@PYTHONPATH=tests $(BIN)/python -m kit.image build || { [ $$? = 4 ] && echo "the test of the image is skipped"; }

images:  ## both container images, by podman, buildah or docker: REGISTRY/mlpipe and REGISTRY/mlpipe-cli
	$(BUILDER) build $(if $(BASE),--build-arg BASE=$(BASE)) $(BUILD) --file Containerfile.cli \
	  --tag $(REGISTRY)/mlpipe-cli:$(VERSION) .
	$(BUILDER) build $(if $(BASE),--build-arg BASE=$(BASE)) $(BUILD) --file Containerfile --tag $(REGISTRY)/mlpipe:$(VERSION) .

cluster: $(VENV)/.dev  ## a real Kubernetes in namespaces of its own, for hand use: a shell in it (or CMD), as root
	@PYTHONPATH=tests $(BIN)/python -m kit.cluster up $(if $(CMD),sh -c "$$CMD")

lock: $(VENV)/.bootstrap  ## compile requirements/*.txt anew (UPGRADE=1: to the newest versions)
	$(LOCK) $(if $(UPGRADE),--upgrade) --extra train --group dev -c requirements/torch.in -o requirements/dev.txt
	$(LOCK) --extra train -c requirements/dev.txt -o requirements/train.txt
	$(LOCK) -c requirements/dev.txt -o requirements/base.txt
	$(LOCK) --extra train --group dev -c requirements/torch-oldest.in -o requirements/oldest.txt
	$(LOCK:pyproject.toml=requirements/bootstrap.in) -c requirements/dev.txt -o requirements/bootstrap.txt
	$(LOCK:pyproject.toml=requirements/mutmut.in) $(if $(UPGRADE),--upgrade) -c requirements/dev.txt -o requirements/mutmut.txt
	$(LOCK:pyproject.toml=requirements/mlflow.in) $(if $(UPGRADE),--upgrade) -o requirements/mlflow.txt
	$(LOCK:pyproject.toml=requirements/checkov.in) $(if $(UPGRADE),--upgrade) -o requirements/checkov.txt
	for tool in $(TOOLS); do $(LOCK:pyproject.toml=requirements/bench/$$tool.in) $(if $(UPGRADE),--upgrade) \
	  -c requirements/torch.in -o requirements/bench/$$tool.txt || exit 1; done
	for peer in $(PEERS); do $(LOCK:pyproject.toml=requirements/bench/$$peer.in) \
	  -c requirements/train.txt -o requirements/bench/$$peer.txt || exit 1; done
	$(LOCK:pyproject.toml=requirements/bench/titan.in) --override requirements/bench/titan.override \
	  -c requirements/train.txt -o requirements/bench/titan.txt

clean:  ## remove the environments and caches; runs stay
	rm -rf $(VENV) $(OLDEST) $(CHECKOV) .venv-bench-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests docs benchmarks -name __pycache__ -prune -exec rm -rf {} +

# pip installs uv (by hash) into a new environment, uv the rest. A stamp says what an environment has.
%/.bootstrap: requirements/bootstrap.txt
	@test -n "$(PYTHON)" || { echo "mlpipe needs Python 3.11 or newer and found none;" \
	  "install one, or say where it is: make PYTHON=/path/to/python3.12"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "mlpipe needs" \
	  "Python 3.11 or newer, which $(PYTHON) is not: make PYTHON=/path/to/python3.12"; exit 2; }
	test -x $*/bin/python || $(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet --require-hashes -r $<
	@touch $@

$(VENV)/.train: requirements/train.txt pyproject.toml $(VENV)/.bootstrap
	$(UV) install --python $(BIN)/python --quiet --require-hashes -r $<
	$(UV) install --python $(BIN)/python --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.train
	$(UV) install --python $(BIN)/python --quiet --require-hashes -r $<
	@touch $@

$(OLDEST)/.dev: requirements/oldest.txt pyproject.toml $(OLDEST)/.bootstrap
	$(OLDEST)/bin/uv pip install --python $(OLDEST)/bin/python --quiet --require-hashes -r $<
	$(OLDEST)/bin/uv pip install --python $(OLDEST)/bin/python --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(CHECKOV)/.checkov: requirements/checkov.txt $(CHECKOV)/.bootstrap
	$(CHECKOV)/bin/uv pip install --python $(CHECKOV)/bin/python --quiet --require-hashes -r $<
	@touch $@

.venv-bench-%/.done: requirements/bench/%.txt $(VENV)/.bootstrap
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-bench-$*
	$(UV) install --python .venv-bench-$*/bin/python --quiet --no-deps --require-hashes -r $<
	@touch $@
