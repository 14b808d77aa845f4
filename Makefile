# Every target makes the environment first, once: .venv, at the versions of constraints.txt.
#   make demo    the whole road: corpus, freeze, plan, launch on a local Ray cluster, result
#   make demo-gan  a GAN on two workers: several graphs in turns
#   make test    the test suite, in its short form: what continuous integration runs
#   make test-long  the tests that it leaves out: every case of its matrices, faults, kills, benchmark scripts
#   make test-report  the test suite, its slowest tests, and those that take longer than a test may
#   make check   lint, format, types and the quick tests
#   make dist    wheel and source distribution, built and checked, in dist/
#   make installs  the wheel with each Python and torch, installed from the registry: docs/reference/support.md
#   make lowest  the quick tests with the lowest versions of the dependencies that pyproject.toml accepts
#   make docs    the documentation as a site in build/site, strictly: no broken link, no undocumented option
#   make grid    every strategy with every kind of model, against one process: docs/measurements/grid.md
#   make browser  opens every kind of page in Chromium, which it installs where it is missing, and checks them
#   make integrations  the tests with heavy libraries of others: tests/integrations
#   make image   the container image for Kubernetes, where docker, podman or buildah is; otherwise its Dockerfile is checked
#   make coverage-suite   which models can be frozen: docs/measurements/coverage.md, in some hours

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where it is set, every process that a test starts would compile the sources anew, and pytest the assertions of all tests.
unexport PYTHONDONTWRITEBYTECODE
# Inductor does not try out, in every process, whether the compiler takes the processor's vector instructions.
export TORCHINDUCTOR_VEC_ISA_OK := 1
STAMP := $(VENV)/.stamp
REGISTRY := $(VENV)/registry

.PHONY: env test test-long test-report browser docs check format demo demo-gan compat fuzz hostile mutate debug-faults statistics bench counts faults soak freeze fresh-start large-model large-shapes grid kills kuberay gpu gpu-compile memory parity published checkpoints reshard simulate remat layers retraining year leases coverage-suite image integrations dist installs lowest clean

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[ray,dev,docs,transformers]"
	mkdir -p $(REGISTRY)
	cd $(REGISTRY) && (apt-get download --quiet docker-registry || (apt-get update -qq && apt-get download --quiet docker-registry)) && dpkg -x docker-registry_*.deb . && rm docker-registry_*.deb \
		|| echo "Debian's docker-registry cannot be had here: the tests that need a registry will be skipped."
	touch $@

# Several tests at a time: three on two cores, since a test waits for its processes for a third of the time, and two of
# the slow ones, which compute more. Then those that need both cores, on Ray for one. `make test-long` has what is
# marked `slow`.
SEVERAL := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder
ONE := $(BIN)/python -m pytest
# What one part has frozen and compiled serves the other.
SHARE = SHARED_FOLDER=$$(mktemp -d); export SHARED_FOLDER; trap 'rm -rf "$$SHARED_FOLDER"' EXIT; trap 'exit 130' INT TERM

test: env
	@status=0; $(SHARE); \
	$(SEVERAL) -n 3 -m "not slow and not alone" $(OPTIONS) || status=1; \
	$(ONE) -m "not slow and alone" $(OPTIONS) || status=1; \
	exit $$status

test-long: env
	@status=0; $(SHARE); \
	$(SEVERAL) -n 2 -m "slow and not alone" $(OPTIONS) || status=1; \
	$(ONE) -m "slow and alone" $(OPTIONS) || status=1; \
	exit $$status

test-report:
	$(MAKE) test OPTIONS="--limit 15"

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p trainload
	$(BIN)/mypy examples tests docs/hooks
	$(BIN)/python -m tests.house.import_graph
	$(BIN)/python -m pytest tests/house

