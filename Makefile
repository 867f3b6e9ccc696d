# make setup   .venv with all dependencies        make demo   distil SmolLM2 on this machine
# make test    ruff, mypy and every test          make lint   ruff and mypy alone
.PHONY: setup demo test lint format clean-demo

BIN := .venv/bin

setup:
	@launch/setup.sh

demo: setup
	@launch/demo.sh

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck launch/*.sh .ci/run

test: lint
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} $(BIN)/python -m pytest -q --durations=15

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean-demo:
	rm -rf runs/demo
