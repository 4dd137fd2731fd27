# make serve   set up everything, then serve the demo model on PORT (default 8000)
# make test    set up everything, then run the gates and all tests
# make lint    only the gates: ruff, mypy, size limits
# make build   (re)build the native kernels · make model   fetch the demo model
# make dashboard   bundle the dashboard (needs node and npm; without them it is a plain table)
# make bench   kernel speeds against this machine's measured peak
# make clean   remove the virtual environment and every build output

PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8000
MODEL  ?= smollm2-135m
ARGS   ?=

BIN    := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP    := $(BIN)/python -m pip --disable-pip-version-check install
NATIVE := $(shell find csrc -type f) CMakeLists.txt
DASHBOARD := $(shell find dashboard -type f -not -path "*/node_modules/*")

.PHONY: serve test lint build dashboard model bench clean
.DELETE_ON_ERROR:

serve: $(STAMPS)/runtime $(STAMPS)/native model dashboard
	@exec $(BIN)/caudal serve $(MODEL) --port $(PORT) $(ARGS)

test: $(STAMPS)/runtime $(STAMPS)/test $(STAMPS)/native model dashboard lint
	@echo "== pytest"
	@$(BIN)/python -m pytest $(ARGS)

lint: $(STAMPS)/runtime $(STAMPS)/test
	@echo "== ruff"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@echo "== mypy"
	@$(BIN)/mypy
	@echo "== size gate"
	@$(BIN)/python tools/size_gate.py
	@if [ -e $(STAMPS)/dashboard ]; then echo "== typescript" && cd dashboard && npm run --silent check; fi

build: $(STAMPS)/native

# A server works without it, so neither a missing npm nor a missing network stops anything here.
dashboard: | $(STAMPS)/venv
	@if command -v node >/dev/null && command -v npm >/dev/null; then \
	    $(MAKE) --no-print-directory $(STAMPS)/dashboard || \
	        echo "== dashboard: not built; /dashboard shows plain numbers"; \
	else echo "== dashboard: needs node and npm; without them /dashboard shows plain numbers"; fi

model: $(STAMPS)/runtime $(STAMPS)/native
	@$(BIN)/caudal pull $(MODEL)

bench: $(STAMPS)/runtime $(STAMPS)/native
	@$(BIN)/caudal bench kernels $(ARGS)

clean:
	rm -rf $(VENV) build dashboard/node_modules src/caudal/server/static .mypy_cache .ruff_cache .pytest_cache
	find src -name '*.so' -delete
	find src tests tools benchmarks -name __pycache__ -prune -exec rm -rf {} +

# Each stamp marks a finished step, so that a second run does only what has changed.

$(STAMPS)/venv:
	@echo "== virtual environment"
	@$(PYTHON) tools/check_python.py
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/runtime: pyproject.toml tools/requirements.py | $(STAMPS)/venv
	@echo "== runtime dependencies"
	@$(PIP) $$($(BIN)/python tools/requirements.py)
	@touch $@

$(STAMPS)/test: pyproject.toml tools/requirements.py | $(STAMPS)/venv
	@echo "== test dependencies"
	@$(PIP) $$($(BIN)/python tools/requirements.py test)
	@touch $@

# Without build isolation CMake keeps its cache, so that only changed sources are compiled.
$(STAMPS)/native: $(NATIVE) pyproject.toml | $(STAMPS)/venv
	@echo "== native kernels (the first build takes a few minutes)"
	@$(PIP) $$($(BIN)/python tools/requirements.py build)
	@$(PIP) --no-deps --no-build-isolation --editable . -v
	@touch $@

$(STAMPS)/dashboard: $(DASHBOARD) | $(STAMPS)/venv
	@echo "== dashboard"
	@cd dashboard && npm ci --ignore-scripts --no-audit --no-fund --silent && npm run --silent build
	@touch $@
