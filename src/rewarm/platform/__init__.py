"""What this machine can do: probes that answer with Findings."""
