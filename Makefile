# Two commands do everything: `make run` reproduces the paper's claim on this machine, `make test` proves that all of it
# works. `make check` is for every edit: a minute and a half. All make the environment in .venv first, where it is not.
PYTHON ?= python3
BIN := .venv/bin
# Tests that take a moment each; the others load models, start kernels, or train.
QUICK := $(addprefix tests/test_,$(addsuffix .py,captions sentences losses config records statistics results preset \
  project))

.PHONY: run check test test-slow readme
run: .venv/installed
	$(BIN)/debias-clip run quick

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q -m "not slow and not long" $(QUICK)

# Two at a time, and sums on one core each: most of the work is small.
test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/nbdev_test --n_workers 2
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: .venv/installed
	$(BIN)/python -m pytest -m slow

# README.md comes from nbs/index.ipynb: run it, so that its numbers are those of runs/toy, and write it down.
readme: .venv/installed
	cd nbs && ../$(BIN)/jupyter execute --inplace --kernel_name=python3 index.ipynb
	$(BIN)/nbdev_clean --fname nbs/index.ipynb && $(BIN)/python tools/readme.py

.venv/installed: pyproject.toml
	@test -x $(BIN)/pip || $(PYTHON) tools/make_venv.py .venv
	$(BIN)/python -m pip install -e '.[dev]'
	@touch $@
