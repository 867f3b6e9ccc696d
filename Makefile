# make setup   .venv with all dependencies        make demo   distil SmolLM2 on this machine
# make test    ruff, mypy and every test          make lint   ruff, mypy, shellcheck and hadolint
# make slurm-deps   the SLURM that tests/slurm starts; without it those tests are skipped
.PHONY: setup demo test lint format clean-demo slurm-deps

BIN := .venv/bin

setup:
	@launch/setup.sh

demo: setup
	@launch/demo.sh

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck --check-sourced launch/*.sh launch/lib/preflight.sh launch/lib/rank.sh tests/slurm/*.sh .ci/run
	$(BIN)/hadolint Dockerfile Dockerfile.cpu

# Two at a time: unit tests one by one, the others, which start ranks, commands and clusters, file by file.
test: lint
	@status=0; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --durations=5 tests/unit || status=1; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --durations=40 \
		tests/slurm tests/distributed tests/e2e tests/gpu || status=1; \
	exit $$status

slurm-deps:
	@tests/slurm/install.sh

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean-demo:
	rm -rf runs/demo
