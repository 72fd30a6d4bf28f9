# Everything here works from a fresh clone on a machine with Python >= 3.11 and make.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
BENCH ?= map_step

.PHONY: help setup demo decks test check reference docs pictures bench bench-check clean

help: ## Show what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.run ## Make .venv with the library and its command line
	@echo "posterity is installed in $(VENV): run $(BIN)/posterity --help"

demo: $(VENV)/.run ## Show what a posterior buys on 40 rows: a table, a figure, a verdict
	$(BIN)/posterity compare waves --methods map,laplace,auto --seconds 10 --figure demo/waves.png

decks: $(VENV)/.run ## Run every command of the index of topics, and see that its figures appear
	$(BIN)/posterity study --deck all --out decks

test: $(VENV)/.dev ## Run the whole test suite
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal

check: $(VENV)/.dev ## Format, lint, types and import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

reference: $(VENV)/.run ## Write the pages that are made: reference.md, decks, which-method.md
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_decks.py
	$(BIN)/python docs/make_which.py

docs: $(VENV)/.dev ## Build the documentation site into site/, strictly, and look at it in Chromium
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q
	$(BIN)/python docs/check_site.py --browser

pictures: $(VENV)/.dev ## Draw the pictures of methods and run the notebooks of docs/
	$(BIN)/python docs/make_pictures.py
	$(BIN)/python docs/make_notebooks.py

bench: $(VENV)-bench/.peers ## Run a benchmark against its peers: make bench BENCH=map_step
	$(VENV)-bench/bin/python -m benchmarks.$(BENCH)

bench-check: $(VENV)/.run ## Compare the time of core steps with earlier runs on this machine; fails at 20 % more
	$(BIN)/python -m benchmarks.check

clean: ## Remove what the commands above made
	rm -rf $(VENV) $(VENV)-bench demo decks site

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e ".[report]"
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $(VENV)/.run $@

$(VENV)-bench/.peers: pyproject.toml constraints.txt benchmarks/peers.txt
	$(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/pip install -c constraints.txt -e ".[report]"
	$(VENV)-bench/bin/pip install -c constraints.txt -r benchmarks/peers.txt
	$(VENV)-bench/bin/pip install -c constraints.txt --no-deps -r benchmarks/peers-without-dependencies.txt
	@touch $@
