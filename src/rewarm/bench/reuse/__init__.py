"""Which records a volume should keep: reuse traces, and what each order of eviction makes of them."""
