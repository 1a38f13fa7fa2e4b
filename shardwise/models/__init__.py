"""A Hugging Face model, unmodified: how it is built on meta, what it is made of, and what it computes.

``build`` makes it, ``structure`` tells its blocks, ``describe`` their sizes, ``kinds`` which blocks are alike.
``trace``, ``passes``, ``meter``, ``flow`` and ``origins`` watch a pass on fake tensors; ``chain`` and ``packing`` prove
by it what a pipeline and packed rows need. ``shrink`` (with ``sizes`` and ``small_config``) makes the small copy that
proofs run on. ``init`` and ``own_init`` draw weights, ``shard`` holds a rank's part of one; ``lora`` puts adapters in.
"""
