"""The page /ui/ of the metrics server: its content, its access rules, and the events for open pages."""

from typing import Final

ROOT: Final = "/ui/"
ANSWERS: Final = ("facts", "services", "service", "why", "events", "look", "find", "journal")
"""The paths of the page's requests, relative to ROOT and api/."""
PATHS: Final = (ROOT[:-1], ROOT, *(f"{ROOT}api/{name}" for name in ANSWERS))
