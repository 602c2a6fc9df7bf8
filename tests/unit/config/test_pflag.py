"""The command line is parsed as by Go's pflag."""

import pytest

from kubeproxy.config.pflag import parse
from kubeproxy.errors import ConfigError

ACCEPTED = [
    ([], {}),
    (["--config=/etc/c"], {"config": "/etc/c"}),
    (["--config", "/etc/c"], {"config": "/etc/c"}),
    (["--config="], {"config": ""}),
    (["--config", "--v=2"], {"config": "--v=2"}),
    (["--kubeconfig=a=b"], {"kubeconfig": "a=b"}),
    (["--proxy_mode=ipvs"], {"proxy-mode": "ipvs"}),
    (["--boot_id_file=/x", "--machine_id_file=/y"], {"boot-id-file": "/x", "machine-id-file": "/y"}),
    (["-v", "2"], {"v": 2}),
    (["-v=2"], {"v": 2}),
    (["-v2"], {"v": 2}),
    (["--v", "2"], {"v": 2}),
    (["--v=2", "--v=3"], {"v": 3}),
    (["--cleanup"], {"cleanup": True}),
    (["--cleanup=false"], {"cleanup": False}),
    (["--cleanup", "--profiling=1"], {"cleanup": True, "profiling": True}),
    (["-h"], {"help": True}),
    (["-hv2"], {"help": True, "v": 2}),
    (["--version=raw"], {"version": "raw"}),
    (["--version=t"], {"version": "true"}),
    (["--feature-gates=A=true,B=false", "--feature-gates=B=true"], {"feature-gates": {"A": True, "B": True}}),
    (
        ["--nodeport-addresses=10.0.0.0/8,11.0.0.0/8", "--nodeport-addresses=fd00::/8"],
        {"nodeport-addresses": ("10.0.0.0/8", "11.0.0.0/8", "fd00::/8")},
    ),
    (["--vmodule=a=1", "--vmodule=b=2"], {"vmodule": (("a", 1), ("b", 2))}),
    (["--oom-score-adj=-998"], {"oom-score-adj": -998}),
    (["--oom-score-adj", "-998"], {"oom-score-adj": -998}),
]


@pytest.mark.parametrize(("arguments", "given"), ACCEPTED)
def test_accepted(arguments, given):
    line = parse(arguments)
    assert line.given == given
    assert line.words == []


REFUSED = [
    (["--foo"], "unknown flag: --foo"),
    (["--foo=1"], "unknown flag: --foo"),
    (["--hostname-overide=x"], "unknown flag: --hostname-overide; did you mean --hostname-override?"),
    (["--mode=ipvs"], "unknown flag: --mode; did you mean --proxy-mode?"),
    (["--clusterCIDR=10.0.0.0/8"], "unknown flag: --clusterCIDR; did you mean --cluster-cidr?"),
    (["--scheduler", "rr"], "unknown flag: --scheduler; did you mean --ipvs-scheduler?"),
    (["--Cleanup"], "unknown flag: --Cleanup; did you mean --cleanup?"),
    (["--=x"], "bad flag syntax: --=x"),
    (["---v"], "bad flag syntax: ---v"),
    (["--config"], "flag needs an argument: --config"),
    (["-v"], "flag needs an argument: 'v' in -v"),
    (["-x"], "unknown shorthand flag: 'x' in -x"),
    (["-proxy-mode=ipvs"], "unknown shorthand flag: 'p' in -proxy-mode=ipvs; did you mean --proxy-mode=ipvs?"),
    (["-v=x"], 'invalid argument "x" for "-v, --v" flag: strconv.ParseUint: parsing "x": invalid syntax'),
    (
        ["--cleanup=maybe"],
        'invalid argument "maybe" for "--cleanup" flag: strconv.ParseBool: parsing "maybe": invalid syntax',
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_refused(arguments, message):
    with pytest.raises(ConfigError) as caught:
        parse(arguments)
    assert str(caught.value) == message


def test_words_that_are_no_flags():
    line = parse(["a", "-", "--v=1", "b", "--", "--v=2", "-x"])
    assert line.words == ["a", "-", "b", "--v=2", "-x"]
    assert line.given == {"v": 1}


def test_a_deprecated_flag_gives_one_notice():
    line = parse(["--healthz-port=1", "--healthz-port=2", "--logtostderr"])
    assert line.given["healthz-port"] == 2
    assert line.notices == [
        "Flag --healthz-port has been deprecated, use --healthz-bind-address instead.",
        "Flag --logtostderr has been deprecated, because logs go to standard error.",
    ]


def test_all_flags_are_shown_with_their_values():
    shown = dict(parse(["--cleanup", "--feature-gates=B=true,A=false", "--v=3", "--iptables-sync-period=90s"]).shown())
    assert shown["cleanup"] == "true"
    assert shown["feature-gates"] == "A=false,B=true"
    assert shown["v"] == "3"
    assert shown["iptables-sync-period"] == "1m30s"
    assert shown["nodeport-addresses"] == "[]"
    assert shown["kube-api-qps"] == "5"
    assert "logtostderr" not in shown
