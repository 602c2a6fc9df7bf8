"""docs/nftables.md names every set and map of our table."""

from kubeproxy.backends.nftables.layout import CLASSES, Layout
from kubeproxy.model.addresses import Family
from support.documents import document


def test_the_table_of_sets_is_complete() -> None:
    rows = document("docs/nftables.md").table("Sets and maps by name")
    named = {name.strip("`, ") for row in rows for name in row[0].split("`")}
    of_classes = {f"-{size}" for size in CLASSES}
    ours = {name for name in Layout(Family.IPV4).shapes if not any(name.endswith(end) for end in of_classes)}
    assert ours - {"nodeport-ips"} <= named
    assert f"... {CLASSES[-1]} |" in document("docs/nftables.md").path.read_text(encoding="utf-8")
