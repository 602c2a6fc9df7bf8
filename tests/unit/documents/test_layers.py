"""docs/architecture.md lists the layers that import-linter checks."""

import tomllib

from support.documents import document
from support.places import ROOT

CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
PAGE = document("docs/architecture.md")


def test_the_table_has_the_layers_of_the_contract() -> None:
    layers = next(contract["layers"] for contract in CONTRACTS if contract["type"] == "layers")
    held = [{room.strip().removeprefix("kubeproxy.") for room in layer.split("|")} for layer in layers]
    said: dict[int, set[str]] = {}
    for layer, room, _ in PAGE.table("Rooms"):
        said.setdefault(int(layer), set()).add(room.strip("`").removesuffix(".py").rstrip("/"))
    assert said == dict(enumerate(held, 1))


def test_every_room_is_in_a_layer() -> None:
    rooms = {
        path.stem
        for path in (ROOT / "src/kubeproxy").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert rooms - {"__init__"} == {
        room.strip("`").removesuffix(".py").rstrip("/") for _, room, _ in PAGE.table("Rooms")
    }


def test_the_other_differences_are_reported() -> None:
    text = " ".join(PAGE.path.read_text(encoding="utf-8").split())
    assert [
        contract["name"] for contract in CONTRACTS if contract["type"] != "layers" and contract["name"] not in text
    ] == []
