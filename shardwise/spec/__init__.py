"""What rooms hand to each other, as frozen data with its rules. Nothing here imports torch.

The run: ``run`` (every key of run.yaml) and ``rules`` (its checks), ``aliases``, ``filled``, ``ranges``, ``template``.
The model as its files tell it: ``model``, ``counts``, ``weight_files``, ``block`` (what its parts cost), ``presets``.
The split: ``strategy``, ``schedule``, ``layout`` (which part of a parameter is whose), ``plan``, ``given_plan``. The
machine: ``cluster``. What several rooms compute alike: ``flops``, ``compiling``, ``tolerance``; where they keep it:
``cache``, ``described``, ``data_files``.
"""
