"""Counters, gauges and histograms with labels, and their Prometheus text form (exposition format 0.0.4).

The Prometheus client library is not used, because its import takes 25-50 ms and 5 MB. The registry is not thread-safe:
metrics change and are rendered on the event loop's thread.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, TypeVar

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class GaugeMetric:
    """A number that can increase and decrease."""

    __slots__ = ("_function", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._function: Callable[[], float] | None = None

    def set(self, value: float) -> None:
        """Set the number."""
        self.value = value

    def add(self, by: float) -> None:
        """Add to the number."""
        self.value += by

    def follow(self, function: Callable[[], float]) -> None:
        """At each rendering, set the number to the function's value. The function must be fast and not raise."""
        self._function = function

    def samples(self) -> Iterable[tuple[str, str, float]]:
        """Return (suffix of the name, additional label text, value) for each sample."""
        if self._function is not None:
            self.set(self._function())
        return (("", "", self.value),)


class CounterMetric(GaugeMetric):
    """A number that only increases."""

    __slots__ = ()

    def inc(self, by: float = 1.0) -> None:
        """Add a number, which must not be negative."""
        if by < 0:
            raise ValueError(f"a counter cannot go down by {-by}")
        self.value += by

    def set(self, value: float) -> None:
        """Set the total that another program, such as the kernel, has counted. A total below the earlier total is
        ignored."""
        self.value = max(self.value, value)


class Histogram:
    """The number of observations up to each bound, and the sum of all observations."""

    __slots__ = ("_bounds", "_counts", "_labels", "total")

    def __init__(self, bounds: Sequence[float], labels: Sequence[str]) -> None:
        self._bounds = bounds
        self._labels = labels
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation, in the metric's unit."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """The number of observations."""
        return sum(self._counts)

    def samples(self) -> Iterable[tuple[str, str, float]]:
        """Return samples in the form of GaugeMetric.samples: the cumulative buckets, the sum and the count."""
        seen = 0
        for label, number in zip(self._labels, self._counts, strict=True):
            seen += number
            yield "_bucket", label, seen
        yield "_sum", "", self.total
        yield "_count", "", seen


C = TypeVar("C", CounterMetric, GaugeMetric, Histogram)


class MetricFamily(Generic[C]):
    """All time series with one name: one series for each combination of label values with which `labels` was called."""

    __slots__ = ("_children", "_make", "_names", "help", "kind", "name")

    def __init__(self, name: str, kind: str, text: str, names: Sequence[str], make: Callable[[], C]) -> None:
        self.name = name
        self.kind = kind
        self.help = text
        self._names = names
        self._make: Callable[[], C] = make
        self._children: dict[tuple[str, ...], C] = {}

    def labels(self, *values: str) -> C:
        """Return the series with these label values (in the order of the label names); the first call creates it."""
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self._names):
                raise ValueError(f"{self.name} has the labels {', '.join(self._names)}, got {len(values)} values")
            child = self._children[values] = self._make()
        return child

    def clear(self) -> None:
        """Remove all series."""
        self._children.clear()

    def render(self) -> Iterable[str]:
        """Yield the family's lines of Prometheus text; none while there is no series."""
        if self._children:
            yield _head(self.name, self.kind, self.help)
        for values, child in sorted(self._children.items()):
            # Sorted by label name, as in the Go client.
            pairs = sorted(zip(self._names, values, strict=True))
            own = ",".join(f'{name}="{_escaped(value, quoted=True)}"' for name, value in pairs)
            for suffix, more, value in child.samples():
                labels = f"{{{','.join(filter(None, (own, more)))}}}" if own or more else ""
                yield f"{self.name}{suffix}{labels} {number_text(value)}\n"


Single = tuple[str, str, str, float]
"""A series without labels, with a value that is read at each rendering: name, kind, help, value."""


class MetricRegistry:
    """The families of one program; there is no global registry."""

    def __init__(self) -> None:
        self._families: dict[str, MetricFamily[Any]] = {}
        self._collectors: list[Callable[[], Iterable[Single]]] = []

    @property
    def helps(self) -> Iterable[str]:
        """The help texts of all families, with or without series."""
        return [family.help for family in self._families.values()]

    def counter(self, name: str, text: str, *labels: str) -> MetricFamily[CounterMetric]:
        """Create a family of counters; the name ends with _total by convention."""
        return self._add(MetricFamily(name, "counter", text, labels, CounterMetric))

    def gauge(self, name: str, text: str, *labels: str) -> MetricFamily[GaugeMetric]:
        """Create a family of gauges."""
        return self._add(MetricFamily(name, "gauge", text, labels, GaugeMetric))

    def histogram(self, name: str, text: str, bounds: Sequence[float], *labels: str) -> MetricFamily[Histogram]:
        """Create a family of histograms with these ascending upper bounds and infinity."""
        texts = [f'le="{number_text(bound)}"' for bound in (*bounds, math.inf)]
        return self._add(MetricFamily(name, "histogram", text, labels, lambda: Histogram(bounds, texts)))

    def collect(self, collector: Callable[[], Iterable[Single]]) -> None:
        """At each rendering, add the series that the function returns. The function must be fast and not raise."""
        self._collectors.append(collector)

    def render(self) -> bytes:
        """Return everything as text, sorted by name."""
        chunks: dict[str, str] = {name: "".join(family.render()) for name, family in self._families.items()}
        for collector in self._collectors:
            for name, kind, text, value in collector():
                chunks[name] = f"{_head(name, kind, text)}{name} {number_text(value)}\n"
        return "".join(chunks[name] for name in sorted(chunks)).encode()

    def _add(self, family: MetricFamily[C]) -> MetricFamily[C]:
        if family.name in self._families:
            raise ValueError(f"the metric {family.name} exists already")
        self._families[family.name] = family
        return family


def _head(name: str, kind: str, text: str) -> str:
    return f"# HELP {name} {_escaped(text)}\n# TYPE {name} {kind}\n"


def _escaped(text: str, *, quoted: bool = False) -> str:
    """Return a help text, or a quoted label value, with the escapes of the format."""
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text


def number_text(value: float) -> str:
    """Return a number as Go writes it (strconv 'g', shortest), because bucket labels are compared as text."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value:+}".replace("inf", "Inf")
    text = repr(float(value))
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return text.removesuffix(".0")
    digits = text.partition("e")[0].replace(".", "").strip("-0")
    # Only the exponent of this format is used: for some powers of two, its digits would be read as another number.
    exponent = f"{value:.{len(digits) - 1}e}".partition("e")[2]
    return f"{'-' * (value < 0)}{digits[0]}{'.' * (len(digits) > 1)}{digits[1:]}e{exponent}"
