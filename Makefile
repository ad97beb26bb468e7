# make serve: set everything up, fetch the default model, serve it.  make test: the whole suite.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(wildcard src/quickdraft/ops/cpu/csrc/*)

.PHONY: serve test test-full soak bench kernels projection lint clean

serve: $(VENV)/.installed
	$(BIN)/quickdraft pull
	$(BIN)/quickdraft serve

test: $(VENV)/.installed-dev
	$(BIN)/quickdraft pull
	$(BIN)/python -m pytest -m "not full" -n 2 --dist loadfile

test-full: $(VENV)/.installed-dev
	$(BIN)/quickdraft pull
	$(BIN)/python -m pytest

soak: $(VENV)/.installed-dev
	$(BIN)/python -m tests.soak

bench: $(VENV)/.installed
	$(BIN)/quickdraft pull
	$(BIN)/quickdraft bench stages

kernels: $(VENV)/.installed-dev projection
	env -u TRITON_INTERPRET $(BIN)/python -m quickdraft.bench.kernels_page docs/reference/kernels.md

projection: $(VENV)/.installed-dev
	env -u TRITON_INTERPRET $(BIN)/python -m quickdraft.bench.card_projection \
		src/quickdraft/bench/data/curve-rtx3090-projected.json docs/reference/projection.md

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(wildcard src/quickdraft/ops/cpu/csrc/*.cpp src/quickdraft/ops/cpu/csrc/*.h)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python $(SOURCES)
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/.installed-dev: $(BIN)/python $(SOURCES)
	$(BIN)/python -m pip install -q -e ".[dev]"
	touch $@ $(VENV)/.installed

clean:
	rm -rf build $(VENV)
