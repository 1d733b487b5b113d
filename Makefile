# make demo: the main job; make test: lint, types and the whole test suite; make draws: the property
# tests on new draws, not the same ones each time. All make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test draws lint types install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || \
	  { echo "wafer-emu needs Python 3.11 to 3.14; set PYTHON=python3.11, say" >&2; exit 1; }
	$(PYTHON) -m venv "$(VENV)"
	"$(BIN)/python" -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch "$@"

demo: install
	"$(BIN)/wafer-emu" demo

lint: install
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .

types: install
	"$(BIN)/mypy"

test: lint types
	"$(BIN)/python" -m pytest -n 2

draws: install
	"$(BIN)/python" -m pytest -n 2 -m hypothesis --hypothesis-profile=default

clean:
	rm -rf "$(VENV)" runs dist
