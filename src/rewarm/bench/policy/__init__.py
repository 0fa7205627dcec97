"""The load-or-recompute policies on a simulated server: against the best schedule, and on recorded traces."""
