# The targets a newcomer meets; `make help` lists them.
PYTHON ?= python3
VENV := .venv
PEERS := .bench-venv
BIN := $(VENV)/bin
JOB ?= examples/main.yaml
COUNT ?= 20000
ARGS ?=
EXTRAS ?= dev
# Tests start hundreds of processes: without this each would compile the modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup train verify verify-families test memory chain rehearsal faults fuzz lora compiled cold whole planted static offload tiles zero-plus-plus test-smollm2 test-families \
	reference lint format lock wheel docs pictures docs-check course bench accuracy fit gpu chaos launchers bench-peers clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(VENV)/.installed ## make .venv and install the project with pinned versions

# The stamp is newer than what it was made from: a second call installs nothing. On a terminal pip shows its progress.
# Python's own pip of 2023 takes twice the time of a newer one, and would compile every module on one core; those that each
# process imports are compiled here, the others where they are imported.
COMPILED := torch sympy mpmath numpy transformers
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@[ -t 1 ] && quiet= || quiet=--quiet; extra=$$($(PYTHON) .ci/torch_index.py $(BIN)/python); \
	echo "Installing Phalanx with pinned versions$${extra:+ and torch for CPUs, a few hundred MB: no GPU here}"; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=25.3' || true; \
	$(BIN)/python -m pip install $$quiet --no-compile --disable-pip-version-check -c constraints.txt $$extra -e '.[$(EXTRAS)]'
	@$(BIN)/python -m compileall -qq -j 0 -x '/transformers/models/|/tests/|torch/testing/_internal' \
		$(addprefix $(VENV)/lib/python3*/site-packages/,$(COMPILED)) || true # some are in [dev] alone
	@touch $@

$(VENV)/.documented: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

train: setup ## train a small GPT on this machine, in the layout that the planner chooses: ARGS='train.steps=50'
	$(BIN)/phalanx train $(JOB) layout=auto $(ARGS)

verify: setup ## compare every layout with one process: ARGS='--max-ranks 4'
	$(BIN)/phalanx verify $(JOB) --full $(ARGS)

# A test's timeout interrupts Python, but no call that waits inside a library: a minute later the process shows its stack
# and ends.
test: setup ## run the tests: ARGS='-k checkpoint'
	$(BIN)/python -m pytest $(or $(ARGS),--beside 3 -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true)

cold: setup ## run the tests without forks of a warm process (tests/warm.py): every process starts afresh
	PHALANX_COLD=1 $(BIN)/python -m pytest $(ARGS)

fuzz: setup ## try mutations of the file of every loader: COUNT=100000
	PHALANX_FUZZ=$(COUNT) $(BIN)/python -m pytest -q --timeout=0 tests/fuzz $(ARGS)

rehearsal: setup ## rehearse training on a GPU without one, in more layouts: minutes
	PHALANX_REHEARSAL=1 $(BIN)/python -m pytest tests/dryrun/test_gpu_branches.py tests/train/test_rehearsed_cuda.py tests/model/test_attention.py $(ARGS)

faults: setup ## make every fault that the watchdog finds, lose replicas, and try every launcher, also on two nodes (as root): minutes
	PHALANX_FAULTS=1 $(BIN)/python -m pytest tests/launch/test_watchdog.py tests/launch/test_two_nodes.py tests/machine/test_doctor_two_nodes.py tests/launch/test_every_launcher.py tests/train/test_elastic_runs.py tests/benchmarks/test_chaos.py $(ARGS)

memory: setup ## compare the predicted memory of models of every kind with the measured one, also in half precision: minutes
	PHALANX_MEMORY=1 PHALANX_WHOLE=1 $(BIN)/python -m pytest tests/train/test_memory.py tests/train/test_predicted_memory.py $(ARGS)

chain: setup ## compare memory, bytes and FLOPs, predicted and rehearsed, of every kind of model in 54 layouts, and rehearsed and real: minutes
	PHALANX_WHOLE=1 $(BIN)/python -m pytest tests/dryrun/test_chain.py tests/dryrun/test_rehearse.py $(ARGS)

zero-plus-plus: setup ## try ZeRO++ in all its layouts: a minute
	PHALANX_ZERO_PLUS_PLUS=1 $(BIN)/python -m pytest tests/parallel/test_quantised.py $(ARGS)

planted: setup ## plant every bug of tests/verify/bugs.py, each of which verify must find, and --static those of sums: minutes
	PHALANX_PLANTED=1 $(BIN)/python -m pytest -s tests/verify/test_planted.py tests/dryrun/test_sums.py $(ARGS)

static: setup ## prove the sums over ranks of every layout of verify that --static can judge, without values: about forty minutes
	PHALANX_STATIC=1 $(BIN)/python -m pytest tests/dryrun/test_sums.py -k no_sum $(ARGS)

whole: setup ## run the whole tables of the tests that try every pair of their parts: minutes
	PHALANX_WHOLE=1 $(BIN)/python -m pytest tests/parallel tests/train tests/generate tests/plan tests/verify tests/extend \
		tests/families/test_layouts.py tests/benchmarks/test_gpu.py tests/machine/test_calibration.py \
		tests/graph/test_execute.py tests/simulate/test_agreement.py $(ARGS)

lora: setup ## compare adapters in every layout: bytes sent, and memory (a quarter of an hour)
	PHALANX_LORA=1 $(BIN)/python -m pytest tests/parallel/test_lora_layouts.py tests/train/test_memory.py $(ARGS)

offload: setup ## compare offloaded activations and parameters in every layout: minutes
	PHALANX_OFFLOAD_MATRIX=1 $(BIN)/python -m pytest tests/train/test_offload.py $(ARGS)

