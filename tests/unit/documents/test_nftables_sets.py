"""docs/nftables.md names every set and map of the proxy's table."""

from kubeproxy.backends.nftables.layout import CLASSES, EXACT, Layout
from kubeproxy.model.addresses import Family
from support.documents import document


def test_the_table_of_sets_is_complete() -> None:
    rows = document("docs/nftables.md").table("Sets and maps by name")
    named = {name.strip("`, ") for row in rows for name in row[0].split("`")}
    assert set(Layout(Family.IPV4).sets) - {"nodeport-ips"} <= named


def test_the_classes_are_those_that_there_are() -> None:
    text = document("docs/nftables.md").path.read_text(encoding="utf-8")
    assert f"1 to {EXACT}, {', '.join(map(str, CLASSES[EXACT : EXACT + 4]))}" in text
    assert f"{CLASSES[-2]}, {CLASSES[-1]}" in text
