# Two commands do everything: `make run` reproduces the paper's claim on this machine, `make test` proves that all of it works.
# Each target is one or two lines that could be typed; both make the environment in .venv the first time and reuse it after.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test test-slow readme
run: .venv/installed
	$(BIN)/debias-clip run quick

test: .venv/installed
	$(BIN)/nbdev_test --n_workers 1
	$(BIN)/python -m pytest

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
