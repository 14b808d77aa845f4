# Every target makes the environment first, once: .venv, at the versions of constraints.txt.
#   make demo    the whole road: corpus, freeze, plan, launch on a local Ray cluster, result
#   make demo-gan  a GAN on two workers: several graphs in turns
#   make test    the test suite, in its short form: what continuous integration runs
#   make test-long  the tests that take minutes each: faults, kills, whole matrices, benchmark scripts
#   make check   lint, format, types and the quick tests
#   make grid    every strategy with every kind of model, against one process: docs/grid.md
#   make browser  opens the page of a run in Chromium, which it installs where it is missing
#   make coverage-suite   which models can be frozen: docs/coverage.md, in about an hour

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
REGISTRY := $(VENV)/registry

.PHONY: env test test-long browser check format demo demo-gan compat fuzz hostile mutate bench counts faults soak freeze grid kills kuberay gpu memory parity published reshard simulate remat retraining year leases coverage-suite clean

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[ray,dev,transformers]"
	mkdir -p $(REGISTRY)
	cd $(REGISTRY) && (apt-get download --quiet docker-registry || (apt-get update -qq && apt-get download --quiet docker-registry)) && dpkg -x docker-registry_*.deb . && rm docker-registry_*.deb \
		|| echo "Debian's docker-registry cannot be had here: the tests that need a registry will be skipped."
	touch $@

# Tests on a Ray cluster have the machine to themselves: they end workers by their names. The others run two at a time.
CLUSTER := tests/laws/test_law_4.py tests/launch/test_bad_input.py tests/launch/test_counts.py tests/launch/test_extensions.py tests/launch/test_faults.py \
	tests/launch/test_interrupt.py \
	tests/launch/test_json.py \
	tests/launch/test_kills.py tests/launch/test_prometheus.py tests/launch/test_several_graphs.py \
	tests/launch/test_url_on_ray.py tests/launch/test_variants.py tests/manifest/test_on_ray.py tests/retraining/test_ticks_on_ray.py

# Tests of minutes each, of which the suite has a short form in other files.
LONG := tests/benchmarks/test_freeze_script.py tests/benchmarks/test_gpu_script.py tests/coverage/test_coverage.py tests/fuzz/test_fuzz.py \
	tests/grid/test_grid.py tests/house/test_example_gan.py tests/laws/test_other_plans.py tests/sharding/tensor/test_positions.py \
	tests/launch/test_optimizer_runs.py tests/launch/test_precision.py tests/launch/test_evaluate.py tests/capture/test_strict.py \
	tests/launch/test_checkpoint_runs.py \
	tests/launch/test_counts.py tests/launch/test_faults.py tests/launch/test_kills.py tests/launch/test_url_on_ray.py

test: env
	@status=0; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(addprefix --ignore=,$(CLUSTER) $(LONG)) || status=1; \
	$(BIN)/python -m pytest $(filter-out $(LONG),$(CLUSTER)) || status=1; \
	exit $$status

test-long: env
	@status=0; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(filter-out $(CLUSTER),$(LONG)) || status=1; \
	$(BIN)/python -m pytest $(filter $(LONG),$(CLUSTER)) || status=1; \
	exit $$status

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p trainload
	$(BIN)/mypy examples tests
	$(BIN)/python -m pytest tests/house

format: env
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: env
	$(BIN)/python examples/gpt/demo.py

demo-gan: env
	$(BIN)/python examples/gan/demo.py

fuzz: env
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[fuzz]"
	$(BIN)/python -m tests.fuzz.run

compat: env
	$(BIN)/python -m tests.compat.matrix

grid: env
	$(BIN)/python -m tests.grid.run

hostile: env
	$(BIN)/python -m tests.hostile.table

browser: env
	command -v chromium || apt-get install --quiet --yes chromium || (apt-get update -qq && apt-get install --quiet --yes chromium)
	$(BIN)/python -m tests.report.browser

mutate: env
	$(BIN)/python -m tests.mutate

bench: env
	$(BIN)/python benchmarks/steps.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/dispatch.py

freeze: env
	$(BIN)/python benchmarks/freeze.py

faults: env
	$(BIN)/python -W ignore benchmarks/faults.py

# CRDS: helm-chart/kuberay-operator/crds of KubeRay's repository, which is not on PyPI.
kuberay: env
	$(BIN)/python -m tests.manifest.crds $(CRDS)

counts: env
	$(BIN)/python -W ignore benchmarks/resume_counts.py

soak: env
	$(BIN)/python -W ignore benchmarks/soak.py

year: env
	$(BIN)/python -W ignore benchmarks/retrain_year.py

leases: env
	$(BIN)/python -W ignore benchmarks/lease_fight.py
	$(BIN)/python -W ignore benchmarks/lease_fight.py --s3 --leases 120

retraining: env
	$(BIN)/python -W ignore benchmarks/retrain_cost.py

kills: env
	$(BIN)/python benchmarks/kills.py

gpu: env
	$(BIN)/python benchmarks/gpu.py

parity: env
	$(BIN)/python benchmarks/parity.py

remat: env
	$(BIN)/python benchmarks/remat.py

memory: env
	$(BIN)/python benchmarks/memory.py

reshard: env
	$(BIN)/python benchmarks/reshard.py

published: env
	$(BIN)/python benchmarks/published.py

simulate: env
	$(BIN)/python benchmarks/simulate.py

coverage-suite: env
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[coverage]"
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps timm
	$(BIN)/python -m tests.coverage.suite

clean:
	rm -rf $(VENV) build dist demo demo-gan runs .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
