# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
RUNS ?= runs
SOURCE ?=
STRIDE ?= 16
SITES ?= NYU,USM,UM,UCLA,LEUVEN_1,LEUVEN_2,MAX_MUN,OLIN,SBL,STANFORD,UCLA_2,UM_2

BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOB := jobs/abide_fedbn

.PHONY: help install demo demo-images abide abide-all heart cells cell-types test lint \
	benchmarks clean path-without-blank

help:
	@echo "make demo                   install, run the main job on a synthetic cohort, show the gains"
	@echo "make abide SOURCE=<folder>  the same on ABIDE I (without SOURCE it is downloaded)"
	@echo "make demo-images            the same on images of four made-up scanners"
	@echo "make abide-all SOURCE='A B' the same at twelve hospitals, from one folder or several"
	@echo "make heart SOURCE=<folder>  heart disease at four hospitals, from UCI's processed.*.data files"
	@echo "make cells SOURCE=<folder>  white blood cells of four laboratories"
	@echo "make cell-types SOURCE=...  kinds of white blood cells in three of them"
	@echo "make test                   install, run all tests"
	@echo "make lint                   ruff and mypy"
	@echo "make benchmarks             print the ratios that the README shows"

install: $(READY)

$(READY): pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

# FLARE splits the commands of its clients' processes at blanks.
path-without-blank:
	@case "$(abspath $(VENV))$(abspath $(RUNS))" in *" "*) echo "fedbn: FLARE's simulator cannot run" \
		"in '$(CURDIR)': move the clone to a folder without a blank in its path" >&2; exit 1;; esac

demo: path-without-blank $(READY)
	$(BIN)/python -m data_prep synthetic --out $(RUNS)/demo/data
	FEDBN_DATA="$(abspath $(RUNS))/demo/data" $(BIN)/nvflare simulator $(JOB) -n 4 -t 4 \
		-w $(RUNS)/demo/workspace
	@$(BIN)/fedbn results $(RUNS)/demo/workspace

# The stores go where `nvflare simulator jobs/abide_fedbn -n 4` looks: $FEDBN_DATA, else ~/fedbn_data.
abide: path-without-blank $(READY)
	$(BIN)/python -m data_prep abide $(if $(SOURCE),--source "$(SOURCE)") \
		--window 32 --stride $(STRIDE) --negative zero --same-length
	$(BIN)/nvflare simulator $(JOB) -n 4 -t 4 -w $(RUNS)/abide/workspace
	@$(BIN)/fedbn results $(RUNS)/abide/workspace

# STANFORD's patients all have another scan length than its controls: --same-length would leave one class.
ALL := $(RUNS)/abide_all
comma := ,
abide-all: path-without-blank $(READY)
	$(BIN)/python -m data_prep abide $(foreach folder,$(SOURCE),--source "$(folder)") --sites $(SITES) \
		--window 32 --stride $(STRIDE) --negative zero --out $(ALL)/data
	@rm -rf $(ALL)/job
	$(BIN)/fedbn job $(JOB) --sites $(SITES) --out $(ALL)/job
	FEDBN_DATA="$(abspath $(ALL))/data" $(BIN)/nvflare simulator $(ALL)/job \
		-n $(words $(subst $(comma), ,$(SITES))) -t 4 -w $(ALL)/workspace
	@$(BIN)/fedbn results $(ALL)/workspace

heart-source:
	@$(if $(SOURCE),:,echo "fedbn: make heart SOURCE=<folder of UCI's processed.*.data files>" >&2; exit 1)

heart: heart-source path-without-blank $(READY)
	$(BIN)/python -m data_prep heart --source "$(SOURCE)"
	$(BIN)/nvflare simulator jobs/heart_fedbn -n 4 -t 4 -w $(RUNS)/heart/workspace
	@$(BIN)/fedbn results $(RUNS)/heart/workspace

# White blood cells of four laboratories: SOURCE holds a folder with a dataset.json for each.
cells: path-without-blank $(READY)
	@test -n "$(SOURCE)" || { echo "fedbn: give SOURCE=<folder with the laboratories>" >&2; exit 1; }
	for site in ALL-IDB2 BCCD CellaVision JTSC; do \
		$(BIN)/python -m data_prep images --datalist "$(SOURCE)/$$site/dataset.json" --site $$site \
			|| exit 1; done
	$(BIN)/nvflare simulator jobs/cells_fedbn -n 4 -t 4 -w $(RUNS)/cells/workspace
	@$(BIN)/fedbn results $(RUNS)/cells/workspace

# Kinds of cells in three of the laboratories; stores of their own, since the names are the same.
TYPES := $(or $(FEDBN_DATA),$(HOME)/fedbn_data)/cell_types
KINDS := --class-names neutrophil,lymphocyte,monocyte,eosinophil --mismatch drop
cell-types: path-without-blank $(READY)
	@test -n "$(SOURCE)" || { echo "fedbn: give SOURCE=<folder with the laboratories>" >&2; exit 1; }
	@mkdir -p $(RUNS)
	for site in CellaVision JTSC; do \
		$(BIN)/python -m data_prep images --images "$(SOURCE)/$$site/image/*" --site $$site $(KINDS) \
			--classes "$(SOURCE)/classes_jtsc_cellavision.csv" --rows lab=$$site --out "$(TYPES)" \
			|| exit 1; done
	tr A-Z a-z < "$(SOURCE)/BCCD/labels_upstream.csv" > $(RUNS)/bccd_classes.csv
	$(BIN)/python -m data_prep images --images "$(SOURCE)/BCCD/image/*" --site BCCD $(KINDS) \
		--classes $(RUNS)/bccd_classes.csv --class-column category --out "$(TYPES)"
	FEDBN_DATA="$(TYPES)" $(BIN)/nvflare simulator jobs/cell_types_fedbn -n 3 -t 3 \
		-w $(RUNS)/cell_types/workspace
	@$(BIN)/fedbn results $(RUNS)/cell_types/workspace

# The cells job's task on four made-up scanners.
demo-images: path-without-blank $(READY)
	$(BIN)/python -m data_prep synthetic --images --out $(RUNS)/demo-images/data
	@rm -rf $(RUNS)/demo-images/job
	$(BIN)/fedbn job jobs/cells_fedbn --sites NORTH,EAST,SOUTH,WEST --name demo_images \
		--set 'task.classes=["organ", "core"]' --set network.args.in_channels=1 \
		--set rounds=16 --set training.batch_size=8 --set training.local_epochs=1 \
		--set training.learning_rate=0.005 --out $(RUNS)/demo-images/job
	FEDBN_DATA="$(abspath $(RUNS))/demo-images/data" $(BIN)/nvflare simulator \
		$(RUNS)/demo-images/job -n 4 -t 4 -w $(RUNS)/demo-images/workspace
	@$(BIN)/fedbn results $(RUNS)/demo-images/workspace

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

benchmarks: path-without-blank $(READY)
	$(if $(SOURCE),$(BIN)/python benchmarks/connectome.py --source "$(SOURCE)",@echo "benchmarks/connectome.py needs SOURCE=<folder of ABIDE>: left out")
	$(BIN)/python benchmarks/training.py --threads 1
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/communication.py
	$(BIN)/python benchmarks/memory.py

clean:
	rm -rf $(RUNS) simulator_workspace .pytest_cache .mypy_cache .ruff_cache
