"""Errors of the package e2e."""

from __future__ import annotations


class E2EError(Exception):
    """A run cannot start or continue; the message contains the reason and the remedy."""
