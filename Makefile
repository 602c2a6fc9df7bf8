# Two commands matter: `make demo` and `make test`. Both set up what they need; the demo needs less.
PY := .venv/bin/python
# The cases and their runner: a set that several checkouts share if there is one, else this repository's.
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

# Unit tests alone, under any Python of 3.11 to 3.14: PYTHON=python3.13 make unit. No root, if their programs are installed.
unit:
	@tools/setup unit
	@tools/test unit

# With what is marked slow, every scenario in each of its modes, and ten times the examples of Hypothesis.
test-all: setup
	@tools/check-host
	@tools/test all

# New inputs for the readers of others' bytes: for one TARGET or all of them, so many MINUTES each.
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

# In guests, since few kernels have IPVS; expectations are those of iptables mode. GUESTS run side by side.
conformance-ipvs: setup
	@tools/check-host
	@$(PY) -m support.guest.conformance --guests $(GUESTS) $(CONFORMANCE)

# What needs flowtables, under Debian's kernel in an emulated machine: minutes, so no part of `make test`.
machine: setup
	@tools/check-host
	@tools/guest-kernel
	@$(PY) -m support.guest.machine $(PY) -m pytest --color=no -pno:xdist -pno:randomly -pno:cacheprovider -pno:cov \
		--noconftest tests/guest/machine

# The kernels, nft, iptables and Python of other Debians: docs/support.md has the table.
# An hour or more for each of ROWS with a kernel of Debian.
matrix: setup
	@tools/check-host
	@$(PY) -m support.guest.matrix run $(ROWS) $(WITH)

bench: setup
	@tools/check-host
	@$(PY) -m bench $(WHAT)

# Random histories of a cluster, judged by a model: docs/reliability.md says what the variables are.
prove: setup
	@tools/check-host
	@$(PY) -m compileall -q src lab prove tests/support
	@$(PY) -m prove $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(STEPS),--steps $(STEPS)) \
		$(if $(HISTORIES),--histories $(HISTORIES)) $(if $(WORLDS),--worlds $(WORLDS)) $(if $(MODE),--mode $(MODE)) \
		$(if $(MUTATION),--mutation "$(MUTATION)") $(if $(CRASHES),--crashes $(CRASHES)) $(if $(REFUSALS),--refusals $(REFUSALS))

# One proxy for SOAK minutes, while everything changes and connections are open all the time: docs/reliability.md.
soak: setup
	@tools/check-host
	@$(PY) -m prove.soak --minutes $(SOAK) $(if $(MODE),--mode $(MODE)) $(if $(SEED),--seed $(SEED)) $(WITH)

# From our proxy to the Go one and back, under traffic; PEER is its path: docs/migrate.md.
wayback: setup
	@tools/check-host
	@$(PY) -m prove.wayback --peer "$(PEER)" $(WITH)

# The Go kube-proxy's rules and ours for the same objects, compared for all packets: docs/proof.md.
switch: setup
	@tools/check-host
	@$(PY) -m prove.switch --peer "$(PEER)" $(WITH)

# Upstream's end-to-end tests on two real nodes, with ours or the Go kube-proxy: docs/conformance.md says how.
e2e: setup
	@tools/check-host
	@$(PY) -m e2e run --kubernetes "$(KUBERNETES)" $(if $(PROXY),--proxy $(PROXY)) $(if $(MODE),--mode $(MODE)) \
		$(if $(FOCUS),--focus '$(FOCUS)') $(if $(RESUME),--resume) $(WITH)

# The same cluster, disrupted under traffic: docs/disruption.md.
disrupt: setup
	@tools/check-host
	@$(PY) -m e2e disrupt --kubernetes "$(KUBERNETES)" $(if $(PROXY),--proxy $(PROXY)) $(if $(MODE),--mode $(MODE)) \
		$(if $(FOCUS),--focus '$(FOCUS)') $(if $(PREVIOUS),--previous $(PREVIOUS))

# On a node: /opt/kube-proxy, /usr/local/bin/kube-proxy, a systemd unit, manual pages and completion. Nothing of the tests.
node:
	@tools/node

# The same as one file for other nodes, dist/kube-proxy.pyz.
dist:
	@tools/dist

# All files of a release with their checksums, the same bytes for the same commit: docs/install.md. TAG refuses other versions.
release:
	@tools/dist --all $(if $(TAG),--tag $(TAG))

clean:
	@rm -rf .venv dist bench/out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -prune -exec rm -rf {} +
