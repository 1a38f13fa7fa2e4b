"""What a split of a model over devices costs in time and memory, without torch and without a device.

``job`` is the question. ``search`` answers it: ``space`` lists the candidates, ``screen``, ``bounds`` and ``sweep``
judge all of them at once, ``refine`` and ``boundaries`` the best stage by stage. One configuration: ``cost`` adds up
``compute``, ``collectives``, ``data`` and ``simulate`` for its time, ``memory`` adds up ``state`` and ``buffers``;
``layout`` says what is computed how, ``shape`` and ``known`` what the model costs, ``host`` what is different on a CPU.
``explain``, ``refusal`` and ``timeline`` say why. Against measured runs: ``runs``, ``software``, ``accuracy``,
``calibrate``.
"""
