# Every target sets up what it needs: on a fresh machine `make demo` or `make test` is all there is to type.
#   make demo                      plain generate() against DSpark on the same prompt
#   make demo DRAFT=path           with another draft for SmolLM2-135M-Instruct
#   make demo ARGS='--prompt Hi'   with further arguments (see `dspark-hf demo --help`)
#   make space                     the page that shows acceptance live; ARGS='--draft path' for another draft
#   make test                      all tests;  make test ARGS='-k cli' for some of them
#   make docs-check                documentation and examples: code, links, what is generated; part of `make test`
#   make lint                      ruff
#   make bench                     the whole benchmark (half an hour; ARGS=--quick: ten minutes), stored, pages rewritten
#   make report                    the README's table and docs/measured.md from the stored runs

PYTHON ?= python3
VENV   ?= .venv
# Plain `pip install torch` may bring a CUDA build of several GB to a machine without a GPU.
# Another build: make test TORCH='torch --index-url ...'; nothing, if torch is there already: make test TORCH=
TORCH  ?= torch==2.13.0
DRAFT  ?= $(wildcard checkpoints/smollm2-135m-instruct-dspark)
ARGS   ?=

BIN := $(VENV)/bin

.PHONY: demo space test docs-check lint bench install clean

ifneq ($(strip $(DRAFT)),)
DEMO_ARGS = --draft $(DRAFT)
else
# The tiny pair of the tests: a toy language without a tokenizer, so its prompt is token ids.
DEMO_ARGS = --model tests/golden/qwen3_target --draft tests/golden/qwen3_rnn/draft \
	--prompt-ids 146,38,154,86,151,109,20,64,19,150,42,82 --max-new-tokens 64
endif

demo: $(VENV)/.installed-demo
	$(BIN)/dspark-hf demo $(DEMO_ARGS) $(ARGS)

space: $(VENV)/.installed-demo
	$(BIN)/python space/app.py $(if $(strip $(DRAFT)),--draft $(DRAFT)) $(ARGS)

# One thread per worker: the workers are what uses the cores.
test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal $(ARGS)

docs-check: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_docs.py tests/test_examples.py tests/test_report.py tests/test_project.py \
		tests/test_published.py::test_compatibility_page_is_up_to_date $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .

bench: $(VENV)/.installed-test
	$(BIN)/python benchmarks/run.py $(if $(strip $(DRAFT)),--draft $(DRAFT)) $(ARGS)

report: $(VENV)/.installed-test
	$(BIN)/python benchmarks/report.py $(ARGS)

install: $(VENV)/.installed-dev

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Python 3.10 or later is needed; name one with: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(BIN)/python
	$(if $(strip $(TORCH)),$(BIN)/python -m pip install --quiet $(TORCH))
	@touch $@

# One stamp per extra, so that `make test` does not wait for what only the demo needs.
$(VENV)/.installed-%: pyproject.toml $(VENV)/.torch
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV)
