"""What people read: answers of other rooms, which are data, as tables, lines and one page.

``console`` shows a run before it starts, ``answers`` what a model says after it; ``plans``, ``plan_page``,
``estimates``, ``measured``, ``models``, ``data`` and ``checking`` belong to the commands of these names, ``results`` to
all of them.
"""
