# Two commands do everything: `make run` reproduces the paper's claim on this machine, `make test` proves that all of it
# works. `make check` is for every edit: a minute and a half. All make the environment in .venv first, where it is not.
PYTHON ?= python3
BIN := .venv/bin
# Two files of tests at a time, and sums on one core each: most of the work is small.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile
# Tests that take a moment each; the others start kernels or train.
QUICK := captions sentences losses config records readers store pairs tokens retrieval order statistics tables results \
  preset project

.PHONY: run check test test-slow readme docs
run: .venv/installed
	$(BIN)/debias-clip run quick --processes 2

check: .venv/installed
	$(BIN)/ruff check .
	$(TEST) -q -m "not slow and not long" $(QUICK:%=tests/test_%.py)

# The experiments share the models of runs/smoke, and one notebook at a time may train a model.
test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/nbdev_test --n_workers 2 --skip_folder_re '^experiments$$'
	$(BIN)/nbdev_test --n_workers 1 --path nbs/experiments
	$(TEST)

test-slow: .venv/installed
	$(BIN)/python -m pytest -m slow

# README.md comes from nbs/index.ipynb: run it, so that its numbers are those of runs/toy, and write it down.
readme: .venv/installed
	cd nbs && ../$(BIN)/jupyter execute --inplace --kernel_name=python3 index.ipynb
	$(BIN)/nbdev_clean --fname nbs/index.ipynb && $(BIN)/python tools/readme.py

# The site of notebooks, executed experiments and API, into site/; its index.html opens from disk. The variable silences
# mkdocs-material's long notice of its successor.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.venv/docs: .venv/installed
	$(BIN)/python -m pip install -e '.[docs]'
	@touch $@

.venv/installed: pyproject.toml
	@test -x $(BIN)/pip || $(PYTHON) tools/make_venv.py .venv
	$(BIN)/python -m pip install -e '.[dev]'
	@touch $@
