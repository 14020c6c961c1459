# Two commands: `make train` trains a small GPT-2 here, `make test` checks everything.
# Both install what they need into $(VENV) first; a second run finds it there.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train test lint types docs fuzz nightly sanitize install clean distclean

# Programs that tests start, by the hundred, would each compile the library again.
unexport PYTHONDONTWRITEBYTECODE

VENV ?= .venv
ARGS ?=
bin := $(VENV)/bin

# The first interpreter that runs, is new enough and can make environments; PYTHON=... to choose.
usable := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
python = $(or $(shell for p in $(PYTHON) $(if $(PYTHON),,python3 python3.14 python3.13 python3.12 \
	python3.11 python); do $$p -c '$(usable)' >/dev/null 2>&1 && command -v $$p && break; done),\
	$(error No Python 3.11 or later with venv was found ($(or $(PYTHON),tried python3 and \
	python3.11 to 3.14)); install one (on Debian with python3-venv) or say make PYTHON=/path/to/python))

# The newest CUDA that the driver runs decides; without a GPU this is empty.
cuda = $(addprefix $(comma)cuda,$(shell nvidia-smi 2>/dev/null | sed -n \
	's/.*CUDA[A-Za-z ]*Version: *\([0-9][0-9]*\).*/\1/p' | awk '\
	$$1 >= 13 { print 13 } $$1 == 12 { print 12 } \
	$$1 < 12 { print "skipping the GPU: its driver is older than CUDA 12" >"/dev/stderr" }'))
comma := ,

help: ## show this list (default)
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20
	@echo 'Options: ARGS="--steps 100" for make train, PYTHON=python3.12, VENV=.venv'

train: extras = plot$(cuda)
train: install ## train a small GPT-2 with the defaults (ARGS="--help" lists its options)
	@$(bin)/tensorgrad train $(ARGS)

# Two files of tests run side by side, each with one thread of BLAS.
test: export OMP_NUM_THREADS = 1
test: lint types ## install everything, then lint, types and all tests
	@echo 'tests (pytest)'
	@$(bin)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: install ## check style and format with ruff
	@echo 'lint (ruff)'
	@$(bin)/ruff check -q .
	@$(bin)/ruff format -q --check .

types: install ## check types with mypy --strict
	@echo 'types (mypy)'
	@$(bin)/mypy tensorgrad examples tests

docs: install $(VENV)/.installed-group-docs ## build the site of all documents and names, and check its links
	@rm -rf build/docs build/docs-source
	@mkdir -p build/docs-source
	@$(bin)/python -m sphinx -q -E -W --keep-going -j 2 -c docs -d build/docs-source/.doctrees \
		build/docs-source build/docs/$$($(bin)/python -c 'import tensorgrad; print(tensorgrad.__version__)')
	@$(bin)/python -m tests.site_links build/docs
	@echo '$(CURDIR)/build/docs/index.html'

fuzz: install ## run every fuzz test with 100,000 new cases (ARGS="-k protocol" chooses)
	@$(bin)/python -m pytest -q -o faulthandler_timeout=0 --hypothesis-profile=fuzz tests/fuzz $(ARGS)

nightly: install ## install every extra with the lowest and newest versions, and test the lowest (hours)
	@.ci/nightly $(ARGS)

sanitize: install ## look for memory errors and races in kernels, on a GPU (ARGS="tests/kernels -k softmax")
	@for tool in memcheck racecheck initcheck; do echo "$$tool"; \
		compute-sanitizer --tool $$tool --error-exitcode 1 $(bin)/python -m tests.sanitize \
		$$(test $$tool = racecheck && echo --pool) $(ARGS) \
		|| exit 1; done

# A stamp for each set of extras, older than pyproject.toml when that has changed.
extras = dev$(cuda)
install:
	@$(MAKE) -s $(VENV)/.installed-$(extras)

$(VENV)/.created:
	@echo 'creating $(VENV) with $(python)'
	@$(python) -m venv --clear --upgrade-deps $(VENV) # a newer pip resolves in half the time
	@touch $@

$(VENV)/.installed-%: pyproject.toml $(VENV)/.created
	@echo 'installing tensorgrad-cupy[$*] into $(VENV)'
	@$(bin)/python -m pip install -qq --disable-pip-version-check -e '.[$*]'
	@touch $@

$(VENV)/.installed-group-docs: pyproject.toml $(VENV)/.created
	@echo 'installing what builds the site into $(VENV)'
	@$(bin)/python -m pip install -qq --disable-pip-version-check --group docs
	@touch $@

clean: ## remove build products and caches (runs/ stays)
	rm -rf build/lib build/bdist* build/docs* dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove $(VENV)
	rm -rf $(VENV)
