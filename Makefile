# Two commands matter: `make demo` and `make test`. Both set up what they need; the demo needs less.
PY := .venv/bin/python
# The folder of the conformance cases and their runner.
CONFORMANCE ?= tests/conformance
KINDS ?= nftables iptables-nft iptables-legacy userspace
WHAT ?=
GUESTS ?= $(shell nproc)
TARGET ?=
SOAK ?= 60

.PHONY: setup demo unit test test-all fuzz lint conformance conformance-ipvs machine matrix bench prove soak wayback switch e2e disrupt node dist release clean

setup:
	@tools/setup

demo:
	@tools/setup demo
	@tools/check-host demo
	@$(PY) -m lab demo $(if $(KEEP),--keep)

test: setup
	@tools/check-host
	@tools/test

# Unit tests alone, under any Python of 3.11 to 3.14: PYTHON=python3.13 make unit. Needs no root if the required programs are installed.
unit:
	@tools/setup unit
	@tools/test unit

# All tests: also slow ones, every scenario in each of its modes, and ten times the examples of Hypothesis.
test-all: setup
	@tools/check-host
	@tools/test all

# Fuzzes the parsers of external bytes: one TARGET or all of them, for MINUTES each.
fuzz: setup
	@tools/fuzz $(or $(MINUTES),1) $(TARGET)

lint: setup
	@.venv/bin/ruff check
	@.venv/bin/ruff format --check
	@.venv/bin/mypy
	@.venv/bin/lint-imports

conformance: setup
	@tools/check-host
	@$(PY) tools/conformance $(CONFORMANCE) $(KINDS)

# In guests, because few kernels have IPVS; expectations are those of iptables mode. GUESTS is the number of parallel guests.
conformance-ipvs: setup
	@tools/check-host
	@$(PY) -m support.guest.conformance --guests $(GUESTS) $(CONFORMANCE)

# Tests that need flowtables, under Debian's kernel in an emulated machine: minutes, so not in `make test`.
machine: setup
	@tools/check-host
	@tools/guest-kernel
	@$(PY) -m support.guest.machine $(PY) -m pytest --color=no -pno:xdist -pno:randomly -pno:cacheprovider -pno:cov \
		--noconftest tests/guest/machine

# Tests with the kernels, nft, iptables and Python of other Debians: docs/support.md has the table.
# Each of ROWS with a kernel of Debian takes an hour or more.
matrix: setup
	@tools/check-host
	@$(PY) -m support.guest.matrix run $(ROWS) $(WITH)

bench: setup
	@tools/check-host
	@$(PY) -m bench $(WHAT)

# Random histories of a cluster, judged by a model: docs/reliability.md describes the variables.
prove: setup
	@tools/check-host
	@$(PY) -m compileall -q src lab prove tests/support
	@$(PY) -m prove $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(STEPS),--steps $(STEPS)) \
		$(if $(HISTORIES),--histories $(HISTORIES)) $(if $(WORLDS),--worlds $(WORLDS)) $(if $(MODE),--mode $(MODE)) \
		$(if $(MUTATION),--mutation "$(MUTATION)") $(if $(CRASHES),--crashes $(CRASHES)) $(if $(REFUSALS),--refusals $(REFUSALS))

# Runs one proxy for SOAK minutes with continuous changes and open connections: docs/reliability.md.
soak: setup
	@tools/check-host
	@$(PY) -m prove.soak --minutes $(SOAK) $(if $(MODE),--mode $(MODE)) $(if $(SEED),--seed $(SEED)) $(WITH)

# Replaces our proxy by the Go kube-proxy (its path is PEER) and back, under traffic: docs/migrate.md.
wayback: setup
	@tools/check-host
	@$(PY) -m prove.wayback --peer "$(PEER)" $(WITH)

# Compares the Go kube-proxy's rules and ours for the same objects, for all packets: docs/proof.md.
switch: setup
	@tools/check-host
	@$(PY) -m prove.switch --peer "$(PEER)" $(WITH)

# Upstream's end-to-end tests on two real nodes, with ours or the Go kube-proxy: docs/conformance.md.
e2e: setup
	@tools/check-host
	@$(PY) -m e2e run --kubernetes "$(KUBERNETES)" $(if $(PROXY),--proxy $(PROXY)) $(if $(MODE),--mode $(MODE)) \
		$(if $(FOCUS),--focus '$(FOCUS)') $(if $(RESUME),--resume) $(WITH)

# The same cluster, disrupted under traffic: docs/disruption.md.
disrupt: setup
	@tools/check-host
	@$(PY) -m e2e disrupt --kubernetes "$(KUBERNETES)" $(if $(PROXY),--proxy $(PROXY)) $(if $(MODE),--mode $(MODE)) \
		$(if $(FOCUS),--focus '$(FOCUS)') $(if $(PREVIOUS),--previous $(PREVIOUS))

# Installs on a node: /opt/kube-proxy, /usr/local/bin/kube-proxy, a systemd unit, manual pages and completion. No tests.
node:
	@tools/node

# Builds the same as one file for other nodes, dist/kube-proxy.pyz.
dist:
	@tools/dist

# Builds all files of a release with checksums; a commit always gives the same bytes: docs/install.md. TAG refuses other versions.
release:
	@tools/dist --all $(if $(TAG),--tag $(TAG))

clean:
	@rm -rf .venv dist bench/out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -prune -exec rm -rf {} +
