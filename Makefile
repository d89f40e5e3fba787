# Everything a person or CI does here, by one name each. Needs Python >= 3.10 and make; the rest is set up in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Programs that speak while they work, so that the lines of one step are not mixed into the next.
export PYTHONUNBUFFERED := 1
# Two workers, whatever the machine: more of them make the daemons under test wait for each other.
SHARED_OUT := --numprocesses 2 --dist loadscope --no-loadscope-reorder

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help run test lint format docs golden vllm view clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/.run ## Set up if needed and start the daemon with no configuration
	$(BIN)/oomwatch run

# Real engines need both cores for themselves: what else runs beside them makes their times say nothing.
test: $(VENV)/.dev ## Set up if needed, then every check; pytest comes last
	@$(MAKE) --no-print-directory vllm & vllm=$$!; \
	$(MAKE) --no-print-directory lint view; others=$$?; \
	wait $$vllm && exit $$others
	$(BIN)/pytest -m real
	$(BIN)/pytest $(SHARED_OUT) -m "not real"

lint: $(VENV)/.dev ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev ## Sort imports, mend what ruff can mend, format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev ## Write the generated pages of docs/, the rules of alerts/ and the dashboards anew
	$(BIN)/python -m oomwatch.docs
	$(BIN)/python -m alerts.build
	$(BIN)/python -m grafana.build

golden: $(VENV)/.dev ## Write the expected outputs of the tests anew; review the diff
	$(BIN)/pytest $(SHARED_OUT) -m "not real" --update-golden

# Where it cannot be made (it needs Python 3.11 on x86-64 and 2.5 GB), the tests that need it are skipped and say so;
# in CI nothing may be skipped.
vllm: $(VENV)/.dev ## Make the real vLLM that the tests start, in .cache
	@$(BIN)/python -m tests.e2e.vllm_setup || { \
	  [ "$$OOMWATCH_TESTS_REQUIRE" != all ] && echo 'Going on without it: the tests with a real vLLM will be skipped.' >&2; }

view: $(VENV)/.dev ## Build the page that draws the dashboards in the tests, in .cache
	@$(BIN)/python -m tests.grafana.view_setup || { \
	  [ "$$OOMWATCH_TESTS_REQUIRE" != all ] && echo 'Going on without it: the dashboards will not be drawn.' >&2; }

clean: ## Remove .venv and what the tools keep; the vLLM of the tests in .cache stays
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find alerts benchmarks exporter grafana probe scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo 'oomwatch needs Python 3.10 or newer as "$(PYTHON)". Name another one: make PYTHON=/path/to/python3 ...' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo '"$(PYTHON)" cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: $(VENV)/.created pyproject.toml constraints.txt exporter/oomwatch/__init__.py
	$(PIP) install --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.created pyproject.toml constraints.txt exporter/oomwatch/__init__.py
	$(PIP) install --constraint constraints.txt --editable '.[bench,dev]'
	@touch $@ $(VENV)/.run
