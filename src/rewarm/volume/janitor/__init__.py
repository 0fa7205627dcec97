"""What keeps a root within its capacity and in order, in a process of its own: ``python -m rewarm.volume.janitor``.

Every process that writes to a volume starts one; the one that holds the lock works, the others wait for it to end. Two
that work at once (a lock lost on NFS) are harmless: each removes files that the other may have removed already.
"""
