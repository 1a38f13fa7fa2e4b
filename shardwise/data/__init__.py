"""Rows of a data set: read, checked, tokenised, put in order and cut into batches.

``source`` reads files, ``format`` and ``chat`` turn what stands in them into token ids, ``rows`` decides which of them
are used, ``order`` says when, ``batch`` and ``loader`` hand them to the trainer. Only the last two import torch, and
this module imports none of them, so that a data set can be checked without torch.
"""
