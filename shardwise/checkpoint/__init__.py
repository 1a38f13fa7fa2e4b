"""Weights and training state on disk: read and written by slices, so that no rank holds the whole.

Hugging Face's folders: ``hf`` reads a rank's slices, ``safetensors`` the bytes of one, ``naming`` and ``compose`` lead
from their names to those of the modules; ``export`` writes one, ``companions`` what lies beside the weights,
``adapter`` and ``merge`` do the same for LoRA. Checkpoints of a run: ``store`` (torch's DCP) and ``reader``,
``save_job`` on the way to the disk, ``shelf`` for what becomes of the older ones, ``listing`` for what is known of one
without torch.
"""
