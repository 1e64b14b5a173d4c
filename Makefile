# Every target makes what it needs: .venv, pinned dependencies, the native library. See tools/bootstrap.sh.
#   PYTHON=python3.12        interpreter of .venv            TIGON_CUDA=ON|OFF     unset: whether there is an NVIDIA GPU
#   ARGS="--steps 50"        options of train, test, bench   TIGON_CUDA_ARCHS=...  GPU architectures, e.g. 80-real
#   JOBS=4                   parallel compilers               TIGON_WERROR=ON       warnings are errors: for development
#   WORKERS=1                parallel tests
PYTHON_FILES = python tests bench examples tools compat cmake packaging
CPP_FILES = $(shell git ls-files --cached --others --exclude-standard \
                '*.h' '*.cpp' '*.cu' '*.cuh' '*.inc' | while read -r f; do [ -f "$$f" ] && echo "$$f"; done)

# One process a core, four at most: each takes a GB. Tests of several threads ask for them themselves.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))

.PHONY: help train train-cpp test fuzz emulate programs build wheel kernels-repo format lint bench results figures docs docs-serve notebooks clean

help:
	@echo 'make train   train a small Llama on real text, stock and with Tigon, side by side   (ARGS="--steps 50")'
	@echo 'make train-cpp  the same in C++ alone, without PyTorch: tokens are bytes   (ARGS="--data FILES --steps 50")'
	@echo 'make test    C++ and Python tests, some cases of each (ARGS=--all for every case, ARGS="-k rms_norm")'
	@echo 'make fuzz    random calls of every function, lives of models            (ARGS="--seconds 60 --seed 1")'
	@echo 'make emulate the cases of the ops, the CUDA kernels compiled as C++                (ARGS="-k rms_norm")'
	@echo 'make programs  other people'\''s programs, stock and with Tigon, each in an environment     (ARGS="--only axolotl")'
	@echo 'make build   .venv and the native library: .venv/bin/python -c "import tigon"'
	@echo 'make wheel   wheels for others in dist: several GPU architectures, manylinux     (TIGON_CUDA=OFF: in dist/cpu)'
	@echo 'make kernels-repo  a repository for the package kernels of Hugging Face, from the wheels in dist'
	@echo 'make bench   time the ops against their peers                                       (ARGS="--ops rms_norm")'
	@echo 'make results write docs/results and the table of README from the files of bench/results'
	@echo 'make figures write docs/paper.md, the figures of the paper on Liger, from bench/results'
	@echo 'make docs    the site, in build/site                         make docs-serve  the same, shown and rebuilt on changes'
	@echo 'make notebooks  run examples/notebooks, and save them with their outputs as .ipynb files'
	@echo 'make lint    ruff, clang-format, layout, documentation       make format   rewrite files in the agreed format'
	@echo 'make clean   remove build products; .venv stays'

train:
	@tools/bootstrap.sh train
	.venv/bin/python examples/train.py $(ARGS)

# The text is Python's own sources unless ARGS names some.
CPP_DATA = $(if $(filter --data --tokens,$(ARGS)),,--data $(shell .venv/bin/python -c \
  'import glob, sysconfig; print(*sorted(glob.glob(sysconfig.get_paths()["stdlib"] + "/*.py")))'))
train-cpp:
	@tools/bootstrap.sh cpp
	@build/example/train_llama $(CPP_DATA) $(ARGS)

build:
	@tools/bootstrap.sh train

wheel:
	@tools/bootstrap.sh wheel

kernels-repo:
	.venv/bin/python tools/kernels_repo.py $(ARGS)

test:
	@tools/bootstrap.sh dev
	.venv/bin/ctest --test-dir build --output-on-failure -j $(WORKERS)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

# Beside float64, or against tigon.Error. What it finds it names; ARGS="--again 'NAME'" runs that once more.
fuzz:
	@tools/bootstrap.sh dev
	OMP_NUM_THREADS=1 PYTHONPATH=python .venv/bin/python tests/fuzz.py $(ARGS)

# Without a GPU and without nvcc: tests/emulator.
emulate:
	@tools/bootstrap.sh dev
	.venv/bin/cmake -G Ninja -S tests/emulator -B build/emulator -DCMAKE_MAKE_PROGRAM=$(CURDIR)/.venv/bin/ninja \
	  -DPython_EXECUTABLE=$(CURDIR)/.venv/bin/python
	.venv/bin/ninja -C build/emulator
	build/emulator/matmul
	build/emulator/launch
	TIGON_LIBRARY=$(CURDIR)/build/emulator/libtigon_torch.so OMP_NUM_THREADS=1 \
	  .venv/bin/python -m pytest -n $(WORKERS) --dist loadgroup tests/ops/test_cases.py $(ARGS)

# Tiny models through the programs' own entry points: tests/programs. Writes docs/programs.md.
programs:
	@tools/bootstrap.sh dev
	.venv/bin/python tests/programs/run.py $(ARGS)

bench:
	@tools/bootstrap.sh train
	.venv/bin/python bench/run.py $(ARGS)

results: .venv/.stamp-dev
	.venv/bin/python bench/results.py $(ARGS)

figures: .venv/.stamp-dev
	.venv/bin/python bench/figures.py

lint: .venv/.stamp-dev
	.venv/bin/ruff check $(PYTHON_FILES)
	.venv/bin/python tools/check_tree.py
	.venv/bin/python tools/check_docs.py
	.venv/bin/python bench/results.py --check
	.venv/bin/codespell
	@.venv/bin/clang-format --dry-run -Werror $(CPP_FILES)
	.venv/bin/ruff format --check $(PYTHON_FILES)

format: .venv/.stamp-dev
	@.venv/bin/clang-format -i $(CPP_FILES)
	.venv/bin/ruff format $(PYTHON_FILES)

.venv/.stamp-dev: requirements.txt requirements-dev.txt
	@tools/bootstrap.sh dev

docs: build/docs-venv/.stamp
	NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build -q
	@echo 'build/site/index.html'

docs-serve: build/docs-venv/.stamp
	NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs serve

# The one for a GPU is run by its name: ARGS=examples/notebooks/gpu/qlora_grpo.py
notebooks:
	@tools/bootstrap.sh dev
	for f in $(or $(ARGS),examples/notebooks/*.py); do .venv/bin/python tools/run_notebook.py $$f || exit 1; done

build/docs-venv/.stamp: requirements-docs.txt
	@tools/bootstrap.sh docs

clean:
	rm -rf build dist out python/tigon/lib
