"""Every axis alone and every mix of them, as the tables of several tests run them."""

from __future__ import annotations

from typing import Any

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp2-interleaved": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "dp_replicate2": {"dp_replicate": 2},
    "dp_shard2": {"dp_shard": 2},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "tp2-dp2": {"tp": 2, "dp_shard": 2},
    "pp2-dp2": {"pp": 2, "dp_shard": 2},
    "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
    "tp2-pp2-dp2": {"tp": 2, "pp": 2, "dp_shard": 2},
}
