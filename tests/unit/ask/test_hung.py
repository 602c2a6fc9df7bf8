"""`doctor` of a proxy that does not answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kubeproxy.ask.checks import doctor
from kubeproxy.ask.checks.checkup import Checkup
from kubeproxy.errors import NoAnswerError
from kubeproxy.kernel.proc import processes


@pytest.mark.parametrize(("cause", "marks"), [(TimeoutError(), ["x"]), (FileNotFoundError(), [])])
def test_a_proxy_that_hangs_is_an_error(cause: OSError, marks: list[str], monkeypatch: pytest.MonkeyPatch):
    def source(_: object) -> None:
        raise NoAnswerError("the proxy did not answer") from cause

    monkeypatch.setattr(doctor, "source", source)
    monkeypatch.setattr(doctor, "look_at", lambda _: Checkup([], []))
    monkeypatch.setattr(processes, "named", lambda _: True)
    given = SimpleNamespace(
        config="", proxy_mode="", hostname_override="", control_socket="", manifests="", kubeconfig=""
    )
    _, report = doctor.examine(given)  # type: ignore[arg-type]
    assert [one.severity.mark for one in report.findings] == marks
    assert [text for text in report.unknown if "the proxy did not answer" in text] == ["the proxy did not answer"] * (
        not marks
    )
