"""The papers' headline experiments on this GPU: models of the true shape with random weights, each beside its peers.

    python -m perf.headline                          all of them; --only NAME for one; --out FOLDER for the JSON
    python -m perf.headline.page FOLDER              the figures as a table, as the report has it

Speed does not depend on what the weights are, nor, where a state is built by filling its buffers, on how it came about:
what counts is how many bytes it holds where. Each module says what it imitates and what differs from the paper.
"""

#: In the order in which they run.
EXPERIMENTS = ("longflow", "thinkv", "epikv", "keydiff", "synckv", "memory")
