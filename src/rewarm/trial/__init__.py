"""Trials: does a model server get its KV cache back from flash faster, and right, and how sure is that?

plan (what is asked) -> schedule (which block when) -> run (servers, requests, cold proofs) -> evidence (what was seen)
-> analysis (statistics, proofs, gates) -> report. All that follows from the evidence can be computed again from it.
"""
