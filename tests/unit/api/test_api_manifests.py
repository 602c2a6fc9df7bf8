import asyncio
import contextlib
import json
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.api.manifests import ManifestSource, read_documents
from kubeproxy.errors import ConfigError
from kubeproxy.model.events import Deleted, Rejected, Replaced, Upserted
from support.scripted import eventually


class Folder:
    """A folder, a source that reads it with the test's clock, and the source's deliveries."""

    def __init__(self, path, node_name=""):
        self.path = path
        self.now = 0.0
        self.events = []
        self.source = ManifestSource(str(path), self.events.extend, node_name, clock=lambda: self.now)

    def write(self, name, text):
        (self.path / name).write_text(textwrap.dedent(text))

    def scan(self, after=0.0):
        """Return the deliveries of one poll, in words."""
        self.now += after
        self.events.clear()
        self.source.scan()
        return [words(event) for event in self.events]


def words(event):
    match event:
        case Replaced(resource, objects):
            return " ".join([f"={resource}", *sorted(found.metadata.name for found in objects)])
        case Upserted(_, found):
            return f"+{found.metadata.name}"
        case Deleted(_, _, name):
            return f"-{name}"
        case Rejected(_, _, name, _, field):
            return f"!{name}: {field}"
    return "?"


def service(name, ip="10.0.0.1", namespace=""):
    where = f", namespace: {namespace}" if namespace else ""
    head = f"apiVersion: v1\nkind: Service\nmetadata: {{name: {name}{where}}}\n"
    return head + f"spec: {{clusterIP: {ip}, ports: [{{port: 80}}]}}\n"


EMPTY = ["=services", "=endpointslices", "=nodes", "=servicecidrs"]


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_the_first_look_delivers_every_resource(folder):
    assert folder.scan() == EMPTY
    assert folder.scan() == []
    assert all(status.synced for status in folder.source.statuses.values())


def bomb(levels):
    """A document of one kilobyte: nine nested lists of nine aliases each."""
    lines = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "apiVersion: v1\nkind: Service\nmetadata: {name: bomb}\na0: &a0 [boom]\n" + "\n".join(lines)


MERGES = "a0: &a0 {x: 1}\n" + "\n".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 20))
EXPLOSIVE = {
    "aliases": (bomb(20), "line 11: more than 2000000 values"),
    "merges": (MERGES, "line 7: more than 2000000 values"),
    "long text": (f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 2_000)}]", "line 2: more than 2000000 values"),
    "itself": ("a: &a [*a]", "line 1: *a contains itself"),
    "lists": ("[" * 100_000, "line 1: nested deeper than 64 levels"),
    "dashes": ("- " * 100_000, "line 1: nested deeper than 64 levels"),
    "maps": ("{a: " * 1_000, "line 1: nested deeper than 64 levels"),
    "no text": (b"a: \xff", "is not UTF-8 text, see byte 4"),
    "a list for a key": ("? [a]\n: b", "line 1, column 3: a key must be text"),
}


