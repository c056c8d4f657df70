# Everything runs in .venv, which any of these commands makes first: with what the package needs for `make demo`, with
# what its tests need for the others.
PYTHON ?= python3
BIN := .venv/bin
PACKAGE := .venv/.package
READY := .venv/.ready
PHOTOS := demo/photographs
# `gpuaug parity` compares with torchvision, and `gpuaug train` builds models of torchvision and timm. PyPI has torchvision
# for CUDA only: beside torch for a CPU, other packages that import it fail. So the tests have both in a folder of its own.
# What timm imports otherwise (huggingface_hub, safetensors, yaml) comes with accelerate.
TORCHVISION := .venv/torchvision

# The tests start hundreds of Python processes: keep the compiled modules, even where the environment says otherwise.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-long fuzz notebooks docs lint clean

demo: $(PACKAGE)  ## train on real photographs, and preview two recipes: all into demo/
	$(BIN)/python bench/photographs.py $(PHOTOS)
	$(BIN)/gpuaug train source.root=$(PHOTOS)/train val.source.root=$(PHOTOS)/val augment=standard \
		epochs=10 batch_size=32 memory_format=channels_last out=demo/train json=demo/train.json
	$(BIN)/gpuaug preview source.root=$(PHOTOS)/train augment=standard out=demo/standard.png
	$(BIN)/gpuaug preview source.root=$(PHOTOS)/train augment=simclr out=demo/simclr.png

# Three processes on CI's two cores: many tests wait for processes of their own.
test: lint  ## minutes; one test needs Chromium: apt-get install chromium
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "not long"

test-long: lint  ## everything
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

fuzz: $(READY)  ## hostile images for ten minutes, tars, and epochs with bad files; MINUTES=60 for more images
	$(BIN)/python tests/fuzz.py images --minutes $(or $(MINUTES),10)
	$(BIN)/python tests/fuzz.py tars --count 5000
	$(BIN)/python tests/fuzz.py epochs --count 50

notebooks: $(READY)  ## execute all of them where they lie, with the seconds of each; on a machine that does nothing else
	PYTHONPATH=$(CURDIR)/$(TORCHVISION) $(BIN)/python bench/notebooks.py

docs: $(READY)  ## the guides, the notebooks and the reference as a site in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo 'To read it: python3 -m http.server -d build/site. Links and search need a server.'

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## what demo and installation made
	rm -rf .venv demo

# Once, and again when the dependencies change.
$(PACKAGE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "gpuaug needs Python 3.11 or newer; found: $$($(PYTHON) --version 2>&1). Set PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --progress-bar on --editable .
	# for the photographs inside, which are read by path: what these packages import themselves is not needed
	$(BIN)/python -m pip install --quiet --no-deps 'scikit-image>=0.24' 'scikit-learn>=1.5'
	touch $@

$(READY): $(PACKAGE)
	$(BIN)/python -m pip install --quiet --progress-bar on --editable '.[dev]'
	# torchvision 0.26 belongs to torch 2.11, 0.27 to 2.12, 0.28 to 2.13, and 0.29 to 2.14 and 2.15
	minor=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch").split(".")[1])') && \
		$(BIN)/python -m pip install --quiet --no-deps --target $(TORCHVISION) 'timm>=1.0.20,<2' 'lightly>=1.6,<2' \
		"torchvision==0.$$((minor > 14 ? 29 : minor + 15)).*"
	touch $@
