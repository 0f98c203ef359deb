"""Traces, for all processes: what the gateway and the daemons share to tell a collector where time went."""
