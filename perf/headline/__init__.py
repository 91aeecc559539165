"""The papers' headline experiments on this GPU: models of the true shape with random weights, against their peers.

    python -m perf.headline                          run all; --only NAME runs one; --out FOLDER for the JSON
    python -m perf.headline.generate                 run that experiment alone: systems, shapes, a limit; it resumes
    python -m perf.headline.page FOLDER              print the figures as a table, as in the report

The speed does not depend on the values of the weights. Some states are built by filling their buffers, because the
speed depends only on the layout and number of bytes. Each module says what it reproduces and what differs from the
paper.
"""

#: In the order of execution.
EXPERIMENTS = ("longflow", "thinkv", "epikv", "keydiff", "synckv", "memory", "generate")
