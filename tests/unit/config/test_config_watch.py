"""The proxy watches the configuration file: edits, symlink swaps, invalid files."""

import asyncio
import logging
import os
from pathlib import Path
from unittest import mock

import pytest

from kubeproxy.config import load
from kubeproxy.config.load import load_text
from kubeproxy.config.types import with_values
from support.scripted import eventually

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
INTERVAL = 0.01


TURNS = 5
"""The number of reads of the file's status in which a change is noticed; the pause has no limit on a busy machine."""


def first_change(path, running, *edits, resolve=lambda config: config, invalid=lambda _: None):
    """Return the first change that is reported during a series of edits, or None."""

    async def scenario():
        with mock.patch.object(load, "_signature", wraps=load._signature) as status:

            async def noticed():
                until = status.call_count + TURNS
                await eventually(lambda: status.call_count >= until or task.done())

            changes = load.watch(path, running, resolve, INTERVAL, invalid)
            task = asyncio.create_task(anext(changes))
            for edit in (*edits, lambda: None):
                await noticed()
                edit()
            await noticed()
            found = task.result() if task.done() else None
            task.cancel()
            await asyncio.wait([task])
            await changes.aclose()
            return found

    return asyncio.run(scenario())


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.conf"
    path.write_text(HEAD + "mode: ipvs\n")
    return path


@pytest.fixture
def running(file):
    return load_text(file.read_text())


def replace(path: Path, text: str) -> None:
    other = path.with_name("new")
    other.write_text(text)
    other.replace(path)


def test_an_edit_in_place(file, running):
    change = first_change(file, running, lambda: file.write_text(HEAD + "mode: iptables\n"))
    assert change == ['mode: "ipvs" -> "iptables"']


def test_a_file_moved_over_it(file, running):
    change = first_change(file, running, lambda: replace(file, HEAD + "mode: ipvs\noomScoreAdj: 1\n"))
    assert change == ["oomScoreAdj: -999 -> 1"]


def test_a_configmaps_symlink_swap(tmp_path):
    for name, mode in (("..1", "ipvs"), ("..2", "iptables")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.conf").write_text(HEAD + f"mode: {mode}\n")
        os.utime(tmp_path / name / "config.conf", (1, 1))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "config.conf").symlink_to("..data/config.conf")

    def swap():
        (tmp_path / "..data_tmp").symlink_to("..2")
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    change = first_change(tmp_path / "config.conf", load_text(HEAD + "mode: ipvs\n"), swap)
    assert change == ['mode: "ipvs" -> "iptables"']


def test_a_change_before_the_watch_began_is_noticed(file):
    change = first_change(file, load_text(HEAD))
    assert change == ['mode: "" -> "ipvs"']


def test_a_touch_or_a_comment_is_no_change(file, running):
    assert first_change(file, running, file.touch, lambda: file.write_text(HEAD + "mode: ipvs # here\n")) is None


def test_a_bad_file_is_reported_and_the_next_good_one_counts(file, running, caplog):
    told = []
    with caplog.at_level(logging.ERROR, "kubeproxy.config"):
        change = first_change(
            file,
            running,
            lambda: file.write_text(HEAD + "mode: x\noomScoreAdj: 5000\n"),
            file.touch,
            lambda: file.write_text(HEAD + "mode: ipvs\noomScoreAdj: 7\n"),
            invalid=told.append,
        )
    assert told == [False, True, True, False]
    assert change == ["oomScoreAdj: -999 -> 7"]
    (record,) = caplog.records
    assert "is not used: oomScoreAdj: must be from -1000 to 1000, got 5000" in record.getMessage()
    assert "mode: expected nftables" in record.getMessage()


def test_a_file_that_goes_away_and_comes_back(file, running, caplog):
    change = first_change(file, running, file.unlink, lambda: file.write_text(HEAD + "mode: iptables\n"))
    assert change == ['mode: "ipvs" -> "iptables"']
    assert "is not used" in caplog.text


def test_flags_precede_the_changed_file(file):
    def resolve(config):
        return with_values(config, {"logging.verbosity": 4})

    running = resolve(load_text(file.read_text()))
    text = HEAD + "mode: ipvs\nlogging: {verbosity: 2}\n"
    assert first_change(file, running, lambda: file.write_text(text), resolve=resolve) is None


def test_lenient_reading_is_reported_for_a_changed_file_only(file, running, caplog):
    file.write_text(HEAD + "mode: ipvs\nfoo: 1\n")
    first_change(file, running, lambda: file.write_text(HEAD + "mode: iptables\nbar: 1\n"))
    assert "foo" not in caplog.text
    assert "bar: unknown field" in caplog.text
