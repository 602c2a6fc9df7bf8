"""`--strict`: extensions are off, refusals are ICMP errors, and `plan` shows the difference before the switch."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from lab.proxyprocess import configuration
from prove.switch import OFFERS
from support import forking, recorded_rules
from support.live import METRICS_PORT, TIMEOUT, Live
from support.modes import modes
from support.traffic import DUAL

pytestmark = modes("nftables")


async def refusal(live: Live) -> str:
    return await live.nft("list", "chain", "ip", "kube-proxy", "refuse")


@pytest.mark.slow("two starts and two comparisons")
async def test_a_strict_proxy_shares_evenly_and_refuses_as_the_go_kube_proxy_does(bare: Live) -> None:
    bare.service("weighted", "a1 b1")
    bare.cluster.patch("services", "weighted", {"metadata": {"annotations": {"kube-proxy-py/weights": "node-b=50"}}})
    bare.service("none", "", type="NodePort")
    ours = await bare.start()
    await bare.programmed(bare.front("weighted"), "a1 b1")
    await bare.expect(bare.front("none"), {"pod": "refused", "outside": "refused"}, "tcp")
    assert "tcp reset" in await refusal(bare)

    for words in (["--strict"], ["--strict", "--config", str(ours.config)]):
        status, text = await bare.ask("plan", "--from-kernel", *words)
        assert status == 1, text
        shares = re.findall(r"(now|then): ([\d.]+)%", text)
        assert shares == [("now", "66.7"), ("then", "50.0")] * 3, text  # pods, the endpoint itself, outside
    status, text = await bare.ask("plan", "--strict")
    assert status == 1, text
    assert "strict: unset -> true" in text
    assert "annotations for weights and consistent hashing are ignored: shares become equal (1 Service)" in text

    await ours.stop()
    strict = await bare.start(args=["--strict"])
    await bare.programmed(bare.front("weighted"), "a1 b1")
    await bare.expect(bare.front("none"), {"pod": "refused", "outside": "refused"}, "tcp")
    assert "tcp reset" not in await refusal(bare)
    configz = json.loads(await bare.run("curl", "-s", f"http://127.0.0.1:{METRICS_PORT}/configz"))
    (shown,) = configz.values()
    assert (shown["strict"], shown["mode"], shown["nftables"]["minSyncPeriod"]) == (True, "nftables", "1s")
    status, text = await bare.ask("plan", "--config", str(strict.config))
    assert (status, text.strip()) == (0, "Nothing differs."), "the flag applies with the file, too"
    status, text = await bare.ask("plan", "--config", str(strict.config), "--strict=false")
    assert (status, "strict: true -> unset" in text) == (1, True), text
    status, text = await bare.ask("plan", "--from-kernel")
    assert (status, text.count("proved for all packets")) == (0, 2), text
    await strict.stop()


@pytest.mark.slow("a comparison of twenty Services")
@pytest.mark.parametrize("program", recorded_rules.PROGRAMS)
async def test_the_recorded_rules_of_the_go_kube_proxy_are_those_of_a_strict_proxy(
    bare: Live, tmp_path: Path, program: str
) -> None:
    """The rules were recorded for the Services of `prove.switch`, to which the lab gives the same addresses again."""
    for name, (endpoints, spec) in OFFERS.items():
        bare.service(name, endpoints, **spec, **DUAL)
    await bare.until(lambda: all(map(bare.has_addresses, OFFERS)), "addresses of load balancers")
    rules = tmp_path / "rules"
    rules.write_text(recorded_rules.text(program))
    await bare.run(*{"nftables": ("nft", "-f"), "iptables": ("iptables-nft-restore",)}[program], str(rules))
    file = tmp_path / "config.yaml"
    mode = "" if program == "iptables" else program
    file.write_text(yaml.safe_dump(configuration(bare.cluster.node_kubeconfig, {"mode": mode})))

    async def found(*flags: str) -> tuple[int, list[object], list[object]]:
        where = ["--kubeconfig", str(bare.cluster.node_kubeconfig), "--config", str(file), "-o", "json"]
        namespace = bare.cluster.namespace_of("node")
        _, text = await forking.ask(namespace, ["plan", "--from-kernel", *flags, *where], TIMEOUT)
        (family,) = (each for each in json.loads(text)["families"] if each["family"] == "IPv4")
        return family["classes"], family["differences"], family["unknown"]

    classes, differences, unknown = await found("--strict")
    assert (differences, unknown) == ([], [])
    assert classes > 500
    if not mode:
        _, differences, _ = await found()
        assert differences  # without --strict the empty mode means nftables