dist: env
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m check_wheel_contents dist/*.whl

# PYTHONS: names or paths of interpreters.
PYTHONS ?= python3.11 python3.12 python3.13
installs: env
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tests.distribution.installs $(PYTHONS)

lowest: env
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tests.distribution.lowest $(OPTIONS)

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
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tests.compat.matrix

grid: env
	$(BIN)/python -m tests.grid.run
	$(BIN)/python -m tests.grid.run --outlined

# The theme's notice about other generators is not for readers of the build.
docs: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(BIN)/python -m pytest -q tests/documentation/test_site.py

hostile: env
	$(BIN)/python -m tests.hostile.table

browser: env
	command -v chromium || apt-get install --quiet --yes chromium || (apt-get update -qq && apt-get install --quiet --yes chromium)
	$(BIN)/python -m tests.report.browser

# Ten planted faults, each found with one command.
debug-faults: env
	$(BIN)/python -W ignore -m tests.launch.debugging.fault_table

statistics: env
	$(BIN)/python -W ignore benchmarks/statistics_cost.py

mutate: env
	$(BIN)/python -m tests.mutate

bench: env
	$(BIN)/python benchmarks/steps.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/dispatch.py

fresh-start: env
	$(BIN)/python benchmarks/fresh_start.py
	$(BIN)/python -W ignore benchmarks/fresh_tick.py

freeze: env
	$(BIN)/python benchmarks/freeze.py

large-shapes: env
	$(BIN)/python -W ignore benchmarks/large_shapes.py

large-model: env
	$(BIN)/python -W ignore benchmarks/large_model.py

faults: env
	$(BIN)/python -W ignore benchmarks/faults.py

# CRDS: a folder with the files of helm-chart/kuberay-operator/crds of KubeRay's repository, and of manifests/base/crds of Kubeflow
# Trainer's, which are not on PyPI.
kuberay: env
	$(BIN)/python -m tests.manifest.crds $(CRDS)

# TORCH: cpu, cuda, or a folder of PyTorch's index. EXTRAS: extras of trainload.
IMAGE ?= trainload
image: env
	$(BIN)/hadolint Dockerfile
	@arguments="$(if $(TORCH),--build-arg TORCH=$(TORCH)) $(if $(EXTRAS),--build-arg EXTRAS=$(EXTRAS))"; \
	if docker info >/dev/null 2>&1; then docker build $$arguments -t $(IMAGE) .; \
	elif command -v podman >/dev/null; then podman build $$arguments -t $(IMAGE) .; \
	elif command -v buildah >/dev/null; then buildah build $$arguments -t $(IMAGE) .; \
	else echo "No docker, podman or buildah can be used here: the Dockerfile was only checked."; fi

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
	$(BIN)/python -m pytest tests/launch/node/test_gpu.py
	$(BIN)/python benchmarks/gpu.py

# torch's build for CUDA takes 5.5 GB; it needs no GPU.
GPU := .gpu/bin/python
gpu-compile: .gpu/.stamp
	OMP_NUM_THREADS=1 $(GPU) -m tests.gpu_compile.run

.gpu/.stamp: constraints.txt
	$(PYTHON) -m venv .gpu
	grep -v -E '^(torch|setuptools)==' constraints.txt > .gpu/constraints.txt && echo torch==2.14.1 >> .gpu/constraints.txt
	PIP_CONSTRAINT= $(GPU) -m pip install --quiet -c .gpu/constraints.txt --upgrade setuptools wheel
	PIP_CONSTRAINT= $(GPU) -m pip install --quiet -c .gpu/constraints.txt --no-build-isolation -e . pytest
	touch $@

parity: env
	$(BIN)/python benchmarks/parity.py

remat: env
	$(BIN)/python benchmarks/remat.py

layers: env
	$(BIN)/python benchmarks/layers.py
	$(BIN)/python benchmarks/compile_depth.py
	$(BIN)/python benchmarks/depth_stages.py

memory: env
	$(BIN)/python benchmarks/memory.py

checkpoints: env
	$(BIN)/python benchmarks/checkpoints.py

reshard: env
	$(BIN)/python benchmarks/reshard.py

published: env
	$(BIN)/python benchmarks/published.py

simulate: env
	$(BIN)/python benchmarks/simulate.py

# MLflow's server and Airflow require other versions than constraints.txt has, so they have environments of their own, which
# tests/integrations/*.txt pin, with the dependencies of dependencies.
integrations: env .mlflow/.stamp .airflow/.stamp
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[integrations]"
	$(BIN)/python -m pytest tests/integrations $(OPTIONS)

.mlflow/.stamp: tests/integrations/mlflow.txt
	$(PYTHON) -m venv .mlflow
	PIP_CONSTRAINT= .mlflow/bin/python -m pip install --quiet -c $< mlflow
	touch $@

.airflow/.stamp: tests/integrations/airflow.txt
	$(PYTHON) -m venv .airflow
	PIP_CONSTRAINT= .airflow/bin/python -m pip install --quiet -c $< apache-airflow-core apache-airflow-providers-standard
	touch $@

coverage-suite: env
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[coverage]"
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps timm
	$(BIN)/python -m tests.torch_samples.count
	$(BIN)/python -m tests.coverage.suite

clean:
	rm -rf $(VENV) .lowest build dist demo demo-gan runs .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
