# make venv | test | train | compiled | pretend | versions | pythons | cpus | check | docs
# | clean. PYTHON sets the interpreter. ARGS is passed to the command.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
TYPECHECK := build/typecheck

# Some machines set this. The many processes of the tests would all compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: venv test train compiled pretend versions pythons cpus check docs clean
.DELETE_ON_ERROR:

venv: $(STAMP)

# Install the pinned versions and this project, editable. Install setuptools first, pinned like the
# others, because the editable build uses it in place (pip's isolated builds ignore constraints).
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
	  sys.exit(None if sys.version_info >= (3, 11) else f"Python >= 3.11 is needed, $(PYTHON) is {v}")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  --no-build-isolation -e '.[dev]'
	touch $@

# Each process runs whole test files. Many tests wait for ranks that they start, so use one process
# more than there are cores, but at most four.
WORKERS = $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() + 1))')

test: venv
	@status=0; $(VENV)/bin/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	  $(ARGS) || status=$$?; \
	if [ $$status -eq 0 ]; then echo "make test: all tests passed"; \
	else echo "make test: FAILED (pytest exit status $$status)"; fi; exit $$status

# Four ranks: two tensor ranks in each of two pipeline stages. Options in ARGS override these.
TRAIN := --tp 2 --pp 2 --no-sequence-parallel --batch 16 --microbatches 2 --steps 500 \
  --lr 3e-3 --warmup 50 --out runs/train

train: venv
	$(VENV)/bin/warpweave train $(TRAIN) $(ARGS)

# Compile every kernel at every shipped tile for A100, H100, and B200. TRITON=3.6.0 uses that
# version instead of the pinned one.
TRITONS := build/triton-

compiled: venv
ifdef TRITON
	test -d $(TRITONS)$(TRITON) || $(VENV)/bin/python -m pip install --quiet \
	  --disable-pip-version-check --no-deps --target $(TRITONS)$(TRITON) triton==$(TRITON)
endif
	PYTHONPATH=$(if $(TRITON),$(TRITONS)$(TRITON)) $(VENV)/bin/python benchmarks/compiled.py \
	  --results build/results$(if $(TRITON),-$(TRITON)) $(ARGS)

# Print a table of planted faults, then prove random layouts, in NCCL's order on a CPU;
# ARGS="--first 40 --count 200".
pretend: venv
	PYTHONPATH=tests:tests/support $(VENV)/bin/python -P tests/support/pretend_run.py $(ARGS)

# Run the whole suite with the oldest declared and with the newest libraries, in venvs that are
# removed afterwards. CI does not run this, because it takes as long as two suites.
versions: venv
	$(VENV)/bin/python benchmarks/versions.py $(ARGS)

# Run a short training job and a few test files under each of the other supported Python versions on
# this machine.
pythons: venv
	$(VENV)/bin/python benchmarks/versions.py --others --quick $(ARGS)

# Run numeric tests with the variables that make torch's libraries imitate other CPUs, for an hour
# or more.
cpus: venv
	$(VENV)/bin/python -P benchmarks/cpus.py $(ARGS)

# Type checkers do not follow setuptools' package-dir mapping. mypy therefore reads a tree of links
# with the four folders at their import paths.
check: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	@rm -rf $(TYPECHECK) && mkdir -p $(TYPECHECK)/warpweave
	@cd $(TYPECHECK)/warpweave && ln -s ../../../warpweave/* . && \
	  ln -s ../../../kernels ../../../parallel ../../../layers .
	cd $(TYPECHECK) && MYPYPATH=. ../../$(VENV)/bin/mypy --config-file ../../pyproject.toml -p warpweave
	@echo "make check: lint, format and types are clean"

# Draw the pictures of docs/, write its map, and build its site into build/site; a dead link is an
# error.
docs: venv
	$(VENV)/bin/python -P docs/scripts/schedules.py
	$(VENV)/bin/python -P docs/scripts/map.py
	$(VENV)/bin/mkdocs build --strict
	@echo "make docs: open build/site/index.html"

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache *.egg-info
