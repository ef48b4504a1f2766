# `make demo` and `make test` set up all that they need in .venv on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint

demo: $(INSTALLED)
	$(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml recipes/text_cls.py

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --dist loadfile

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[demo,test,dev,tokenizers]"
	touch $@
