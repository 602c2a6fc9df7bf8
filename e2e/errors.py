"""Errors of this room."""

from __future__ import annotations


class E2EError(Exception):
    """A run cannot start or go on; the message says why and what to do."""
