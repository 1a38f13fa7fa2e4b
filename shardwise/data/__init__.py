"""Rows of a data set: read, checked, tokenised, put in order and cut into batches.

``readers`` (with ``source`` and ``memory``) hands out what files hold, ``detect`` and ``convert`` turn it into the
inner form of ``format``, ``encode`` (with ``chat``, ``turns`` and ``pairs``) into tokens; ``tokenise`` does so for many
rows, ``tally`` counts what is left out, ``store`` keeps the rest, ``prepared`` and ``child`` do it ahead, once.
``mixing`` joins sources, ``order`` says when a row is used, ``pack`` where it lies in a step, ``batch`` and ``loader``
hand rows to the trainer. Only the last two need torch, and this module needs none of them, so that a data set can be
checked without torch.
"""
