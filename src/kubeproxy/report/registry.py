"""Counters, gauges and histograms with labels, and their Prometheus text form (exposition format 0.0.4).

Written here because the Prometheus client costs 25-50 ms and 5 MB to import. Knows no metric of the program: those are
in metrics.py. Not thread safe: everything is counted on the event loop's thread.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Generic, Protocol, TypeVar

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Child(Protocol):
    """One time series, or one histogram's time series, of a family."""

    def samples(self) -> Iterable[tuple[str, str, float]]:
        """Return (suffix of the name, additional label text, value) of each sample."""


C = TypeVar("C", bound=Child)


class CounterMetric:
    """A number that only grows."""

    __slots__ = ("_function", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._function: Callable[[], float] | None = None

    def inc(self, by: float = 1.0) -> None:
        """Count; a negative number is an error of the caller."""
        if by < 0:
            raise ValueError(f"a counter cannot go down by {-by}")
        self.value += by

    def reached(self, total: float) -> None:
        """Take over a total that is counted elsewhere, as by the kernel; a smaller one than before is passed over."""
        self.value = max(self.value, total)

    def follow(self, function: Callable[[], float]) -> None:
        """Ask this function for the total whenever metrics are rendered; it must be quick and not raise."""
        self._function = function

    def samples(self) -> Iterable[tuple[str, str, float]]:
        """Return its one sample."""
        if self._function is not None:
            self.reached(self._function())
        return (("", "", self.value),)


class GaugeMetric:
    """A number that goes up and down; or a function that tells it when it is asked for."""

    __slots__ = ("_function", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._function: Callable[[], float] | None = None

    def set(self, value: float) -> None:
        """Set the number."""
        self.value = value

    def follow(self, function: Callable[[], float]) -> None:
        """Ask this function from now on, whenever metrics are rendered; it must be quick and not raise."""
        self._function = function

    def samples(self) -> Iterable[tuple[str, str, float]]:
        """Return its one sample."""
        return (("", "", self._function() if self._function else self.value),)


class Histogram:
    """Counts of observations up to each bound, and their sum."""

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
        """How many observations there were."""
        return sum(self._counts)

    def samples(self) -> Iterable[tuple[str, str, float]]:
        """Return the cumulative buckets, the sum and the count."""
        seen = 0
        for label, number in zip(self._labels, self._counts, strict=True):
            seen += number
            yield "_bucket", label, seen
        yield "_sum", "", self.total
        yield "_count", "", seen


class MetricFamily(Generic[C]):
    """All time series of one name: one for each combination of label values that was asked for."""

    __slots__ = ("_children", "_make", "_names", "help", "kind", "name")

    def __init__(self, name: str, kind: str, text: str, names: Sequence[str], make: Callable[[], C]) -> None:
        self.name = name
        self.kind = kind
        self.help = text
        self._names = names
        self._make = make
        self._children: dict[tuple[str, ...], C] = {}

    def labels(self, *values: str) -> C:
        """Return the series of these label values, in the order of the label names; it appears from now on."""
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self._names):
                raise ValueError(f"{self.name} has the labels {', '.join(self._names)}, got {len(values)} values")
            child = self._children[values] = self._make()
        return child

    def clear(self) -> None:
        """Forget all series, as before a set of label values is reported anew."""
        self._children.clear()

    def render(self) -> Iterable[str]:
        """Yield its lines; none while it has no series."""
        if not self._children:
            return
        yield f"# HELP {self.name} {escape_help(self.help)}\n"
        yield f"# TYPE {self.name} {self.kind}\n"
        for values, child in sorted(self._children.items()):
            # Sorted by label name, as the Go client does.
            pairs = sorted(zip(self._names, values, strict=True))
            own = ",".join(f'{name}="{escape_label(value)}"' for name, value in pairs)
            for suffix, more, value in child.samples():
                labels = f"{own},{more}" if own and more else own or more
                yield (
                    f"{self.name}{suffix}{{{labels}}} {number_text(value)}\n"
                    if labels
                    else (f"{self.name}{suffix} {number_text(value)}\n")
                )


Single = tuple[str, str, str, float]
"""A series without labels that is read when rendering: name, kind, help, value."""


class MetricRegistry:
    """The families of one program, created explicitly: there is no global one."""

    def __init__(self) -> None:
        self._families: dict[
            str, MetricFamily[CounterMetric] | MetricFamily[GaugeMetric] | MetricFamily[Histogram]
        ] = {}
        self._collectors: list[Callable[[], Iterable[Single]]] = []

    @property
    def helps(self) -> Iterable[str]:
        """The help texts of all families, whether or not they have a series."""
        return [family.help for family in self._families.values()]

    def counter(self, name: str, text: str, *labels: str) -> MetricFamily[CounterMetric]:
        """Make a family of counters; the name ends with _total by convention."""
        return self._add(MetricFamily(name, "counter", text, labels, CounterMetric))

    def gauge(self, name: str, text: str, *labels: str) -> MetricFamily[GaugeMetric]:
        """Make a family of gauges."""
        return self._add(MetricFamily(name, "gauge", text, labels, GaugeMetric))

    def histogram(self, name: str, text: str, bounds: Sequence[float], *labels: str) -> MetricFamily[Histogram]:
        """Make a family of histograms with these ascending upper bounds; the last one, infinity, is added."""
        texts = [f'le="{number_text(bound)}"' for bound in (*bounds, math.inf)]
        return self._add(MetricFamily(name, "histogram", text, labels, lambda: Histogram(bounds, texts)))

    def collect(self, collector: Callable[[], Iterable[Single]]) -> None:
        """Ask this function for more series whenever metrics are rendered; it must be quick and not raise."""
        self._collectors.append(collector)

    def render(self) -> bytes:
        """Return everything as text, sorted by name."""
        chunks: dict[str, str] = {name: "".join(family.render()) for name, family in self._families.items()}
        for collector in self._collectors:
            for name, kind, text, value in collector():
                chunks[name] = f"# HELP {name} {escape_help(text)}\n# TYPE {name} {kind}\n{name} {number_text(value)}\n"
        return "".join(chunks[name] for name in sorted(chunks)).encode()

    def _add(self, family: F) -> F:
        if family.name in self._families:
            raise ValueError(f"the metric {family.name} exists already")
        self._families[family.name] = family
        return family


F = TypeVar("F", MetricFamily[CounterMetric], MetricFamily[GaugeMetric], MetricFamily[Histogram])


def escape_label(value: str) -> str:
    """Escape a label value."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def escape_help(text: str) -> str:
    """Escape a help text."""
    return text.replace("\\", "\\\\").replace("\n", "\\n")


_SPECIAL: Final[Mapping[float, str]] = {math.inf: "+Inf", -math.inf: "-Inf"}


def number_text(value: float) -> str:
    """Write a number as Go does (strconv 'g', shortest): bucket labels are compared as text, and so must not differ."""
    if value != value:  # noqa: PLR0124 - not a number
        return "NaN"
    if value in _SPECIAL:
        return _SPECIAL[value]
    text = repr(float(value))
    magnitude = abs(value)
    if magnitude == 0 or 1e-4 <= magnitude < 1e6:
        return text.removesuffix(".0")
    sign = "-" if value < 0 else ""
    mantissa, _, exponent_text = text.removeprefix("-").partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    exponent = int(exponent_text or 0)
    exponent += len(whole) - 1 if whole.strip("0") else -(len(fraction) - len(fraction.lstrip("0")) + 1)
    digits = digits.rstrip("0")
    shown = digits[0] + ("." + digits[1:] if len(digits) > 1 else "")
    return f"{sign}{shown}e{'-' if exponent < 0 else '+'}{abs(exponent):02d}"
