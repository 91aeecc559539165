"""Tests of states whose heads are spread over the ranks of torch.distributed: processes, each on a GPU or on the CPU.

pool.py starts the processes. Each of them runs the same function of worker.py with the same arguments. sharded.py shows
the judge the states of all ranks as one.
"""