compiled: setup ## count the compiled graphs of every kind of block in every layout: an hour
	PHALANX_COMPILE=1 $(BIN)/python -m pytest tests/parallel/test_compiled.py $(ARGS)

tiles: setup ## compare tiles of every layer in every layout: results, and bytes sent
	PHALANX_TILES=1 $(BIN)/python -m pytest tests/parallel/test_tiling.py $(ARGS)

test-smollm2: setup ## import the real SmolLM2-135M and compare it with transformers (PHALANX_SMOLLM2 names its GGUF file): minutes
	PHALANX_SMOLLM2_WHOLE=1 $(BIN)/python -m pytest -s --timeout=0 tests/exchange/test_smollm2.py $(ARGS)

test-families: setup ## export a small model of every family, with every value of every field, load it with transformers, and prove the exchange in every form: minutes
	PHALANX_FAMILIES=1 $(BIN)/python -m pytest tests/exchange/test_export.py tests/families/test_exported_fields.py tests/verify/test_exchange_proof.py -k 'computes or computed or exchange_proof' $(ARGS)

reference: setup ## write docs/reference/job.md, docs/reference/cli.md and docs/reference/api.md from the code
	$(BIN)/phalanx schema --markdown --out docs/reference/job.md
	$(BIN)/python docs/cli_reference.py
	$(BIN)/python docs/api_reference.py

lint: setup ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --progress-bar no

format: setup ## put the code into the common format
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

lock: ## write uv.lock again: every package with the versions of constraints.txt, and digests of its files (needs uv)
	uv lock $$(sed -n 's/^\([A-Za-z0-9_-]*==[^ ]*\).*/--upgrade-package \1/p' constraints.txt)

wheel: ## build the wheel, and try it in a fresh environment: two minutes
	PYTHON=$(PYTHON) .ci/wheel

docs: $(VENV)/.documented ## build the documentation site, dist/site/index.html; a broken link fails
	$(BIN)/python docs/stage_site.py
	$(BIN)/zensical build --clean --strict

pictures: setup ## make the pictures of docs/pictures again that a command on a page of docs makes
	PYTHONPATH=tests $(BIN)/python -m documented.drawn $(ARGS)

docs-check: setup ## run every command that README and docs show with its output, and compare: an hour; ARGS='-k tutorials'
	PHALANX_DOCS=1 $(BIN)/python -m pytest -q --timeout=0 tests/documented $(ARGS)

course: setup ## run the commands of every lecture of docs/tutorials/course.md, in runs/course: ARGS=examples/course/03-zero.sh
	@mkdir -p runs/course && cp -r examples runs/course/ && cd runs/course && \
	for lecture in $(or $(ARGS),$(sort $(wildcard examples/course/*.sh))); do \
		echo "== $$lecture"; PATH=$(CURDIR)/$(BIN):$$PATH bash -e $$lecture || exit 1; done

bench: setup ## measure this machine and write benchmarks/results
	$(BIN)/python -m benchmarks.throughput $(ARGS)
	$(BIN)/python -m benchmarks.startup $(ARGS)
	$(BIN)/python -m benchmarks.sharding $(ARGS)
	$(BIN)/python -m benchmarks.pipeline $(ARGS)
	$(BIN)/python -m benchmarks.context $(ARGS)
	$(BIN)/python -m benchmarks.documents $(ARGS)
	$(BIN)/python -m benchmarks.experts $(ARGS)
	$(BIN)/python -m benchmarks.tensor_parallel $(ARGS)
	$(BIN)/python -m benchmarks.guard $(ARGS)
	$(BIN)/python -m benchmarks.heartbeat $(ARGS)
	$(BIN)/python -m benchmarks.checkpoints $(ARGS)
	$(BIN)/python -m benchmarks.remote $(ARGS)
	$(BIN)/python -m benchmarks.preparing $(ARGS)

verify-families: setup ## compare every model family in every kind of layout with one process: ARGS='--only gemma3-27b'
	$(BIN)/python -m benchmarks.families $(ARGS)

accuracy: setup ## predict the published measurements in PHALANX_TRUTH and write benchmarks/results
	$(BIN)/python -m benchmarks.accuracy $(ARGS)
	$(BIN)/python -m benchmarks.published

fit: setup ## fit src/phalanx/cost/calibration.yaml to the rows that it names, in PHALANX_TRUTH: ARGS=--write
	$(BIN)/python -m benchmarks.fit $(ARGS)

gpu: setup ## parity, memory, throughput on this machine's NVIDIA GPUs: ARGS='--only parity --quick'
	$(BIN)/python -m benchmarks.gpu $(ARGS)

chaos: setup ## inject faults into real runs and write benchmarks/results/chaos.md: ARGS='--quick'
	$(BIN)/python -m benchmarks.chaos $(ARGS)

launchers: setup ## run one job under every launcher installed here, two nodes as root: ARGS='--only srun,mpich'
	$(BIN)/python -m benchmarks.launchers $(ARGS)

bench-peers: setup $(PEERS)/.installed ## compare training on two processes with every peer, also those of NANOGPT and PICOTRON: ARGS='--rounds 3'
	$(BIN)/python -m benchmarks.sharding $(ARGS)

# DeepSpeed compiles its extension when it is first used: now, not while something is measured.
$(PEERS)/.installed: pyproject.toml constraints.txt benchmarks/peers/requirements.txt benchmarks/peers/parts.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-r benchmarks/peers/requirements.txt -e .
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/peers/parts.txt
	PATH=$(CURDIR)/$(PEERS)/bin:$$PATH $(PEERS)/bin/python -m benchmarks.peers.deepspeed_extension
	@touch $@

clean: ## delete the virtual environments (runs and data stay)
	rm -rf $(VENV) $(PEERS)
