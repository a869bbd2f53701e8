# Needs a Python of 3.11 or newer and make; everything else goes into .venv.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
# Tests start many processes: each would compile every module again where bytecode is not kept.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest
PIP    := $(PY) -m pip --disable-pip-version-check --quiet --quiet
DEMO   ?= demo-ckpts

.DEFAULT_GOAL := help
.PHONY: help demo demo-ranks demo-s3 test test-slow test-long rigs model fuzz lint types contracts check check-here bench bench-ranks bench-tiers dist clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# A stamp per set of packages: installing again when nothing changed costs nothing.
$(PY):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ckptfmt needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-torch: pyproject.toml constraints.txt | $(PY)
	$(PIP) install --constraint constraints.txt --editable '.[torch]'
	@touch $@

$(VENV)/.installed-demo: pyproject.toml constraints.txt | $(PY)
	$(PIP) install --constraint constraints.txt --editable '.[demo]'
	@touch $@ $(VENV)/.installed-torch

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(PY)
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.installed-torch $(VENV)/.installed-demo

$(VENV)/.installed-bench: pyproject.toml constraints.txt | $(PY)
	$(PIP) install --constraint constraints.txt --editable '.[bench]'
	@touch $@ $(VENV)/.installed-torch

$(VENV)/.installed-fuzz: pyproject.toml constraints.txt | $(PY)
	$(PIP) install --constraint constraints.txt --editable '.[fuzz]'
	@touch $@

demo: $(VENV)/.installed-torch ## Train, kill, resume, compare, inspect: the main job on real input (under 3 minutes)
	rm -rf $(DEMO)
	$(VENV)/bin/ckptfmt demo $(DEMO)

demo-ranks: $(VENV)/.installed-demo ## FSDP2 on four ranks, one killed in mid-flush, two go on (PostgreSQL; about a minute)
	rm -rf $(DEMO)-ranks
	$(VENV)/bin/ckptfmt demo --ranks 4 $(DEMO)-ranks

demo-s3: $(VENV)/.installed-demo ## The main job on an S3 server through a stage, killed between staged and durable, too (under 2 minutes)
	rm -rf $(DEMO)-s3
	$(VENV)/bin/ckptfmt demo --s3 $(DEMO)-s3

test: $(VENV)/.installed-dev ## Run the tests
	$(PYTEST) -n 3 --dist loadfile $(ARGS)

test-slow: $(VENV)/.installed-dev ## Run the tests that need much time or memory
	$(PYTEST) -n 3 --dist loadfile -m slow $(ARGS)

test-long: $(VENV)/.installed-dev ## Run the tests that ask at length what shorter ones ask, too
	$(PYTEST) -n 3 --dist loadfile -m long $(ARGS)

rigs: $(VENV)/.installed-dev ## Run the tests on real disks and NFS: power cuts, failing, full and vanishing ones (root that may mount; see .ci/run)
	$(PYTEST) -m rig tests/rigs $(ARGS)

model: $(VENV)/.installed-dev ## Explore the commit protocol exhaustively (under 4 minutes)
	$(PYTEST) -m model tests/model $(ARGS)

fuzz: $(VENV)/.installed-fuzz ## Give every parser to a fuzzer that is guided by coverage (2 minutes)
	$(PY) tests/hostile/fuzz.py $(ARGS)

lint: $(VENV)/.installed-dev ## Check style and formatting
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.installed-dev ## Check types
	$(VENV)/bin/mypy

contracts: $(VENV)/.installed-dev ## Check which room imports which
	$(VENV)/bin/lint-imports

dist: $(VENV)/.installed-dev ## Build sdist and wheel, and try the wheel in an empty environment
	bash .ci/try-wheel $(PY)

check: rigs check-here ## What CI runs

check-here: test test-slow model lint types contracts dist demo ## What CI runs beside the rigs (the other demos are slow tests)

bench: $(VENV)/.installed-bench ## Measure beside torch.save, safetensors, DCP and raw limits (under 15 minutes)
	env -u PYTHONDONTWRITEBYTECODE $(PY) -m benchmarks.run $(ARGS)

bench-ranks: $(VENV)/.installed-dev ## Measure what a commit of up to 16,384 ranks costs, most of them simulated
	$(PY) -m benchmarks.ranks $(ARGS)

bench-tiers: $(VENV)/.installed-bench ## Measure S3 beside boto3, s3fs and obstore, a stage beside its disk, and what a copy takes from a data loader
	$(PY) -m benchmarks.tiers $(ARGS)

clean: ## Remove what the other targets made
	rm -rf rigs.log $(VENV) $(DEMO) $(DEMO)-ranks $(DEMO)-s3 build dist bench-results .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
