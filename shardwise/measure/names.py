"""What the launcher and the ranks of a measurement call things. Imports no torch."""

from __future__ import annotations

TARGET = "shardwise.measure.worker:measure"
REQUEST, ANSWER = "request.json", "samples.json"  # files in the folder of a measurement
PRECISIONS = ("fp32", "bf16")