@pytest.mark.parametrize(("text", "reason"), EXPLOSIVE.values(), ids=EXPLOSIVE)
def test_a_file_that_would_explode_is_named_and_costs_only_itself(folder, text, reason):
    folder.write("a.yaml", service("a"))
    folder.scan()
    (folder.path / "b.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    folder.write("c.yaml", service("c", "10.0.0.2"))
    assert folder.scan() == ["+c", "!: b.yaml: document 1"]
    assert folder.events[-1].reason.startswith(f"cannot be read: {reason}")
    assert "Errno" not in folder.events[-1].reason
    assert "codec" not in folder.events[-1].reason


def test_aliases_within_bounds_are_fine(folder):
    first = "- &a {apiVersion: v1, kind: Service, metadata: {name: a}, spec: {ports: &p [{port: 80}]}}"
    folder.write("a.yaml", f"kind: List\nitems:\n{first}\n- {{<<: *a, metadata: {{name: b}}}}")
    assert folder.scan()[0] == "=services a b"


def test_documents_lists_and_json(folder):
    folder.write(
        "a.yaml", "%YAML 1.1\n---\n# nothing\n---\n" + service("a") + "---   # more\n" + service("b") + "...\n"
    )
    items = [{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n", "namespace": "x"}}]
    folder.write("b.json", json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    cidrs = {"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDRList", "items": [{"metadata": {"name": "c"}}]}
    folder.write("c.yml", json.dumps(cidrs))
    folder.write("d.yaml", "")
    folder.write("e.txt", "junk")
    folder.write(".f.yaml", "junk: [")
    assert folder.scan() == ["=services a b", "=endpointslices", "=nodes n", "=servicecidrs c"]
    assert folder.events[0].objects[0].metadata.namespace == "default"
    assert folder.events[2].objects[0].metadata.namespace is None


def slice_text(name, service):
    return f"""apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: {name}, labels: {{kubernetes.io/service-name: {service}}}}}
addressType: IPv4
endpoints: [{{addresses: [10.0.1.1], zone: eu-1}}]
ports: [{{port: 80}}]
"""


def test_a_changed_zone_is_a_change(folder):
    folder.write("a.yaml", slice_text("web-1", "web") + "---\n" + slice_text("other-1", "other"))
    folder.scan()
    assert folder.events[1].objects[0].endpoints[0].zone == "eu-1"
    folder.write(
        "a.yaml", slice_text("web-1", "web").replace("eu-1", "eu-2") + "---\n" + slice_text("other-1", "other")
    )
    assert folder.scan(1) == ["+web-1"]
    assert folder.events[0].object.endpoints[0].zone == "eu-2"


def test_changes_are_delivered_as_differences(folder):
    folder.write("a.yaml", service("a") + "---\n" + service("b"))
    folder.scan()
    folder.write("a.yaml", service("a") + "---\n" + service("b", "10.0.0.99"))
    assert folder.scan() == ["+b"]
    folder.write("a.yaml", service("a") + "---\n" + service("c"))
    assert folder.scan() == ["-b", "+c"]
    folder.write("b.yaml", service("d"))
    assert folder.scan() == ["+d"]
    (folder.path / "a.yaml").unlink()
    assert folder.scan() == []
    assert folder.scan(after=0.05) == []
    assert folder.scan(after=0.06) == ["-a", "-c"]


def test_editors_may_rename_and_truncate(folder):
    folder.write("a.yaml", service("a"))
    folder.scan()
    (folder.path / "a.yaml").rename(folder.path / "a.yaml~")
    assert folder.scan() == []
    folder.write("a.yaml", service("a", "10.0.0.2"))
    assert folder.scan(after=0.05) == ["+a"]
    (folder.path / "a.yaml").write_text("")
    assert folder.scan() == []
    folder.write("a.yaml", service("a", "10.0.0.3"))
    assert folder.scan(after=5) == ["+a"]
    (folder.path / "a.yaml").write_text("")
    assert folder.scan() == []
    assert folder.scan(after=5) == ["-a"]


INVALID = [
    ("spec: [", "a.yaml: document 2", "cannot be read"),
    ("5", "a.yaml: document 2: kind", "must be one of"),
    ("kind: [Service]", "a.yaml: document 2: kind", "must be one of"),
    ("kind: Service", "a.yaml: document 2: apiVersion", "use v1"),
    ("kind: EndpointSlice\napiVersion: v1", "a.yaml: document 2: apiVersion", "use discovery.k8s.io/v1"),
    ("kind: Service\napiVersion: v1", "a.yaml: document 2: metadata", "is missing"),
    ("kind: Service\napiVersion: v1\nmetadata: {name: b}\nspec: {ports: 5}", "a.yaml: document 2: spec.ports", "array"),
    ("kind: Service\napiVersion: v1\nmetadata: {name: [b]}", "a.yaml: document 2: metadata.name", "string"),
    ("kind: Service\napiVersion: v1\nmetadata: {name: b}\nspec: &x {y: *x}", "a.yaml: document 2", ""),
    ("kind: Service\napiVersion: v1\nmetadata: {name: b}\n? [1]\n: 2", "a.yaml: document 2", ""),
]


@pytest.mark.parametrize(("text", "field", "reason"), INVALID)
def test_an_invalid_document_keeps_its_last_good_state(folder, text, field, reason):
    folder.write("a.yaml", "---\n".join([service("a"), service("b"), service("c")]))
    folder.scan()
    folder.write("a.yaml", "---\n".join([service("a"), text + "\n", service("c", "10.0.0.2")]))
    delivered = folder.scan()
    assert delivered[0] == "+c"
    assert "-b" not in delivered
    problem = folder.events[1]
    assert problem.field == field
    assert reason in problem.reason
    assert folder.scan() == []
    folder.write("a.yaml", service("a"))
    assert sorted(folder.scan()) == ["-b", "-c"]


@pytest.mark.parametrize(
    ("metadata", "port", "field"),
    [
        ({"name": "web:x"}, "", "metadata.name"),  # would have the same chain names as port x of Service web
        ({"name": "b/web", "namespace": "a"}, "", "metadata.name"),
        ({"name": "web", "namespace": "a/b"}, "", "metadata.namespace"),
        ({"name": "web"}, "http:x", "spec.ports[1].name"),
        ({"name": "Web"}, "", "metadata.name"),
        ({"name": "-web"}, "", "metadata.name"),
        ({"name": "web\n"}, "", "metadata.name"),
        ({"name": "w" * 64}, "", "metadata.name"),
    ],
)
def test_names_that_no_api_server_takes_are_refused(folder, metadata, port, field):
    ports = [{"port": 80, "name": "a"}, {"port": 81, "name": port}]
    spec = {"clusterIP": "10.0.0.9", "ports": ports}
    odd = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}
    folder.write("a.yaml", service("a") + "---\n" + json.dumps(odd) + "\n---\n" + service("b"))
    delivered = folder.scan()
    assert delivered[:4] == ["=services a b", *EMPTY[1:]]
    [problem] = folder.events[4:]
    assert (problem.namespace, problem.name) == (metadata.get("namespace", "default"), metadata["name"])
    assert problem.field == f"a.yaml: document 2: {field}"
    assert "lower-case" in problem.reason


def test_an_invalid_document_in_the_first_look_is_reported_beside_the_lists(folder):
    folder.write("a.yaml", "x: [\n---\n" + service("b"))
    assert folder.scan() == ["=services b", *EMPTY[1:], "!: a.yaml: document 1"]


def test_a_wrong_entry_costs_only_itself_and_names_the_item(folder):
    text = """
        apiVersion: v1
        kind: List
        items:
        - {apiVersion: v1, kind: Service, metadata: {name: a}, spec: {ports: [{port: 80}, {port: x}]}}
        """
    folder.write("a.yaml", text)
    assert folder.scan() == ["=services a", *EMPTY[1:], "!a: a.yaml: document 1: items[0].spec.ports[1].port"]


def test_bytes_that_are_no_text(folder):
    (folder.path / "a.yaml").write_bytes(b"\xff\xfe\x00kind")
    folder.write("b.yaml", service("b"))
    assert folder.scan() == ["=services b", *EMPTY[1:], "!: a.yaml: document 1"]


def test_a_file_that_cannot_be_read_keeps_its_last_state(folder, monkeypatch, caplog):
    folder.write("a.yaml", service("a"))
    folder.scan()
    with monkeypatch.context() as patch:
        patch.setattr("kubeproxy.api.manifests.MAX_FILE", 10)
        folder.write("a.yaml", service("b", "10.0.0.22"))
        assert folder.scan() == folder.scan() == []
        assert caplog.text.count("so the last state remains: the file is larger than") == 1
    assert folder.scan() == ["-a", "+b"]


def test_the_first_file_by_name_wins(folder):
    folder.write("b.yaml", service("x", "10.0.0.2") + "---\n" + service("y"))
    folder.scan()
    folder.write("a.yaml", service("x", "10.0.0.1"))
    assert folder.scan() == ["+x", "!x: b.yaml"]
    assert folder.scan() == []
    (folder.path / "a.yaml").unlink()
    folder.scan()
    assert folder.scan(after=1) == ["+x"]


def test_of_excluded_objects_only_services_are_kept_for_questions(tmp_path):
    folder = Folder(tmp_path, "here")
    head = "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n"
    documents = [
        service("headless", "None"),
        service("a"),
        "apiVersion: v1\nkind: Service\nmetadata: {name: o, labels: {service.kubernetes.io/service-proxy-name: x}}\n",
        head + "metadata: {name: s1, labels: {kubernetes.io/service-name: a}}\n",
        head + "metadata: {name: s2, labels: {service.kubernetes.io/headless: ''}}\n",
        "apiVersion: v1\nkind: Node\nmetadata: {name: here}\n",
        "apiVersion: v1\nkind: Node\nmetadata: {name: there}\n",
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d}\n",
    ]
    folder.write("a.yaml", "---\n".join(documents))
    assert folder.scan() == ["=services a headless o", "=endpointslices s1", "=nodes here", "=servicecidrs"]
    folder.write("a.yaml", service("a", "None"))
    assert "+a" in folder.scan()


def test_a_config_map_is_swapped_by_its_link(folder):
    for name, ip in (("..1", "10.0.0.1"), ("..2", "10.0.0.2")):
        (folder.path / name).mkdir()
        (folder.path / name / "a.yaml").write_text(service("a", ip))
    (folder.path / "..data").symlink_to("..1")
    (folder.path / "a.yaml").symlink_to("..data/a.yaml")
    assert folder.scan() == ["=services a", *EMPTY[1:]]
    (folder.path / "..tmp").symlink_to("..2")
    (folder.path / "..tmp").rename(folder.path / "..data")
    assert folder.scan() == ["+a"]


def test_no_folder_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="--manifests"):
        ManifestSource(str(tmp_path / "none"), print)


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode), st.sampled_from(["a.yaml", "a.json"]))
def test_any_bytes_in_a_file_never_raise(data, name):
    read_documents(name, data)


