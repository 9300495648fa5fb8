# make setup | run | test | test-slow | test-gpu | lint    (see README.md)
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
PY     := $(VENV)/bin/python -P
STAMP  := $(VENV)/.installed

export HF_HUB_OFFLINE := 1
export PYTHONSAFEPATH := 1

.PHONY: setup run test test-slow test-gpu lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' || \
	  { echo "SpecPilot needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q "$(TORCH)"
	$(VENV)/bin/pip install -q -e '.[engine,dev]'
	@touch $@

run: setup
	$(VENV)/bin/specpilot run --deployment pico

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: lint
	$(PY) -m pytest -q

test-slow: setup
	$(PY) -m pytest -q -m slow

test-gpu: setup
	$(PY) -m pytest -q -m gpu

clean:
	rm -rf $(VENV) build dist *.egg-info
