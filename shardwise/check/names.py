"""Where the launcher of a check and its ranks meet: files of its folder, and the function that a rank calls."""

from __future__ import annotations

TARGET = "shardwise.check.ranks:work"
RUN, PLAN, LAYOUT, REPORT = "checked.yaml", "plan.json", "layout.json", "report.json"
