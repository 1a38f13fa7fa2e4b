"""What transformers works out once a process, worked out in the fork server. Importing it acts; nothing else does.

Its table of conversions compiles a thousand regular expressions, half a second for each worker that loads a model.
"""

from __future__ import annotations

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
