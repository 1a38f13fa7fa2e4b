"""Whether this run takes every row of the large tables (``pytest --long``) or leaves out those that repeat others."""

from __future__ import annotations

EVERYTHING = False  # set by conftest before any test is imported