def live(path, use, poll=1.0):
    events = []

    async def main():
        source = ManifestSource(str(path), events.extend, poll=poll, grace=0.02)
        task = asyncio.create_task(source.run())
        try:
            await eventually(lambda: len(events) >= 4)
            await use(events)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(main())
    return [words(event) for event in events[4:]]


@pytest.mark.parametrize("inotify", [True, False])
def test_changes_are_seen_live(tmp_path, monkeypatch, inotify):
    if not inotify:
        monkeypatch.setattr("kubeproxy.api.manifests._EVENTS", 0)  # refused as invalid: no inotify watch, so polling

    async def use(events):
        (tmp_path / "a.yaml").write_text(service("a"))
        await eventually(lambda: len(events) >= 5)
        (tmp_path / ".new").write_text(service("a", "10.0.0.2"))
        (tmp_path / ".new").rename(tmp_path / "a.yaml")
        await eventually(lambda: len(events) >= 6)
        (tmp_path / "a.yaml").unlink()
        await eventually(lambda: len(events) >= 7)

    # An hour between polls: only inotify can report the change.
    assert live(tmp_path, use, poll=3600.0 if inotify else 0.02) == ["+a", "+a", "-a"]


def test_a_folder_that_is_replaced_is_followed(tmp_path):
    watched = tmp_path / "watched"
    watched.mkdir()

    async def use(events):
        (watched / "a.yaml").write_text(service("a"))
        await eventually(lambda: len(events) >= 5)
        watched.rename(tmp_path / "old")
        await asyncio.sleep(0.1)
        assert len(events) == 5
        watched.mkdir()
        (watched / "a.yaml").write_text(service("a", "10.0.0.2"))
        await eventually(lambda: len(events) >= 6)
        await asyncio.sleep(0.1)
        (watched / "b.yaml").write_text(service("b"))
        await eventually(lambda: len(events) >= 7)

    assert live(watched, use, poll=0.03) == ["+a", "+a", "+b"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("blank", ["\n", "\r", " ", "\n \n", "# \n"])
def test_many_blanks_before_a_document_take_no_time(blank):
    """Forty of these once took a day, because a parser could skip each in several ways."""
    document = "{apiVersion: v1, kind: Service, metadata: {name: a}, spec: {ports: [{port: 80}]}}"
    content = read_documents("a.yaml", f"{blank * 5000}\n{document}\n---\n{blank * 5000}\n---\n%YAML 1.1".encode())
    assert [name for _, _, name in content.found] == ["a"]
    assert content.rejected == []
