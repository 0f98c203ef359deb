"""The deterministic simulator: whole clusters in one process, under virtual time, from one seed."""
