# Everything there is to do here; `make` lists it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
PY := $(VENV)/bin/python
# protoc looks for its plugins there.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PYTHONPATH := $(CURDIR):$(CURDIR)/proto
export OMP_NUM_THREADS ?= 1
ASK ?= What is the capital of France?
# It goes through the environment as it is: neither make nor a shell may read its quotes and dollars.
override ASK := $(value ASK)
ARGS ?=
SEEDS ?= 20000

.PHONY: help setup run test lint format proto baseline sim mutate exhaustive spec soak net fuzz idle clean clients peers chart-test image image-test image-lock kube-test nodes-test

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-10s %s\n", $$1, $$2}'

setup:  ## install everything into .venv and fetch the default model (seconds if already done)
	@./setup.sh

run: export ASK := $(ASK)
run: setup  ## start a 2+2-rank cluster here, ask it something, serve until Ctrl-C (ASK="…", ARGS="--port 0 …")
	@exec $(PY) -m paceline.cli up --ask="$$ASK" $(ARGS)

test: setup lint  ## lint, then the fast tests, two files at a time (ARGS="-k name" for some of them)
	@$(PY) -m pytest -n 2 $(ARGS)

lint:  ## style, import rules, purity, types, generated code, the wire contract
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(PY) -m lint.purity
	@$(VENV)/bin/lint-imports --no-logo
	@$(VENV)/bin/mypy
	@$(PY) proto/generate.py --check
	@$(VENV)/bin/buf lint proto
	@$(VENV)/bin/buf breaking proto --against proto/baseline.binpb

format:  ## let ruff format and sort
	@$(VENV)/bin/ruff check --fix --quiet . || true
	@$(VENV)/bin/ruff format .

proto:  ## regenerate proto/paceline_proto from the .proto files
	@$(PY) proto/generate.py

baseline:  ## at a release: make the wire contract of now what later changes must not break
	@$(VENV)/bin/buf build proto --exclude-source-info -o proto/baseline.binpb

sim: setup  ## run the simulator over SEEDS seeds of all profiles (SEEDS=20000)
	@$(PY) -m sim.run --seeds 0:$(SEEDS) --jobs 2

mutate: setup  ## plant each known bug and count the seeds until the simulator finds it
	@$(PY) -m sim.mutate --jobs 2

exhaustive: setup  ## the real core under every schedule of small bounds (ARGS="--deep" or "--plant NAME")
	@$(PY) -m sim.exhaustive $(ARGS)

spec: setup  ## model-check the protocol's specification with TLC (needs Java; about a minute)
	@spec/check.sh

soak: setup  ## the tests that take minutes each
	@$(PY) -m pytest -m "soak and not clients" $(ARGS)

clients: setup  ## six clients and benchmarks of other people against a real cluster (installs 2.5 GB; minutes)
	@$(PY) -m pytest -m clients $(ARGS)

net: setup  ## hand-overs between hosts over bad networks (needs root and /dev/net/tun; minutes)
	@$(PY) -m pytest -m net -rs $(ARGS)

chart-test: setup  ## check the Helm chart in all its variants and what the image is built from (part of `test`)
	@$(PY) -m pytest tests/deploy $(ARGS)

image:  ## build the image without a daemon (needs root; ARGS="--variant cuda", "--target paceline", "--archive FILE")
	@deploy/image/build.sh $(ARGS)

image-test: setup image  ## build the image and start its root file system as a cluster (needs root; minutes)
	@$(PY) -m pytest -m image $(ARGS)

image-lock: setup  ## pin every package that an image may hold, from pyproject.toml
	@deploy/image/lock.sh

kube-test: setup  ## the chart on a real API server (needs root; builds it once: ten minutes of two idle cores)
	@$(PY) -m pytest -m kube tests/deploy/test_api_server.py $(ARGS)

nodes-test: setup image  ## real pods of the image on two nodes: deleted, updated, cut off (needs root; minutes)
	@$(PY) -m pytest -m kube tests/deploy/test_two_nodes.py $(ARGS)

fuzz: setup  ## strangers at every open port of a running cluster, 100 000 frames (minutes)
	@$(PY) -m pytest -m fuzz $(ARGS)

idle: setup  ## measure the CPU an idle cluster uses
	@$(PY) -m bench.idle_cpu --start

peers: setup  ## install other inference engines, to compare with (4 GB under the cache; minutes)
	@$(PY) -m bench.engines --install

clean:  ## remove caches, build results and logs; keeps .venv and the model
	@rm -rf build dist *.egg-info engine/native/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .run
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
