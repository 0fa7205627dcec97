"""Measurements that stand side by side: Rewarm, the floor below it, and what a server has without it.

Every bench runs its sides in turn, in one process and on one directory, and gives its figures as ``rewarm.bench/1``
(report.py). The floor is what a plain reader gets from the same device in the same minute; the peer is vLLM's own
file system tier, its real classes driven on the same chunks. Goals stand in bench/goals.toml of the source tree.
"""
