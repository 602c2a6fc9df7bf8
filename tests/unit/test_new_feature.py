"""A feature is one declaration: a feature added in memory has its flag, its value on the node, and its warning."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from kubeproxy.features import FEATURES
from kubeproxy.model.objects import Annotations

PROGRAM = """
from kubeproxy import features
from kubeproxy.features import Feature

ECHO = Feature[int](
    flag="echo-after", default=0, usage="Echo.", off=0, modes=frozenset({"ipvs"}),
    mistake=lambda value, flags: "must not be odd" if value % 2 else "", read=lambda value: value * 10,
)
features.FEATURES[ECHO.flag] = ECHO

from kubeproxy.setup import host
from kubeproxy.config.options import build_options
from kubeproxy.config.pflag import parse
from kubeproxy.errors import ConfigError
from kubeproxy.model.world import Surroundings, build

for mode in ("ipvs", "nftables"):
    line = ["--proxy-mode", mode, "--feature-gates", "KubeProxyIPVS=true", "--echo-after=4"]
    options = build_options(parse(line))
    world = build(host.settings(options.config, options.features), Surroundings())
    print(mode, ECHO.value(world), options.idle)
try:
    build_options(parse(["--echo-after", "3"]))
except ConfigError as error:
    print(error)
"""


def test_a_new_feature_needs_no_other_file() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    assert found.stdout.splitlines() == [
        "ipvs 40 ",
        "nftables 0 --echo-after has no effect in mode nftables",
        "--echo-after: must not be odd",
    ]


def test_each_of_our_annotations_belongs_to_one_feature() -> None:
    ours = [field.encode_name for field in msgspec.structs.fields(Annotations)]
    declared = [name for feature in FEATURES.values() for name in feature.annotations]
    assert sorted(declared) == sorted(set(ours) - {"endpoints.kubernetes.io/last-change-trigger-time"})


@pytest.mark.parametrize("feature", FEATURES.values(), ids=list(FEATURES))
def test_a_feature_is_off_where_its_mode_does_not_support_it(feature) -> None:
    assert feature.supported("")
    assert feature.modes is None or not feature.supported("memory")
